"""Linear layers on a CPU with second copies of their weights in the layout of oneDNN's matrix kernels.

``torch.nn.functional.linear`` uses weights in their plain layout, which for the few tokens of a step takes 1.3 to 2.5
times as long. Torch's compiler packs frozen weights with the same operators; here they are packed without compilation,
and for packed forwards only: all other forwards of the model stay as they were.
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

FREE_SHARE = 0.25  # of the free memory; most that the copies take with prepack=None
TYPICAL_TOKENS = 8  # of a step; the layout may depend on it
SAMPLES = 256  # elements of a weight compared to find changes that torch does not count
MANY_OUTPUTS = 16384  # output layers have more; one output may be changed alone, for a new token, so each is sampled
TOLERANCE = 0.05  # relative; above rounding in any dtype


class _PackedWeight:
    """A layer's weight in the kernels' layout, and the state of the weight it was made from."""

    def __init__(self, linear: nn.Linear):
        self.linear = linear
        self.make()

    def make(self) -> None:
        weight = self.linear._parameters.get("weight")
        self.packed: torch.Tensor | None = None  # stays None if the weight cannot be packed
        self.num_bytes = 0
        if weight is not None and _is_usual(weight):
            with torch.no_grad():
                packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), TYPICAL_TOKENS)
                self.samples = _samples(weight)
            self.weight, self.version, self.address = weight, weight._version, weight.data_ptr()
            self.packed, self.num_bytes = packed, weight.nbytes

    def current(self) -> torch.Tensor | None:
        """Return the packed weight, made anew if torch has counted a change of the weight."""
        weight: Any = self.linear._parameters.get("weight")  # in every forward: the attribute takes five times as long
        if not self._is_of(weight):
            self.make()
        return self.packed

    def renew(self) -> None:
        """Update the packed weight if samples differ: torch counts no writes to ``weight.data`` (merged adapters)."""
        weight: Any = self.linear._parameters.get("weight")
        if not (self._is_of(weight) and weight.is_contiguous() and torch.equal(self.samples, _samples(weight))):
            self.make()

    def _is_of(self, weight: Any) -> bool:
        is_made_of = self.packed is not None and self.weight is weight
        return is_made_of and self.version == weight._version and self.address == weight.data_ptr()


# id(layer) -> its packed weight, which holds the layer; shared by all users of the layer.
_shared: WeakValueDictionary[int, _PackedWeight] = WeakValueDictionary()
_in_use: dict[int, tuple[int, list[nn.Linear]]] = {}  # id(model) -> number of running packed forwards, their layers
_lock = threading.Lock()
_active: ContextVar[Mapping[nn.Linear, _PackedWeight]] = ContextVar("hf_slospec_prepacked", default={})  # noqa: B039  read only

if hasattr(os, "register_at_fork"):  # otherwise a child process could inherit the lock held
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class _Prepacked(nn.Linear):
    """Class of a layer while a packed forward runs; nothing else of the layer changes, so other threads may copy it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        copy = _active.get().get(self)
        packed = None if copy is None or not input.numel() else copy.current()
        if packed is None:  # not super(): another thread may have made the layer a plain one again
            return F.linear(input, self.weight, self.bias)
        return _linear(input, packed, self.bias)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (nn.Linear,), self.__dict__


class PrepackedLinears:
    """The linear layers of one model that have packed weights."""

    def __init__(self, model: nn.Module, wanted: bool | None):
        """``wanted``: whether to pack; None: if the copies take at most a quarter of the free memory."""
        self._model, self._is_wanted = model, wanted is not False
        self._copies: dict[nn.Linear, _PackedWeight] = {}
        new_bytes = sum(linear.weight.nbytes for linear in self._candidates() if id(linear) not in _shared)
        if new_bytes and wanted is None and new_bytes > FREE_SHARE * free_memory():
            logger.info(
                "weights of %s are not prepacked: the copies would take %.1f GiB, more than a quarter of the free "
                "memory; SLOSpecConfig(prepack=True) makes them all the same",
                type(model).__name__,
                new_bytes / 2**30,
            )
            self._is_wanted = False
        self.renew()

    @property
    def num_bytes(self) -> int:
        """Bytes of the copies."""
        return sum(copy.num_bytes for copy in self._copies.values())

    def __len__(self) -> int:
        return len(self._copies)

    def renew(self) -> None:
        """Update the copies to the model's present layers and weights, however they were changed."""
        copies = {}
        for linear in self._candidates():
            copies[linear] = _shared.get(id(linear)) or _shared.setdefault(id(linear), _PackedWeight(linear))
            copies[linear].renew()
        self._copies = copies

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Make the model's linear layers compute with the copies inside this context, in this thread only."""
        if not (copies := self._copies):
            yield
            return
        with _lock:  # threads may forward the same model at the same time; the last to finish restores the layers
            count, layers = _in_use.get(id(self._model), (0, list(copies)))
            _in_use[id(self._model)] = count + 1, layers
            if not count:
                _set_class(layers, nn.Linear, _Prepacked)
        token = _active.set(copies)
        try:
            yield
        finally:
            _active.reset(token)
            with _lock:
                count, layers = _in_use.pop(id(self._model))
                if count > 1:
                    _in_use[id(self._model)] = count - 1, layers
                else:
                    _set_class(layers, _Prepacked, nn.Linear)

    def _candidates(self) -> list[nn.Linear]:
        """Return the plain linear layers on a CPU: without hooks, quantised weights or a replaced forward."""
        if not self._is_wanted or is_compiled(self._model) or torch.is_autocast_enabled("cpu"):
            return []
        layers = (module for module in self._model.modules() if isinstance(module, nn.Linear))
        return [layer for layer in layers if type(layer) in (nn.Linear, _Prepacked) and _is_plain(layer)]


def _set_class(layers: list[nn.Linear], old: type[nn.Linear], new: type[nn.Linear]) -> None:
    for layer in layers:
        if type(layer) is old:  # the user may have parametrised it meanwhile
            object.__setattr__(layer, "__class__", new)  # Module.__setattr__ takes twenty times as long


def _linear(input: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the output, padding the tokens to one of few sizes: oneDNN keeps half a megabyte or more for each size."""
    num_tokens = input.numel() // input.shape[-1]
    missing = -num_tokens % _granularity(num_tokens)
    padded = F.pad(input.reshape(num_tokens, -1), (0, 0, 0, missing)) if missing else input
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(padded, packed, bias, "none", [], "")
    return out[:num_tokens].view(*input.shape[:-1], -1) if missing else out


def _granularity(num_tokens: int) -> int:
    """Return the number to a multiple of which ``num_tokens`` is padded, which adds an eighth at most."""
    return 1 << max(num_tokens.bit_length() - 4, 0) if num_tokens < 512 else 64


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
    if len(weight) > MANY_OUTPUTS:
        every = min(every, max(weight.shape[1] - 1, 1))
    return weight.detach().view(-1)[::every].clone()


@functools.cache
def _works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's kernels work in this dtype here, found by trial."""
    if dtype not in (torch.float32, torch.bfloat16, torch.float16) or not torch.backends.mkldnn.is_available():
        return False
    weight, tokens = (torch.linspace(-1, 1, n * 64).sin().view(n, 64).to(dtype) for n in (32, 4))
    try:
        ours = _linear(tokens, torch.ops.mkldnn._reorder_linear_weight(weight, TYPICAL_TOKENS), None)
    except (AttributeError, RuntimeError) as error:
        logger.debug("linear layers in %s cannot be prepacked: %s", dtype, error)
        return False
    plain = F.linear(tokens, weight).double()
    return bool((ours.double() - plain).norm() <= TOLERANCE * plain.norm())
