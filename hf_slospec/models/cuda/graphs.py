"""Forwards that are captured once and replayed: CUDA graphs, and what decides when to use them.

A forward is a function of a tree of tensors and of nothing else. Its signature is all of that tree but the values in
the tensors, host constants included, so a graph is only ever replayed for inputs that differ in these values.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import types
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch

from hf_slospec.models.compatibility.hooks import changing_hooks
from hf_slospec.models.cuda.sync_guard import SyncGuard
from hf_slospec.models.cuda.transfer import DeviceCopy, signature

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128  # of one model and pool; the least recently used go
PATIENCE = 8  # a signature's forwards before it is captured, which takes as long as many forwards (an estimate)
MEMORY_SHARE = 16  # graphs may take this part of a device's memory, and as much a pool that is kept for them
TOLERANCE = 0.05  # relative, of a first replay; beyond rounding in any dtype
OWN = {"_parameters", "_buffers", "_modules", *(name for name in vars(torch.nn.Module()) if "hooks" in name)}
FUNCTIONS = types.FunctionType, types.MethodType, functools.partial  # another forward of an instance, say
PLAIN = (torch.Tensor, torch.nn.Parameter)  # quantised weights are classes of their own, and may have no address

Run = Callable[[], torch.Tensor]


class Maker(Protocol):
    """Captures a function whose inputs stay where they are."""

    max_bytes: int

    def capture(self, run: Run) -> Run:
        """What does on the device all that ``run`` does there, and returns the same tensor each time."""

    def num_bytes(self) -> int:
        """Memory in use, to tell what a capture took."""

    def is_usable(self) -> bool:
        """Whether graphs may run where this thread is now."""


class CudaGraphs:
    """CUDA graphs of one device that share their memory: one runs at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()
        self.max_bytes = torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE

    def capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # libraries take the workspace of this stream outside of the graph
                torch.cuda.synchronize()
                try:
                    graph.capture_begin(self._memory, capture_error_mode="thread_local")  # others may do anything
                    try:
                        out = run()
                    finally:
                        graph.capture_end()
                except BaseException:
                    # An end that fails leaves torch taking memory for the graph, and unable to give any back.
                    with contextlib.suppress(Exception):
                        torch._C._cuda_endAllocateToPool(self._stream.device_index, self._memory)
                    raise

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay

    def num_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def is_usable(self) -> bool:
        # On other streams, one forward's inputs could be overwritten before it has read them.
        return bool(torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device))


def capturer_for(device: torch.device) -> Maker | None:
    """None where there are no graphs."""
    return CudaGraphs(device) if device.type == "cuda" and torch.version.hip is None else None


class _Captured(NamedTuple):
    inputs: DeviceCopy
    replay: Run


class Graphs:
    """The captured forwards of a model on one pool."""

    def __init__(self, maker: Maker, device: torch.device):
        self._maker, self._device = maker, device
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()  # least recently used first
        self._seen = Counter[Hashable]()  # forwards by signature
        self._taken: Hashable = None  # what the graphs take for granted
        self._out: torch.Tensor | None = None  # of all graphs, or the last of them, as logits are large
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.patience = PATIENCE
        self.is_off = self.has_failed = False

    def __len__(self) -> int:
        return len(self._captured)

    def may_keep(self, num_bytes: int) -> bool:
        """Whether a pool of this size may wait for another call, for the sake of its graphs."""
        return bool(self._captured) and self._maker.is_usable() and num_bytes <= self._maker.max_bytes

    @property
    def is_usable(self) -> bool:
        """Whether work here comes after all work on the pool before."""
        return self._maker.is_usable()

    def run(self, inputs: Any, compute: Callable[[Any], torch.Tensor], granted: Hashable) -> torch.Tensor | None:
        """What ``compute`` returns for these inputs, from a graph; None if there is none.

        Args:
            inputs: tree of tensors, each on the device or made on the host.
            compute: gets the tree with all tensors on the device.
            granted: what else ``compute`` reads; when it changes, all graphs are dropped.
        """
        with self._lock:
            if self.is_off or not self._maker.is_usable():
                return None
            if granted != self._taken:
                self._captured.clear()
                self._seen.clear()  # who switches back and forth gets none
                self._taken = granted
            key = signature(inputs)
            if key not in self._captured:
                self._seen[key] += 1
                return self._capture(key, inputs, compute) if self._seen[key] > self.patience else None
            self._captured.move_to_end(key)
            captured = self._captured[key]
            captured.inputs.fill(inputs)
            return captured.replay().clone()

    def _capture(self, key: Hashable, inputs: Any, compute: Callable[[Any], torch.Tensor]) -> torch.Tensor | None:
        """Keep a graph of this forward.  -> its result, None if it could not be captured"""
        before = self._maker.num_bytes()
        try:
            with torch.inference_mode(False):  # which others may write into
                parcel = DeviceCopy(inputs, self._device)
            parcel.fill(inputs)
            with SyncGuard():  # a capture that fails leaves CUDA in a poor state
                right = compute(parcel.content)
            if self._out is None or len(self._out) < len(right):
                with torch.inference_mode(False):
                    self._out = torch.empty_like(right)
            out = self._out[: len(right)]
            replay = self._maker.capture(lambda: out.copy_(compute(parcel.content)))
            if not _is_close(replay(), right):
                raise RuntimeError("the first replay gave other logits")
        except Exception as error:  # noqa: BLE001  whatever it is, forwards without graphs go on
            self.has_failed = True
            self._stop("a forward cannot be captured: %r", error)
            return None
        self._captured[key] = _Captured(parcel, replay)
        if len(self._captured) > MAX_GRAPHS:
            oldest, _ = self._captured.popitem(last=False)
            del self._seen[oldest]
        self._num_bytes += max(self._maker.num_bytes() - before, 0)  # graphs that went leave theirs to those to come
        if self._num_bytes > self._maker.max_bytes:
            self._stop("they took %.1f GiB", self._num_bytes / 2**30)
        return right

    def _stop(self, why: str, what: object) -> None:
        logger.info(f"no CUDA graphs from here on: {why}", what)
        self._captured.clear()
        self.is_off = True


def _is_close(found: torch.Tensor, right: torch.Tensor) -> bool:
    found, right = (logits.double().nan_to_num(0.0, 0.0, 0.0) for logits in (found, right))
    return bool((found - right).norm() <= TOLERANCE * right.norm())


class GraphPreconditions:
    """What captured forwards take for granted of their model: where its weights are, and its modules' settings."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.renew()

    def renew(self) -> None:
        """Look at the modules again: replaced ones, hooks, and plain attributes such as an adapter's switches."""
        modules = list(self._model.modules())
        has_hooks = any(changing_hooks(module) or hasattr(module, "_hf_hook") for module in modules)
        homes = [home for module in modules for home in (module._parameters, module._buffers)]
        self._homes = [(home, name) for home in homes for name, tensor in home.items() if tensor is not None]
        weights = [home[name] for home, name in self._homes]
        are_plain = all(type(weight) in PLAIN for weight in weights)
        self.is_plain = are_plain and not has_hooks and len({weight.device for weight in weights}) == 1
        configs = {
            id(config): config for module in modules if hasattr(config := vars(module).get("config"), "__dict__")
        }
        self._settings = tuple((type(one), _settings_of(vars(one))) for one in [*modules, *configs.values()])

    def now(self) -> Hashable:
        """Equal as long as nothing has changed that is known of."""
        weights = (home.get(name) for home, name in self._homes)
        return self._settings, tuple(None if weight is None else weight.data_ptr() for weight in weights)


def _settings_of(attributes: dict[str, Any]) -> Hashable:
    # Drafts are set to evaluating for the time they run; forwards in training are not captured. The attention that a
    # config names is ours while a forward runs. Parameters, buffers, submodules and hooks are looked at by themselves.
    passing = {"training", "_attn_implementation_internal", *OWN}
    return tuple((name, _fixed(value)) for name, value in attributes.items() if name not in passing)


def _fixed(value: Any) -> Hashable:
    """Equal for values that mean the same to a forward, as far as can be told."""
    if isinstance(value, PLAIN):
        return value.data_ptr(), value.shape, value.dtype  # graphs read it where it is
    if isinstance(value, dict):
        return dict, tuple((key, _fixed(part)) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_fixed, value))
    if isinstance(value, (bool, int, float, str, type(None), *FUNCTIONS)):
        return type(value), value
    return type(value)
