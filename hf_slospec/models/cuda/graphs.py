"""CUDA graphs of packed forwards, and the rules by which forwards are captured and replayed.

A captured forward is a function of a tree of tensors and of nothing else. Its signature is all of that tree but the
values in the tensors, host constants included, so a graph is only replayed for inputs that differ in these values.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

import torch

from hf_slospec.models.compatibility.fingerprint import PLAIN, settings, weight_homes
from hf_slospec.models.compatibility.hooks import changing_hooks
from hf_slospec.models.cuda.sync_guard import SyncGuard
from hf_slospec.models.cuda.transfer import DeviceCopy, map_tensors, signature, tensors_in

logger = logging.getLogger(__name__)

MAX_GRAPHS = 128  # of one model and pool; the least recently used are dropped
PATIENCE = 8  # a signature's forwards before it is captured, which takes as long as many forwards (an estimate)
MEMORY_SHARE = 16  # graphs may take 1/16 of a device's memory, and so may an idle pool that is kept for them
TOLERANCE = 0.05  # relative, of a first replay; beyond rounding in any dtype

Run = Callable[[], Any]  # returns a tree of tensors


class GraphCapturer(Protocol):
    """Captures functions whose inputs keep their addresses."""

    max_bytes: int

    def capture(self, run: Run) -> Run:
        """Return a function that repeats all device work of ``run`` and returns the same tensors each time."""

    def num_bytes(self) -> int:
        """Return the memory in use, from which the memory that a capture took is computed."""

    def is_usable(self) -> bool:
        """Return whether graphs may run on this thread's current stream."""


class CudaGraphs:
    """CUDA graphs of one device that share their memory, as one runs at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self.max_bytes = torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE

    def capture(self, run: Run) -> Run:
        graph = torch.cuda.CUDAGraph()
        if not self._graphs:  # torch refuses captures into memory whose graphs are all gone
            self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                run()  # libraries allocate the workspace of this stream outside of the graph
                torch.cuda.synchronize()
                try:
                    graph.capture_begin(self._memory, capture_error_mode="thread_local")  # other threads are free
                    try:
                        out = run()
                    finally:
                        graph.capture_end()
                except BaseException:
                    # A capture whose end fails leaves torch allocating for the graph, and unable to free memory.
                    with contextlib.suppress(Exception):
                        torch._C._cuda_endAllocateToPool(self._stream.device_index, self._memory)
                    raise
        self._graphs.add(graph)

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def num_bytes(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def is_usable(self) -> bool:
        # On other streams, a forward's inputs could be overwritten before it has read them.
        return bool(torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device))


def capturer_for(device: torch.device) -> GraphCapturer | None:
    """Return a capturer for a device; None where there are no CUDA graphs."""
    return CudaGraphs(device) if device.type == "cuda" and torch.version.hip is None else None


class _Captured(NamedTuple):
    inputs: DeviceCopy
    replay: Run


class Graphs:
    """Captured forwards of a model on one pool."""

    def __init__(self, capturer: GraphCapturer, device: torch.device):
        self._capturer, self._device = capturer, device
        self._captured: OrderedDict[Hashable, _Captured] = OrderedDict()  # least recently used first
        self._seen = Counter[Hashable]()  # forwards by signature
        self._preconditions: Hashable = None  # of all graphs
        self._out: list[torch.Tensor] = []  # outputs of all graphs, as logits are large: one for each kind of output
        self._num_bytes = 0
        self._lock = threading.Lock()
        self.patience = PATIENCE
        self.is_off = self.has_failed = False

    def __len__(self) -> int:
        return len(self._captured)

    def may_keep(self, num_bytes: int) -> bool:
        """Return whether an idle pool of this size is worth keeping for its graphs."""
        return bool(self._captured) and num_bytes <= self._capturer.max_bytes

    @contextlib.contextmanager
    def capturing_at_once(self) -> Iterator[None]:
        """Capture forwards within when they are seen for the first time."""
        patience, self.patience = self.patience, 0
        try:
            yield
        finally:
            self.patience = patience

    def run(self, inputs: Any, compute: Callable[[Any], Any], preconditions: Hashable) -> Any | None:
        """Return the result of ``compute`` for these inputs by a graph; None if there is none.

        Args:
            inputs: tree of tensors, each on the device or made on the host.
            compute: gets the tree with all tensors on the device, and returns a tree of tensors.
            preconditions: all else that ``compute`` reads; when it changes, all graphs are dropped.
        """
        with self._lock:
            if self.is_off or not self._capturer.is_usable():
                return None
            if preconditions != self._preconditions:
                self._captured.clear()
                self._seen.clear()  # a model that is switched back and forth is never captured
                self._preconditions = preconditions
            key = signature(inputs)
            if key not in self._captured:
                self._seen[key] += 1
                return self._capture(key, inputs, compute) if self._seen[key] > self.patience else None
            self._captured.move_to_end(key)
            captured = self._captured[key]
            captured.inputs.fill(inputs)
            return map_tensors(captured.replay(), torch.clone)

    def _capture(self, key: Hashable, inputs: Any, compute: Callable[[Any], Any]) -> Any | None:
        """Capture this forward and return its result; None if it could not be captured."""
        before = self._capturer.num_bytes()
        try:
            with torch.inference_mode(False):  # replays outside of inference mode write to the same tensors
                static = DeviceCopy(inputs, self._device)
            static.fill(inputs)
            with SyncGuard():  # finds errors before the capture: one that fails leaves CUDA in a poor state
                right = compute(static.content)
            buffers = iter(self._buffers(tensors_in(right)))
            outputs = map_tensors(right, lambda tensor: next(buffers))
            replay = self._capturer.capture(lambda: _copy(compute(static.content), outputs))
            if not all(map(_is_close, tensors_in(replay()), tensors_in(right))):
                raise RuntimeError("the first replay gave other outputs")
        except Exception as error:  # noqa: BLE001  whatever it is, forwards go on without graphs
            self.has_failed = True
            self._stop("a forward cannot be captured: %r", error)
            return None
        self._captured[key] = _Captured(static, replay)
        if len(self._captured) > MAX_GRAPHS:
            oldest, _ = self._captured.popitem(last=False)
            del self._seen[oldest]
        self._num_bytes += max(self._capturer.num_bytes() - before, 0)  # memory of dropped graphs is used again
        if self._num_bytes > self._capturer.max_bytes:
            self._stop("they took %.1f GiB", self._num_bytes / 2**30)
        return right

    def _buffers(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return memory for outputs; all graphs write to the same, as one runs at a time."""
        for place, tensor in enumerate(outputs):
            shape = tensor.shape[1:]
            if place < len(self._out) and self._out[place].shape[1:] == shape and len(self._out[place]) >= len(tensor):
                continue
            with torch.inference_mode(False):
                self._out[place : place + 1] = [torch.empty_like(tensor)]
        return [own[: len(tensor)] for own, tensor in zip(self._out, outputs, strict=False)]

    def _stop(self, why: str, what: object) -> None:
        logger.info(f"CUDA graphs are off from here on: {why}", what)
        self._captured.clear()
        self.is_off = True


def _copy(computed: Any, outputs: Any) -> Any:
    """Copy a tree of tensors to the memory of another, and return that."""
    for tensor, own in zip(tensors_in(computed), tensors_in(outputs), strict=True):
        own.copy_(tensor)
    return outputs


def _is_close(found: torch.Tensor, right: torch.Tensor) -> bool:
    found, right = (logits.double().nan_to_num(0.0, 0.0, 0.0) for logits in (found, right))
    return bool((found - right).norm() <= TOLERANCE * right.norm())


class GraphPreconditions:
    """Addresses of a model's weights and settings of its modules, which captured forwards depend on."""

    def __init__(self, model: torch.nn.Module):
        self._model = model
        self.renew()

    def renew(self) -> None:
        """Read the modules again: replaced ones, hooks, and plain attributes such as an adapter's switches."""
        modules = list(self._model.modules())
        has_hooks = any(changing_hooks(module) or hasattr(module, "_hf_hook") for module in modules)
        self._homes = list(weight_homes(self._model))
        weights = [home[name] for home, name in self._homes]
        are_plain = all(type(weight) in PLAIN for weight in weights)
        self.is_plain = are_plain and not has_hooks and len({weight.device for weight in weights}) == 1
        self._settings = settings(self._model)

    def now(self) -> Hashable:
        """Return a value that stays equal as long as no change is noticed."""
        weights = (home.get(name) for home, name in self._homes)
        return self._settings, tuple(None if weight is None else weight.data_ptr() for weight in weights)
