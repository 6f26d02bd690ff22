"""Capture and replay of packed forwards as CUDA graphs; ``captured.py`` is the forward path.

A captured forward reads nothing but its inputs: nested tuples, lists, dicts and dataclasses of
tensors and host constants, called a tree of tensors here. The inputs' signature is everything in
them except the tensors' values, and a graph is replayed for all inputs of its signature."""

from __future__ import annotations

import contextlib
import logging
import statistics
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from hf_slospec.forks import Lock
from hf_slospec.model.memory import is_out_of_memory
from hf_slospec.model.transfer import (
    DeviceCopy,
    SyncGuard,
    apart_from_captures,
    flattened,
    map_tensors,
    tensors_in,
)

# Numbers of tokens, logits, and tokens or keys per sequence, to which batches are padded. From 1 to
# 16 tokens, a GPU reads the weights for about the same time, so these sizes are powers of two, as
# draft levels of 1, 2 and 4 nodes need. From 16 on, matrix kernels compute whole tiles; from 32 on,
# each size is at most half larger than the one before, which limits the work on padding. With 64
# requests, 64 to 256 are used for 1 to 4 tokens each (draft levels, small trees), and 320 to 640
# for up to 10 tokens each.
BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640)
# Numbers of sequences to which batches are padded. 80 is among them because every padding sequence
# adds at least one token. 4 is not: a draft level of 16 tokens takes as long as one of 1, and each
# size needs graphs for each width of level; verifying 3 or 4 requests computes some more padding.
BATCHES = (1, 2, 8, 16, 32, 48, 64, 80, 96, 128, 192, 256)


def bucket_for(size: int, buckets: tuple[int, ...] = BUCKETS) -> int:
    """Return the smallest bucket that holds ``size``; beyond the largest, the next power of two."""
    return next(
        (bucket for bucket in buckets if bucket >= size), 1 << max(size - 1, 0).bit_length()
    )


logger = logging.getLogger(__name__)

MAX_GRAPHS = 128  # graphs per model and pool; the least recently used are dropped
# Eager forwards of a signature before it is captured. A capture takes as long as about three eager
# forwards, and a replay saves most of one where the host is slower than the device, so it has paid
# off after about four replays.
PATIENCE = 1
# Failed captures, for transient reasons too, that turn graphs off if none has succeeded before.
MAX_FAILURES = 3
# Forwards of a signature between a failed capture and the next; each failure multiplies it by 64.
RETRY_AFTER = 64
# Graphs may use 1/16 of a device's memory, and so may an idle K/V pool that is kept for them.
MEMORY_SHARE = 16
TOLERANCE = 0.05  # relative error allowed in a first replay; larger than rounding in any dtype
# Rows of logits that are compared at a time, as an fp32 copy of 640 rows of 128k is 328 MB.
CHUNK = 16
# Larger outputs, such as mask values, are not compared, as they would outweigh all others.
LARGEST = 1e9
NUM_REPLAYS = 5  # replays that are timed; the median counts

Run = Callable[[], Any]  # returns a tree of tensors


class CaptureError(RuntimeError):
    """A capture failed on the device, maybe for a transient reason: memory, or a synchronization by
    another thread.
    """


class CudaGraphs:
    """Capturer of CUDA graphs on one device; they share memory, as only one runs at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._graphs = WeakSet[torch.cuda.CUDAGraph]()
        self.num_bytes = 0  # device memory that captures have reserved
        self.max_bytes = torch.cuda.get_device_properties(device).total_memory // MEMORY_SHARE

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run the context on the stream of captures; an eager run there lets libraries allocate
        their workspaces before a capture.
        """
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)

    def capture(self, run: Run) -> Run:
        """Return a function that repeats all device work of ``run`` and returns the same tensors
        each time.

        Raises:
            CaptureError: the capture failed on the device; a later one may succeed.
        """
        graph = torch.cuda.CUDAGraph()
        with apart_from_captures(self._device), self.on_stream():
            alive = list(self._graphs)  # none is collected before the capture begins
            if not alive:  # torch refuses captures into a memory pool whose graphs were all deleted
                self._memory = torch.cuda.graph_pool_handle()
                self.num_bytes = 0
            self._stream.synchronize()
            reserved = torch.cuda.memory_reserved(self._device)
            try:
                # In this mode, other threads may continue to use the device.
                graph.capture_begin(self._memory, capture_error_mode="thread_local")
                try:
                    out = run()
                finally:
                    graph.capture_end()
            except BaseException as error:
                self._end_failed()
                if isinstance(error, RuntimeError):
                    raise CaptureError(str(error)) from error
                raise
            self.num_bytes += max(torch.cuda.memory_reserved(self._device) - reserved, 0)
        self._graphs.add(graph)

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def _end_failed(self) -> None:
        """End the use of the memory pool, and the random generator's capture mode, which a failed
        ``capture_end`` leaves on.
        """
        index = self._stream.device_index
        with contextlib.suppress(RuntimeError):  # the first call raises if the pool is not in use
            torch._C._cuda_endAllocateToPool(index, self._memory)
            torch._C._cuda_releasePool(index, self._memory)
            generator = torch.cuda.default_generators[index]
            generator.graphsafe_set_state(generator.clone_state())  # a clone is not capturing

    def is_usable(self) -> bool:
        """Return whether graphs may run on this thread's current stream."""
        # On other streams, a forward's inputs could be overwritten before it has read them.
        return bool(
            torch.cuda.current_stream(self._device) == torch.cuda.default_stream(self._device)
        )


def capturer_for(device: torch.device) -> CudaGraphs | None:
    """Return a new capturer for a device; None if the device has no CUDA graphs."""
    return CudaGraphs(device) if device.type == "cuda" and torch.version.hip is None else None


def replayed_s(capturer: CudaGraphs, run: Run, device: torch.device) -> float:
    """Return the median seconds of replays of a captured function on a CUDA device."""
    with capturer.on_stream():
        run()
    replay = capturer.capture(run)
    times = list[float]()
    with torch.cuda.device(device):
        for _ in range(NUM_REPLAYS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


class _Captured(NamedTuple):
    inputs: DeviceCopy
    replay: Run


@dataclass
class GraphCounts:
    """Counts of a model's packed forwards whose sizes can be captured, by how they were computed."""

    captures: int = 0
    replays: int = 0
    eager: int = 0


@dataclass
class GraphHistory:
    """Records of one model's forwards on all its K/V pools, so that signatures seen on one pool are
    captured at once on the next.
    """

    counts: GraphCounts = field(default_factory=GraphCounts)
    seen: Counter[Hashable] = field(default_factory=Counter)  # forwards by signature
    failures: Counter[Hashable] = field(default_factory=Counter)  # failed captures by signature
    preconditions: Hashable = None  # preconditions under which the signatures were seen

    def follow(self, preconditions: Hashable) -> None:
        """Reset the records if the preconditions have changed, so that a model that alternates
        between two is never captured.
        """
        if preconditions != self.preconditions:
            self.seen.clear()
            self.failures.clear()
            self.preconditions = preconditions


class Graphs:
    """Captured forwards of a model on one K/V pool, by signature."""

    def __init__(
        self, capturer: CudaGraphs, device: torch.device, history: GraphHistory | None = None
    ):
        self._capturer = capturer
        self._device = device
        self._history = history or GraphHistory()
        # Least recently used first.
        self._captured = OrderedDict[Hashable, _Captured]()
        self._preconditions: Hashable = None  # preconditions under which all graphs were captured
        # Output buffers, shared by all graphs as logits are large; by index of the output, shape of
        # a row, and dtype.
        self._out: dict[tuple[int, torch.Size, torch.dtype], torch.Tensor] = {}
        self._lock = Lock()
        self.patience = PATIENCE
        self.why_not: str | None = None  # why graphs are off
        self.has_failed = False

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def is_off(self) -> bool:
        """Return whether no forward is captured any more."""
        return self.why_not is not None

    @property
    def max_idle_bytes(self) -> int:
        """Size in bytes up to which an idle K/V pool is kept because of its graphs."""
        return self._capturer.max_bytes

    @contextlib.contextmanager
    def capturing_at_once(self) -> Iterator[None]:
        """Capture forwards inside this context when they are seen for the first time."""
        patience = self.patience
        self.patience = 0
        try:
            yield
        finally:
            self.patience = patience

    def run(
        self,
        inputs: Any,
        compute: Callable[[Any], Any],
        preconditions: Hashable,
        is_kept: bool = True,
    ) -> Any | None:
        """Return the result of ``compute`` for these inputs by a graph; None if no graph ran.

        Args:
            inputs: tree of tensors, each on the device or made on the host.
            compute: gets the tree with all tensors on the device, and returns a tree of tensors.
            preconditions: stands for everything else that ``compute`` reads, such as weights; when
                it changes, all graphs are dropped.
            is_kept: return a copy; otherwise the next run may overwrite the result.
        """
        with self._lock:
            if self.is_off or not self._capturer.is_usable():
                return None
            outputs = self._run(inputs, compute, preconditions, is_kept)
            self._history.counts.eager += outputs is None
            return outputs

    def _run(
        self, inputs: Any, compute: Callable[[Any], Any], preconditions: Hashable, is_kept: bool
    ) -> Any | None:
        self._history.follow(preconditions)
        if preconditions != self._preconditions:
            self._captured.clear()
            self._preconditions = preconditions
        tensors, key = flattened(inputs)
        seen = self._history.seen
        if key not in self._captured:
            seen[key] += 1
            if seen[key] <= self.patience:
                return None
            return self._capture(key, inputs, tensors, compute)
        self._captured.move_to_end(key)
        captured = self._captured[key]
        captured.inputs.fill(tensors)
        self._history.counts.replays += 1
        return map_tensors(captured.replay(), torch.clone) if is_kept else captured.replay()

    def _capture(
        self,
        key: Hashable,
        inputs: Any,
        tensors: Sequence[torch.Tensor],
        compute: Callable[[Any], Any],
    ) -> Any | None:
        """Capture this forward and return its result; None if it could not be captured."""
        try:
            # Not as inference tensors, to which replays outside of inference mode could not write.
            with torch.inference_mode(False):
                static = DeviceCopy(inputs, self._device)
            static.fill(tensors)
            # An eager run warms up libraries and raises errors early: a failed capture leaves CUDA
            # in a poor state.
            with self._capturer.on_stream(), SyncGuard():
                expected = compute(static.content)
            buffers = iter(self._buffers(tensors_in(expected)))
            outputs = map_tensors(expected, lambda tensor: next(buffers))
            replay = self._capturer.capture(lambda: _copy(compute(static.content), outputs))
            if not all(map(_is_close, tensors_in(replay()), tensors_in(expected))):
                raise RuntimeError("the first replay gave other outputs")
        except Exception as error:  # noqa: BLE001  after any error, forwards run without graphs
            self._fail(key, error)
            return None
        self._captured[key] = _Captured(static, replay)
        if not self._history.counts.captures:
            logger.info("capturing CUDA graphs, one per number of tokens that recurs")
        self._history.counts.captures += 1
        if len(self._captured) > MAX_GRAPHS:
            oldest, _ = self._captured.popitem(last=False)
            del self._history.seen[oldest]
        if self._capturer.num_bytes > self._capturer.max_bytes:
            self._stop("they took %.1f GiB", self._capturer.num_bytes / 2**30)
        return expected

    def _fail(self, key: Hashable, error: Exception) -> None:
        """Record a failed capture; stop all captures if its reason is permanent, or if none has
        ever succeeded.
        """
        failures = self._history.failures
        is_transient = isinstance(error, CaptureError) or is_out_of_memory(error)
        failures[key] += 1
        if is_transient and (self._history.counts.captures or failures.total() < MAX_FAILURES):
            logger.debug("a capture failed, and is tried again later: %r", error)
            self._history.seen[key] = -(RETRY_AFTER ** failures[key])
            return
        self.has_failed = True
        self._stop("a forward cannot be captured: %r", error)

    def _buffers(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return output buffers, which all graphs share, as one runs at a time."""
        buffers = []
        for index, tensor in enumerate(outputs):
            kind = index, tensor.shape[1:], tensor.dtype
            if kind not in self._out or len(self._out[kind]) < len(tensor):
                with torch.inference_mode(False):
                    self._out[kind] = torch.empty_like(
                        tensor, memory_format=torch.contiguous_format
                    )
            buffers.append(self._out[kind][: len(tensor)])
        return buffers

    def _stop(self, why: str, what: object) -> None:
        self.why_not = why % what
        logger.info("CUDA graphs are off from here on: %s", self.why_not)
        self._captured.clear()


def _copy(computed: Any, outputs: Any) -> Any:
    """Copy a tree of tensors into the tensors of ``outputs``, and return ``outputs``."""
    for tensor, buffer in zip(tensors_in(computed), tensors_in(outputs), strict=True):
        buffer.copy_(tensor)
    return outputs


def _is_close(replayed: torch.Tensor, expected: torch.Tensor) -> bool:
    if not expected.is_floating_point():  # tokens, which may differ where scores almost tie
        return True
    errors = []
    sizes = []
    for chunks in zip(replayed.split(CHUNK), expected.split(CHUNK), strict=True):
        a, b = (chunk.float().where(chunk.abs() < LARGEST, 0.0) for chunk in chunks)
        errors.append((a - b).norm())
        sizes.append(b.norm())
    return bool(torch.stack(errors).norm() <= TOLERANCE * torch.stack(sizes).norm())
