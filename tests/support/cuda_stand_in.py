"""A CUDA device for machines without one: tensors that say they are on it, with their values in host memory.

It shows that nothing mixes tensors of host and device, what has the host wait, that nobody reads what has not arrived
yet, and that what is asked of ``torch.cuda`` goes together. It cannot show kernels, memory, speed, or streams that run
at the same time.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_slospec.models.attention.packing import Entries
from hf_slospec.models.cuda import graphs, sync_guard
from tests.support.graph_stand_in import OpaqueStandIn, Tape, each, tensors_in
from tests.support.triton_stand_in import triton_stand_ins

aten = torch.ops.aten
PIN, COPY, COPY_TO = aten._pin_memory, aten._to_copy, aten.copy_
HISTC = aten.histc.default
INDEXED = (aten.index, aten.index_put, aten.index_put_)
importlib.import_module("torch.nn.attention.varlen")  # makes an operator
VARLEN = torch.ops.torch_attn._varlen_attn
CUDA = torch.device("cuda", 0)
HALF = (torch.float16, torch.bfloat16)
PLACES = (str, torch.device)  # in which a device may be named
RUBBISH = 85  # on the host where a copy has not arrived; true as a truth value


class OnDevice(torch.Tensor):
    """Says it is on the device; ``held`` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> OnDevice:
        assert type(held) is torch.Tensor and held.is_cpu, held
        made: OnDevice = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=CUDA
        )
        made.held = held
        return made

    def __repr__(self, **_: Any) -> str:
        return f"OnDevice({self.held!r})"

    def record_stream(self, stream: Any) -> None:
        stream.recorded.add(self.data_ptr())

    def __deepcopy__(self, memo: Any) -> Any:
        memo[id(self)] = made = like(self, self.held.clone())
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            device.wait(func)
            return func(args[0].held)
        if func is DATA_PTR:
            return func(args[0].held)
        if func in INSTEAD:
            return INSTEAD[func](*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            if func is SET_DATA:
                args[0].held = args[1].held
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device.run(func, args, kwargs or {})


# What the host reads; and what would ask the driver in torch's bindings, before any operator.
READS = {getattr(torch.Tensor, name) for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__")}
DATA_PTR, SET_DATA = torch.Tensor.data_ptr, torch.Tensor.data.__set__  # type: ignore[attr-defined]
INSTEAD: dict[Any, Callable[..., Any]] = {
    torch.Tensor.__getitem__: lambda *args: device.index(torch.Tensor.__getitem__, args),
    torch.Tensor.__setitem__: lambda *args: device.index(torch.Tensor.__setitem__, args),
    torch.Tensor.copy_: lambda *args, **kwargs: device.run(aten.copy_.default, args, kwargs),
    torch.Tensor.nonzero: lambda tensor: device.run(aten.nonzero.default, (tensor,), {}),
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: lambda tensor: (
        tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
    ),
}


def like(tensor: OnDevice, held: torch.Tensor) -> Any:
    made = OnDevice(held)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def of_host(tree: Any, given: list[torch.Tensor]) -> Any:
    """The same with values in host memory; the tensors that were in it are added to ``given``."""

    def held(tensor: torch.Tensor) -> torch.Tensor:
        given.append(tensor)
        return tensor.held if type(tensor) is OnDevice else tensor

    return each(tree, held)


@functools.cache
def draws(func: Any) -> bool:
    """Whether the operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class Device:
    """What it has been asked for and has not shown yet."""

    def __init__(self) -> None:
        self.generator = torch.Generator()
        self.sync_debug_mode = "default"
        self.captures: dict[int, Tape] = {}  # that run, by thread
        self.arriving: list[tuple[torch.Tensor, torch.Tensor]] = []  # on the host: where, and what
        self.leaving: list[tuple[torch.Tensor, torch.Tensor]] = []  # from the host: where, and what was there
        self.num_arrived = self.num_graphs = 0
        self._lock = threading.Lock()
        self._num_waits = Counter[int]()  # by thread
        self.default_stream = Stream()
        self._streams: dict[int, Stream] = {}  # by thread, if it is not the default one

    @property
    def stream(self) -> Stream:
        """Of this thread."""
        return self._streams.get(threading.get_ident(), self.default_stream)

    @property
    def tape(self) -> Tape | None:
        """Of this thread's capture."""
        return self.captures.get(threading.get_ident())

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """One operator: on values in host memory, after a look at where they are said to be."""
        given: list[torch.Tensor] = []
        held, of = [of_host(argument, given) for argument in args], func.overloadpacket
        on_host = of_host(kwargs, given) if kwargs else kwargs
        is_here = self._is_here(of, args, kwargs, given)
        if on_host:
            if on_host.get("device") is not None:
                on_host["device"] = torch.device("cpu")
            assert not on_host.pop("pin_memory", None) or not is_here, "only memory of the host can be pinned"
        if of is PIN:
            assert not is_here, "only memory of the host can be pinned"
            return args[0].clone()
        if (of is COPY or of is COPY_TO) and (type(given[-1]) is OnDevice) != is_here:
            return self._across(func, args, kwargs, on_host, given[-1])
        if not is_here:
            return func(*held, **on_host)
        self._check(func, args, given)
        if func is HISTC and not args[0].is_floating_point():  # which torch has for CUDA only
            return self.run(aten.to.dtype, (self.run(func, (args[0].float(), *args[1:]), kwargs), args[0].dtype), {})
        if of is VARLEN:
            out = (*torch_flash(*held, **on_host), torch.zeros(2, dtype=torch.uint64))
        elif draws(func) and kwargs.get("generator") is None:
            out = self._drawn(lambda: func(*held, **on_host))
        else:
            out = func(*held, **on_host)
        out = self._placed(out, given)
        if self.captures and self.tape is not None:
            self.tape.calls.append((func, args, kwargs, out))
        return out

    def index(self, func: Any, args: Any) -> Any:
        """Reading or writing with brackets: torch would ask the driver."""
        is_here = type(args[0]) is OnDevice
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors_in(args[1]):
                if tensor.ndim:
                    assert is_here or type(tensor) is not OnDevice, "a tensor on the host and indices on the device"
                    if is_here and (type(tensor) is not OnDevice or tensor.dtype in sync_guard.BOOLEAN):
                        self.wait(func)
            if any(
                isinstance(own, torch.Tensor) and own.ndim and (type(own) is not OnDevice) == is_here
                for own in args[2:]
            ):
                self.wait(func)
        out = func(*of_host(args, []))
        out = None if out is None else self._placed(out, [args[0]])
        if self.captures and self.tape is not None:
            self.tape.calls.append((func, args, {}, out))
        return out

    def _is_here(self, of: Any, args: Any, kwargs: Any, given: list[torch.Tensor]) -> bool:
        if kwargs and kwargs.get("device") is not None:
            return torch.device(kwargs["device"]).type == "cuda"
        if of is COPY_TO:
            return type(args[0]) is OnDevice
        return OnDevice in map(type, given)

    def _check(self, func: Any, args: Any, given: list[torch.Tensor]) -> None:
        if sync_guard._reads(func, args):
            self.wait(func)
        of = func.overloadpacket
        for tensor in given:
            if type(tensor) is OnDevice or not tensor.ndim:
                continue
            if of in INDEXED and tensor is not args[0]:
                self.wait(func)  # such indices are copied there
            elif of is not COPY_TO and of is not COPY:
                raise RuntimeError(f"{func}: tensors on host and device: {[(t.shape, t.device) for t in given]}")

    def _across(self, func: Any, args: Any, kwargs: Any, on_host: Any, source: torch.Tensor) -> Any:
        """Between host and device."""
        is_write = func.overloadpacket is aten.copy_
        waits_not = kwargs.get("non_blocking") or (is_write and len(args) > 2 and args[2])
        if not waits_not and source.ndim + source.is_cpu:
            self.wait(func)
        out = func(*of_host(args, []), **on_host)
        with self._lock:
            if waits_not and source.is_cpu:
                self.leaving.append((source, source.clone()))
            elif waits_not:
                assert self.tape is None, "a copy to the host would be captured"
                self.arriving.append((out, out.clone()))
                out.fill_(RUBBISH)
        if source.is_cpu:
            out = self._placed(out, [args[0]] if is_write else [])
            if self.tape is not None:
                self.tape.calls.append((func, args, kwargs, out))
        return args[0] if is_write else out

    def _placed(self, out: Any, given: list[torch.Tensor]) -> Any:
        def placed(tensor: torch.Tensor) -> torch.Tensor:
            for own in given:
                if type(own) is OnDevice and own.held is tensor:
                    assert own.shape == tensor.shape, "changed its shape in place"
                    return own
            return OnDevice(tensor)

        return placed(out) if type(out) is torch.Tensor else each(out, placed)

    def _drawn(self, draw: Callable[[], Any]) -> Any:
        """With the device's generator in the place of the host's."""
        state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            return draw()
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(state)

    @property
    def num_waits(self) -> int:
        """How often this thread has waited."""
        return self._num_waits[threading.get_ident()]

    def wait(self, func: Any) -> None:
        """The host waits until all is done."""
        if self.tape is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {func}")
        self._num_waits[threading.get_ident()] += 1
        self.finish(self.num_asked)

    @property
    def num_asked(self) -> int:
        """Copies to the host that anybody has asked for."""
        with self._lock:
            return self.num_arrived + len(self.arriving)

    def finish(self, num_asked: int) -> None:
        """So many of these copies are there, and all copies to the device have been read."""
        with self._lock:
            arrived = self.arriving[: max(num_asked - self.num_arrived, 0)]
            for where, what in arrived:
                where.copy_(what)
            for where, what in self.leaving:
                assert torch.equal(where, what), "was written to before the device had read it"
            self.num_arrived += len(arrived)
            del self.arriving[: len(arrived)], self.leaving[:]

    # ---- torch.cuda

    def manual_seed(self, seed: int) -> None:
        self.generator.manual_seed(int(seed))

    def get_states(self) -> list[torch.Tensor]:
        return [self.generator.get_state()]

    def synchronize(self, device: Any = None) -> None:
        self.wait(torch.cuda.synchronize)

    @contextlib.contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before = self.stream
        self._streams[threading.get_ident()] = stream
        try:
            yield
        finally:
            self._streams[threading.get_ident()] = before

    def set_sync_debug_mode(self, mode: str) -> None:
        self.sync_debug_mode = mode


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Generator:
        return super().__new__(cls, "cpu")


class Stream:
    stream_id = device_index = 0

    def __init__(self, *_: Any):
        self.waited_for: list[Stream] = []
        self.recorded: set[int] = set()  # addresses of tensors

    def wait_stream(self, other: Stream) -> None:
        self.waited_for.append(other)

    def synchronize(self) -> None:
        device.synchronize()


class Chosen:
    """In the place of ``torch.cuda.device``."""

    def __init__(self, device: Any):
        self.idx = 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


class Event:
    def __init__(self, **_: Any):
        self._num_asked = 0

    def record(self, stream: Any = None) -> None:
        self._num_asked = device.num_asked

    def synchronize(self) -> None:
        device.finish(self._num_asked)


device = Device()


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``."""

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert not device.captures
        self.tape = device.captures[threading.get_ident()] = Tape()

    def capture_end(self) -> None:
        device.captures.clear()
        device.num_graphs += 1

    def replay(self) -> None:
        self.tape.play(torch.empty(0))


class Places(TorchFunctionMode):
    """``cuda`` means ``cuda:0``: torch would ask the driver."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [numbered(argument) if type(argument) in PLACES else argument for argument in args]
        if not kwargs:
            return func(*args)
        kwargs = {name: numbered(value) if type(value) in PLACES else value for name, value in kwargs.items()}
        where = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and isinstance(where, torch.device) and where.type == "cuda":
            kwargs["device"] = "cpu"
            return func(*args, **kwargs).to(where)
        return func(*args, **kwargs)


def numbered(argument: str | torch.device) -> Any:
    return CUDA if str(argument) in ("cuda", "cuda:0") else argument


class Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled, and the wrapper costs time in every operator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device.run(func, args, kwargs or {})


def torch_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    max_queries: int,
    max_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    **unused: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    assert all(argument is None for argument in unused.values()), unused
    assert enable_gqa or query.shape[1] == key.shape[1]
    return flash_attn_varlen_func(
        query, key, value, cu_queries, cu_keys, max_queries, max_keys, 0.0, scale, is_causal, window_size
    )[:2]


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    return_attn_probs: bool = False,
) -> Any:
    """By the documentation of the package of this name, and of the kernel that torch has from it."""
    assert q.dtype in HALF and q.dtype == k.dtype == v.dtype and dropout_p == 0.0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and not q.shape[-1] % 8
    left, right = window_size
    is_causal = causal or right == 0
    assert is_causal or (left, right) == (-1, -1)
    entries = Entries(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = None if left == -1 else left + 1
    out, lse = OpaqueStandIn(q.device)(q, k, v, entries, scale, is_causal, window, softcap or None)
    return out, lse, None


@contextlib.contextmanager
def stand_in_cuda() -> Iterator[Device]:
    """Within, in every thread, there is one CUDA device."""
    global device
    device = stand_in = Device()
    properties = SimpleNamespace(name="stand-in", total_memory=2**36, multi_processor_count=1)
    package: Any = ModuleType("flash_attn")
    package.__spec__, package.flash_attn_varlen_func = ModuleSpec("flash_attn", None), flash_attn_varlen_func
    cuda: dict[str, Any] = dict(
        _lazy_init=lambda: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        get_device_name=lambda device=None: "stand-in",
        get_device_capability=lambda device=None: (8, 0),
        get_device_properties=lambda device=None: properties,
        default_generators=(stand_in.generator,),
        manual_seed_all=stand_in.manual_seed,
        manual_seed=stand_in.manual_seed,
        get_rng_state_all=stand_in.get_states,
        get_rng_state=lambda device=None: stand_in.generator.get_state(),
        set_rng_state=lambda state, device=None: stand_in.generator.set_state(state),
        synchronize=stand_in.synchronize,
        set_sync_debug_mode=stand_in.set_sync_debug_mode,
        memory_reserved=lambda device=None: 2**20 * stand_in.num_graphs,
        memory_allocated=lambda device=None: 0,
        mem_get_info=lambda device=None: (2**35, 2**36),
        empty_cache=lambda: None,
        graph_pool_handle=lambda: (0, 1),
        CUDAGraph=Graph,
        Stream=Stream,
        Event=Event,
        stream=stand_in.on_stream,
        device=Chosen,
        set_device=lambda device: None,
        reset_peak_memory_stats=lambda device=None: None,
        max_memory_allocated=lambda device=None: 0,
        current_stream=lambda device=None: stand_in.stream,
        default_stream=lambda device=None: stand_in.default_stream,
    )
    run_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Places(), Operators():
            run_thread(self)

    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.dict(sys.modules, flash_attn=package))
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(mock.patch.object(graphs, "PLAIN", (*graphs.PLAIN, OnDevice)))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        stack.enter_context(triton_stand_ins())
        stack.enter_context(Places())
        stack.enter_context(Operators())
        yield stand_in
