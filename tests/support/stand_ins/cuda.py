"""A CUDA device for machines without one: its tensors, and what is asked of ``torch.cuda``.

It shows that nothing mixes tensors of host and device, what has the host wait, that nobody reads
what has not arrived yet, and that what is asked of ``torch.cuda`` goes together. It cannot show
kernels, memory, speed, or streams that run at the same time.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import weakref
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hf_slospec.cuda import few_rows
from hf_slospec.model import checksum, version
from tests.support.stand_ins import cuda_tensors
from tests.support.stand_ins.cuda_tensors import CUDA, Device, OnDevice, flash_attn_varlen_func
from tests.support.stand_ins.graphs import Tape
from tests.support.stand_ins.triton import triton_stand_ins

PLACES = (str, torch.device)  # in which a device may be named
handles = itertools.count(
    1
)  # one per memory pool, as graphs of earlier tests may be collected later


class Generator(torch.Generator):
    def __new__(cls, device="cpu"):
        return super().__new__(cls, "cpu")


class Stream:
    stream_id = device_index = 0

    def __init__(self, *_):
        self.waited_for = []
        self.recorded = set()  # addresses of tensors

    def wait_stream(self, other):
        self.waited_for.append(other)

    def synchronize(self):
        cuda_tensors.device.wait(Stream.synchronize)


class Chosen:
    """In the place of ``torch.cuda.device``."""

    def __init__(self, device):
        self.idx = 0

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


class Event:
    def __init__(self, **_):
        self._num_asked = 0

    def record(self, stream=None):
        self._num_asked = cuda_tensors.device.num_asked

    def synchronize(self):
        cuda_tensors.device.finish(self._num_asked)


class Graph:
    """In the place of ``torch.cuda.CUDAGraph``; strict about the memory that graphs share, as torch
    is.
    """

    def capture_begin(self, pool=None, capture_error_mode="global"):
        device = cuda_tensors.device
        pool = torch.cuda.graph_pool_handle() if pool is None else pool
        assert not device.captures, "two threads capture at once"
        if device.users.get(pool) == 0:
            raise RuntimeError(
                "use_count > 0 INTERNAL ASSERT FAILED"
            )  # all graphs of this memory are gone
        device.users[pool] = device.users.get(pool, 0) + 1
        device.allocates_to = pool
        device.generator.is_capturing = True
        self.pool = pool
        self.tape = Tape()
        device.captures[threading.get_ident()] = self.tape

    def capture_end(self):
        device = cuda_tensors.device
        device.captures.clear()
        if self.tape.is_broken:
            raise RuntimeError("operation failed due to a previous error during capture")
        end_allocate(0, self.pool)
        device.generator.is_capturing = False
        device.num_graphs += 1
        weakref.finalize(self, release, 0, self.pool)

    def replay(self):
        self.tape.play(torch.empty(0))


def end_allocate(index, pool):
    if cuda_tensors.device.allocates_to != pool:
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
    cuda_tensors.device.allocates_to = None


def release(index, pool):
    users = cuda_tensors.device.users
    if pool in users:  # it is of this test's device
        users[pool] -= 1
        assert users[pool] >= 0, "released more often than used"


class Places(TorchFunctionMode):
    """``cuda`` means ``cuda:0``: torch would ask the driver."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args = [numbered(argument) if type(argument) in PLACES else argument for argument in args]
        if not kwargs:
            return func(*args)
        kwargs = {
            name: numbered(value) if type(value) in PLACES else value
            for name, value in kwargs.items()
        }
        where = kwargs.get("device")
        if (
            func in (torch.tensor, torch.as_tensor)
            and isinstance(where, torch.device)
            and where.type == "cuda"
        ):
            kwargs["device"] = "cpu"
            return func(*args, **kwargs).to(where)
        return func(*args, **kwargs)


def numbered(argument):
    return CUDA if str(argument) in ("cuda", "cuda:0") else argument


class Operators(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing is compiled, and the wrapper costs time in every operator

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return cuda_tensors.device.run(func, args, kwargs or {})


@contextlib.contextmanager
def stand_in_cuda():
    """Within, in every thread, there is one CUDA device."""
    cuda_tensors.device = stand_in = Device(Stream())

    def empty_cache():
        stand_in.refuse_beside_captures(torch.cuda.empty_cache)

    properties = SimpleNamespace(name="stand-in", total_memory=2**36, multi_processor_count=1)
    package = ModuleType("flash_attn")
    package.__spec__, package.flash_attn_varlen_func = (
        ModuleSpec("flash_attn", None),
        flash_attn_varlen_func,
    )
    cuda = dict(
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
        empty_cache=empty_cache,
        graph_pool_handle=lambda: (0, next(handles)),
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

    def run(self):
        with Places(), Operators():
            run_thread(self)

    overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
    with contextlib.ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        for name, function in dict(
            _cuda_endAllocateToPool=end_allocate, _cuda_releasePool=release
        ).items():
            stack.enter_context(mock.patch.object(torch._C, name, function, create=True))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        # patch.dict would also take away modules that are first imported meanwhile, such as those
        # of models.
        stack.enter_context(pytest.MonkeyPatch.context()).setitem(
            sys.modules, "flash_attn", package
        )
        stack.enter_context(mock.patch.object(threading.Thread, "run", run))
        stack.enter_context(
            mock.patch.object(few_rows, "is_faster", return_value=False)
        )  # without timing
        for module in (checksum, version, few_rows):
            stack.enter_context(mock.patch.object(module, "PLAIN", (*module.PLAIN, OnDevice)))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        stack.enter_context(triton_stand_ins())
        stack.enter_context(Places())
        stack.enter_context(Operators())
        yield stand_in
