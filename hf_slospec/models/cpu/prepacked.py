"""Linear layers on a CPU, their weights kept a second time in the layout of oneDNN's matrix kernels.

``torch.nn.functional.linear`` works on weights as they lie, which for the few tokens of a step takes 1.3 to 2.5 times
as long. Torch's own compiler packs frozen weights with the same operators; here it is done without compiling, and only
for packed forwards: what the model computes for everybody else stays what it was.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.models.compatibility.hooks import changing_hooks, is_compiled
from hf_slospec.models.memory import free_memory

logger = logging.getLogger(__name__)

FREE_SHARE = 0.25  # of the free memory that the copies may take unasked
TYPICAL_TOKENS = 8  # of a step; the layout may depend on it
SAMPLES = 256  # elements of a weight that tell whether it was changed behind torch's back
MANY_ROWS = 16384  # an output layer has, and one row may be written alone, for a new token: so each is sampled
TOLERANCE = 0.05  # relative; beyond rounding in any dtype


class _Copy:
    """A layer's weight in the kernels' layout, and what it was made of."""

    def __init__(self, linear: nn.Linear):
        self.linear = linear
        self.make()

    def make(self) -> None:
        weight = self.linear._parameters.get("weight")
        self.packed: torch.Tensor | None = None  # what the weight has become has no such layout
        self.num_bytes = 0
        if weight is not None and _is_usual(weight):
            with torch.no_grad():
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_TOKENS)
                self.samples = _samples(weight)
            self.weight, self.version, self.address = weight, weight._version, weight.data_ptr()
            self.packed, self.num_bytes = packed, weight.nbytes

    def current(self) -> torch.Tensor | None:
        """Of the weight as it is now, as far as torch counts changes."""
        weight: Any = self.linear._parameters.get("weight")  # at every forward: the attribute takes five times as long
        if not self._is_of(weight):
            self.make()
        return self.packed

    def renew(self) -> None:
        """Writing through ``weight.data``, as merging an adapter does, is not counted."""
        weight: Any = self.linear._parameters.get("weight")
        if not (self._is_of(weight) and weight.is_contiguous() and torch.equal(self.samples, _samples(weight))):
            self.make()

    def _is_of(self, weight: Any) -> bool:
        is_made_of = self.packed is not None and self.weight is weight
        return is_made_of and self.version == weight._version and self.address == weight.data_ptr()


# One of a layer, as long as anybody uses it; by id of the layer, which the copy holds.
_copies: WeakValueDictionary[int, _Copy] = WeakValueDictionary()
_in_use: dict[int, tuple[int, list[nn.Linear]]] = {}  # id(model) -> packed forwards that run now, and their layers
_lock = threading.Lock()
_ours: ContextVar[Mapping[nn.Linear, _Copy]] = ContextVar("hf_slospec_prepacked", default={})  # noqa: B039  read only

if hasattr(os, "register_at_fork"):  # else a child might inherit it locked
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Prepacked(nn.Linear):
    """What a layer is while a packed forward runs. Nothing else about it changes, so another thread may copy it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        copy = _ours.get().get(self)
        packed = None if copy is None or not input.numel() else copy.current()
        if packed is None:  # not super(): in another thread the layer may be a plain one again by now
            return F.linear(input, self.weight, self.bias)
        return _linear(input, packed, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), self.__dict__


class PrepackedLinears:
    """The linear layers of one model that have such copies."""

    def __init__(self, model: nn.Module, wanted: bool | None):
        """``wanted``: None means where the copies take at most a quarter of the free memory."""
        self._model, self._is_wanted = model, wanted is not False
        self._copies: dict[nn.Linear, _Copy] = {}
        new_bytes = sum(linear.weight.nbytes for linear in self._candidates() if id(linear) not in _copies)
        if new_bytes and wanted is None and new_bytes > FREE_SHARE * free_memory():
            logger.info(
                "weights of %s are not kept a second time for speed: that would take %.1f GiB, more than a quarter "
                "of the free memory; SLOSpecConfig(prepack=True) does it all the same",
                type(model).__name__,
                new_bytes / 2**30,
            )
            self._is_wanted = False
        self.renew()

    @property
    def num_bytes(self) -> int:
        return sum(copy.num_bytes for copy in self._copies.values())

    def __len__(self) -> int:
        return len(self._copies)

    def renew(self) -> None:
        """Look at the model as it is now: its layers may be others, and weights changed by whatever means."""
        copies = {}
        for linear in self._candidates():
            copies[linear] = _copies.get(id(linear)) or _copies.setdefault(id(linear), _Copy(linear))
            copies[linear].renew()
        self._copies = copies

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within, the model's linear layers compute with the copies, in this thread only."""
        if not (copies := self._copies):
            yield
            return
        with _lock:  # threads may forward the same model at the same time: the last one out tidies up
            count, layers = _in_use.get(id(self._model), (0, list(copies)))
            _in_use[id(self._model)] = count + 1, layers
            if not count:
                _turn(layers, nn.Linear, _Prepacked)
        token = _ours.set(copies)
        try:
            yield
        finally:
            _ours.reset(token)
            with _lock:
                count, layers = _in_use.pop(id(self._model))
                if count > 1:
                    _in_use[id(self._model)] = count - 1, layers
                else:
                    _turn(layers, _Prepacked, nn.Linear)

    def _candidates(self) -> list[nn.Linear]:
        """Plain linear layers on a CPU: no hooks, no quantised weights, nothing that replaces their forward."""
        if not self._is_wanted or is_compiled(self._model) or torch.is_autocast_enabled("cpu"):
            return []
        layers = (module for module in self._model.modules() if type(module) in (nn.Linear, _Prepacked))
        return [layer for layer in layers if _is_plain(layer)]


def _turn(layers: list[nn.Linear], old: type[nn.Linear], new: type[nn.Linear]) -> None:
    for layer in layers:
        if type(layer) is old:  # it may have been parametrised meanwhile, say
            object.__setattr__(layer, "__class__", new)  # a module's own takes twenty times as long


def _linear(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Of any number of rows, by kernels for few numbers: oneDNN keeps half a megabyte or more for each."""
    rows = input.numel() // input.shape[-1]
    missing = -rows % _step(rows)
    if not missing:
        return torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
    larger = F.pad(input.reshape(rows, -1), (0, 0, 0, missing))
    out = torch.ops.mkldnn._linear_pointwise(larger, packed, bias, "none", [], "")
    return out[:rows].view(*input.shape[:-1], -1)


def _step(rows: int) -> int:
    """Numbers of rows are rounded up to a multiple of it: by an eighth at most."""
    return 1 << max(rows.bit_length() - 4, 0) if rows < 512 else 64


def _is_plain(linear: nn.Linear) -> bool:
    is_replaced = "forward" in linear.__dict__ or hasattr(linear, "_hf_hook")
    weight = linear._parameters.get("weight")
    return weight is not None and not (is_replaced or changing_hooks(linear)) and _is_usual(weight)


def _is_usual(weight: nn.Parameter) -> bool:
    is_dense = weight.device.type == "cpu" and weight.layout is torch.strided and weight.is_contiguous()
    is_own = type(weight) is nn.Parameter and not weight.is_inference()
    return is_own and is_dense and weight.numel() > 0 and _works(weight.dtype)


def _samples(weight: nn.Parameter) -> torch.Tensor:
    every = max(weight.numel() // SAMPLES, 1) | 1
    if len(weight) > MANY_ROWS:
        every = min(every, max(weight.shape[1] - 1, 1))
    return weight.detach().view(-1)[::every].clone()


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
