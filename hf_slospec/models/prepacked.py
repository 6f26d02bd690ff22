"""Linear layers on a CPU, their weights kept a second time in the layout of oneDNN's matrix kernels.

``torch.nn.functional.linear`` works on weights as they lie, which for the few tokens of a step takes 1.3 to 2.5 times
as long. Torch's own compiler packs frozen weights with the same operators; here it is done without compiling, and only
for packed forwards: what the model computes for everybody else stays what it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
import torch.nn.functional as F
from torch import nn

logger = logging.getLogger(__name__)

FREE_SHARE = 0.25  # of the free memory that the copies may take unasked
TYPICAL_TOKENS = 8  # of a step; the layout may depend on it
SAMPLES = 256  # elements of a weight that tell whether it was changed behind torch's back
TOLERANCE = 0.05  # relative; beyond rounding in any dtype


class _Copy:
    """A layer's weight in the kernels' layout, and what it was made of."""

    def __init__(self, weight: nn.Parameter):
        self.make(weight)

    def make(self, weight: nn.Parameter) -> None:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_TOKENS)
        self.packed, self.weight, self.version, self.address = packed, weight, weight._version, weight.data_ptr()
        self.samples = _samples(weight)

    def is_of(self, weight: nn.Parameter) -> bool:
        """As far as torch counts changes."""
        return self.weight is weight and self.version == weight._version and self.address == weight.data_ptr()

    def looks_like(self, weight: nn.Parameter) -> bool:
        """Writing through ``weight.data``, as merging an adapter does, is not counted."""
        return self.is_of(weight) and torch.equal(self.samples, _samples(weight))


_Forward = tuple[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]
_copies: WeakKeyDictionary[nn.Linear, _Copy] = WeakKeyDictionary()  # one of a layer, whoever uses it
_in_use: dict[int, tuple[int, list[_Forward]]] = {}  # id(model) -> packed forwards that run now, and what they put in
_lock = threading.Lock()
_is_ours: ContextVar[bool] = ContextVar("hf_slospec_prepacked", default=False)


class PrepackedLinears:
    """The linear layers of one model that have such copies."""

    def __init__(self, model: nn.Module, wanted: bool | None):
        """``wanted``: None means where the copies take at most a quarter of the free memory."""
        found = [] if wanted is False or _is_compiled(model) else _candidates(model)
        new_bytes = sum(linear.weight.nbytes for linear in found if linear not in _copies)
        if found and wanted is None and new_bytes > FREE_SHARE * psutil.virtual_memory().available:
            logger.info(
                "weights of %s are not kept a second time for speed: that would take %.1f GiB, more than a quarter "
                "of the free memory; SLOSpecConfig(prepack=True) does it all the same",
                type(model).__name__,
                new_bytes / 2**30,
            )
            found = []
        self._model = model
        with torch.no_grad():
            for linear in found:
                if linear not in _copies:
                    _copies[linear] = _Copy(linear.weight)
        self._copies = {linear: _copies[linear] for linear in found}
        self._forwards = [(linear, _forward_of(linear, copy)) for linear, copy in self._copies.items()]
        self.renew()  # an older generator's copies may be of older weights

    @property
    def num_bytes(self) -> int:
        return sum(copy.weight.nbytes for copy in self._copies.values())

    def __len__(self) -> int:
        return len(self._forwards)

    def renew(self) -> None:
        """Make copies of weights that were changed, by whatever means."""
        with torch.no_grad():
            for linear, copy in self._copies.items():
                if not copy.looks_like(linear.weight):
                    copy.make(linear.weight)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model's linear layers compute with the copies, in this thread only."""
        if not self._forwards:
            yield
            return
        for linear, copy in self._copies.items():
            weight: Any = linear._parameters["weight"]  # at every forward: the attribute takes five times as long
            if not copy.is_of(weight):
                copy.make(weight)
        with _lock:  # threads may forward the same model at the same time: the last one out tidies up
            count, put_in = _in_use.get(id(self._model), (0, self._forwards))
            _in_use[id(self._model)] = count + 1, put_in
            if not count:
                for linear, forward in put_in:
                    linear.__dict__["forward"] = forward
        token = _is_ours.set(True)
        try:
            yield
        finally:
            _is_ours.reset(token)
            with _lock:
                count, put_in = _in_use.pop(id(self._model))
                if count > 1:
                    _in_use[id(self._model)] = count - 1, put_in
                else:
                    for linear, _ in put_in:
                        linear.__dict__.pop("forward", None)


def _forward_of(linear: nn.Linear, copy: _Copy) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(input: torch.Tensor) -> torch.Tensor:
        if not _is_ours.get() or not input.numel():
            return F.linear(input, linear.weight, linear.bias)
        return _linear(input, copy.packed, linear.bias)

    return forward


def _linear(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")


def _candidates(model: nn.Module) -> list[nn.Linear]:
    """Plain linear layers on a CPU: no hooks, no quantised weights, nothing that replaces their forward."""
    if torch.is_autocast_enabled("cpu"):
        return []
    return [module for module in model.modules() if type(module) is nn.Linear and _is_plain(module)]


def _is_plain(linear: nn.Linear) -> bool:
    weight = linear.weight
    is_replaced = getattr(linear.__dict__.get("forward"), "__module__", __name__) != __name__  # by others than us
    is_touched = is_replaced or linear._forward_hooks or linear._forward_pre_hooks or hasattr(linear, "_hf_hook")
    is_usual = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    return is_usual and not is_touched and not weight.is_inference() and _works(weight.dtype)


def _is_compiled(model: nn.Module) -> bool:
    """By the user: the compiler's guards would take our forwards for changes of the model."""
    return hasattr(model, "_orig_mod") or any(module._compiled_call_impl is not None for module in model.modules())


def _samples(weight: nn.Parameter) -> torch.Tensor:
    flat = weight.detach().view(-1)
    return flat[:: max(len(flat) // SAMPLES, 1) | 1].clone()


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Whether this torch on this machine can do it, by trying."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return False
    weight, rows = (torch.linspace(-1, 1, n * 64).sin().view(n, 64).to(dtype) for n in (32, 4))
    try:
        ours = _linear(rows, torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS), None)
    except (AttributeError, RuntimeError) as error:
        logger.debug("linear layers in %s cannot be prepacked: %s", dtype, error)
        return False
    plain = F.linear(rows, weight).double()
    return bool((ours.double() - plain).norm() <= TOLERANCE * plain.norm())
