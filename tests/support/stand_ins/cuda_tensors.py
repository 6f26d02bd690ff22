"""Tensors that say they are on a CUDA device, with their values in host memory; see
``stand_ins.cuda``.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections import Counter

import torch

from hf_slospec.cuda.flash import Entries
from hf_slospec.model import transfer as sync_guard
from hf_slospec.model.batch import AttentionRules
from tests.support.stand_ins.graphs import OpaqueStandIn, each, tensors_in

aten = torch.ops.aten
PIN = aten._pin_memory
COPY = aten._to_copy
COPY_TO = aten.copy_
HISTC = aten.histc.default
INDEXED = (aten.index, aten.index_put, aten.index_put_)
importlib.import_module("torch.nn.attention.varlen")  # makes an operator
VARLEN = torch.ops.torch_attn._varlen_attn
CUDA = torch.device("cuda", 0)
HALF = (torch.float16, torch.bfloat16)
RUBBISH = 85  # on the host where a copy has not arrived; true as a truth value


class OnDevice(torch.Tensor):
    """Says it is on the device; ``held`` has its values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held):
        assert type(held) is torch.Tensor and held.is_cpu, held
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=CUDA,
        )
        made.held = held
        return made

    def __repr__(self, **_):
        return f"OnDevice({self.held!r})"

    def record_stream(self, stream):
        stream.recorded.add(self.data_ptr())

    def __deepcopy__(self, memo):
        memo[id(self)] = made = like(self, self.held.clone())
        return made

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
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
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return device.run(func, args, kwargs or {})


# What the host reads; and what would ask the driver in torch's bindings, before any operator.
READS = {
    getattr(torch.Tensor, name)
    for name in ("tolist", "item", "__int__", "__float__", "__bool__", "__index__")
}
DATA_PTR, SET_DATA = torch.Tensor.data_ptr, torch.Tensor.data.__set__
INSTEAD = {
    torch.Tensor.__getitem__: lambda *args: device.index(torch.Tensor.__getitem__, args),
    torch.Tensor.__setitem__: lambda *args: device.index(torch.Tensor.__setitem__, args),
    torch.Tensor.copy_: lambda *args, **kwargs: device.run(aten.copy_.default, args, kwargs),
    torch.Tensor.nonzero: lambda tensor: device.run(aten.nonzero.default, (tensor,), {}),
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.contiguous: lambda tensor: (
        tensor if tensor.is_contiguous() else tensor.clone(memory_format=torch.contiguous_format)
    ),
}


def like(tensor, held):
    made = OnDevice(held)
    return (
        torch.nn.Parameter(made, tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter)
        else made
    )


def of_host(tree, given):
    """The same with values in host memory; the tensors that were in it are added to ``given``."""

    def held(tensor):
        given.append(tensor)
        return tensor.held if type(tensor) is OnDevice else tensor

    return each(tree, held)


@functools.cache
def draws(func):
    """Whether the operator takes random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags


class DefaultGenerator(torch.Generator):
    """The device's; a capture whose end fails leaves it as if still capturing."""

    is_capturing = False

    def clone_state(self):
        return self.get_state()

    def graphsafe_set_state(self, state):
        self.set_state(state)
        self.is_capturing = False


class Device:
    """What it has been asked for and has not shown yet."""

    def __init__(self, default_stream):
        self.generator = DefaultGenerator()
        self.sync_debug_mode = "default"
        self.captures = {}  # that run, by thread
        self.arriving = []  # on the host: where, and what
        self.leaving = []  # from the host: where, and what was there
        self.num_arrived = self.num_graphs = 0
        self.users = {}  # graphs and captures that share a pool's memory, by handle
        self.allocates_to = None  # the pool of a capture that runs
        self._lock = threading.Lock()
        self._num_waits = Counter()  # by thread
        self.default_stream = default_stream
        self._streams = {}  # by thread, if it is not the default one

    @property
    def stream(self):
        """The stream of this thread."""
        return self._streams.get(threading.get_ident(), self.default_stream)

    @property
    def tape(self):
        """The state of this thread's capture."""
        return self.captures.get(threading.get_ident())

    def run(self, func, args, kwargs):
        """One operator: on values in host memory, after a look at where they are said to be."""
        given = []
        held = [of_host(argument, given) for argument in args]
        of = func.overloadpacket
        on_host = of_host(kwargs, given) if kwargs else kwargs
        is_here = self._is_here(of, args, kwargs, given)
        if on_host:
            if on_host.get("device") is not None:
                on_host["device"] = torch.device("cpu")
            assert not on_host.pop("pin_memory", None) or not is_here, (
                "only memory of the host can be pinned"
            )
        if of is PIN:
            assert not is_here, "only memory of the host can be pinned"
            return args[0].clone()
        if (of is COPY or of is COPY_TO) and (type(given[-1]) is OnDevice) != is_here:
            return self._across(func, args, kwargs, on_host, given[-1])
        if not is_here:
            return func(*held, **on_host)
        self._check(func, args, given)
        if func is HISTC and not args[0].is_floating_point():  # which torch has for CUDA only
            return self.run(
                aten.to.dtype,
                (self.run(func, (args[0].float(), *args[1:]), kwargs), args[0].dtype),
                {},
            )
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

    def index(self, func, args):
        """Reading or writing with brackets: torch would ask the driver."""
        is_here = type(args[0]) is OnDevice
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in tensors_in(args[1]):
                if tensor.ndim:
                    assert is_here or type(tensor) is not OnDevice, (
                        "a tensor on the host and indices on the device"
                    )
                    if is_here and (
                        type(tensor) is not OnDevice or tensor.dtype in sync_guard.BOOLEAN
                    ):
                        self.wait(func)
            if any(
                isinstance(own, torch.Tensor)
                and own.ndim
                and (type(own) is not OnDevice) == is_here
                for own in args[2:]
            ):
                self.wait(func)
        out = func(*of_host(args, []))
        out = None if out is None else self._placed(out, [args[0]])
        if self.captures and self.tape is not None:
            self.tape.calls.append((func, args, {}, out))
        return out

    def _is_here(self, of, args, kwargs, given):
        if kwargs and kwargs.get("device") is not None:
            return torch.device(kwargs["device"]).type == "cuda"
        if of is COPY_TO:
            return type(args[0]) is OnDevice
        return OnDevice in map(type, given)

    def _check(self, func, args, given):
        if sync_guard._reads(func, args):
            self.wait(func)
        of = func.overloadpacket
        for tensor in given:
            if type(tensor) is OnDevice or not tensor.ndim:
                continue
            if of in INDEXED and tensor is not args[0]:
                self.wait(func)  # such indices are copied there
            elif of is not COPY_TO and of is not COPY:
                raise RuntimeError(
                    f"{func}: tensors on host and device: {[(t.shape, t.device) for t in given]}"
                )

    def _across(self, func, args, kwargs, on_host, source):
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

    def _placed(self, out, given):
        def placed(tensor):
            for own in given:
                if type(own) is OnDevice and own.held is tensor:
                    assert own.shape == tensor.shape, "changed its shape in place"
                    return own
            return OnDevice(tensor)

        return placed(out) if type(out) is torch.Tensor else each(out, placed)

    def _drawn(self, draw):
        """With the device's generator in the place of the host's."""
        if self.generator.is_capturing and self.tape is None:
            raise RuntimeError("Offset increment outside graph capture encountered unexpectedly.")
        state = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            return draw()
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(state)

    @property
    def num_waits(self):
        """How often this thread has waited."""
        return self._num_waits[threading.get_ident()]

    def wait(self, func):
        """The host waits until all is done."""
        if self.tape is not None:
            self.tape.is_broken = True
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        if self.sync_debug_mode == "error":
            raise RuntimeError(f"called a synchronizing CUDA operation: {func}")
        self._num_waits[threading.get_ident()] += 1
        self.finish(self.num_asked)

    @property
    def num_asked(self):
        """Copies to the host that anybody has asked for."""
        with self._lock:
            return self.num_arrived + len(self.arriving)

    def finish(self, num_asked):
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

    def manual_seed(self, seed):
        self.generator.manual_seed(int(seed))

    def get_states(self):
        return [self.generator.get_state()]

    def synchronize(self, device=None):
        self.refuse_beside_captures(torch.cuda.synchronize)
        self.wait(torch.cuda.synchronize)

    def refuse_beside_captures(self, func):
        """What concerns the whole device fails while another thread captures, and so does the
        capture.
        """
        for thread, tape in list(self.captures.items()):
            if thread != threading.get_ident():
                tape.is_broken = True
                raise RuntimeError(f"operation not permitted while another thread captures: {func}")

    @contextlib.contextmanager
    def on_stream(self, stream):
        before = self.stream
        self._streams[threading.get_ident()] = stream
        try:
            yield
        finally:
            self._streams[threading.get_ident()] = before

    def set_sync_debug_mode(self, mode):
        self.sync_debug_mode = mode


device = Device(None)  # replaced in each test


def torch_flash(
    query,
    key,
    value,
    cu_queries,
    cu_keys,
    max_queries,
    max_keys,
    is_causal=False,
    scale=None,
    window_size=(-1, -1),
    enable_gqa=False,
    **unused,
):
    assert all(argument is None for argument in unused.values()), unused
    assert enable_gqa or query.shape[1] == key.shape[1]
    return flash_attn_varlen_func(
        query,
        key,
        value,
        cu_queries,
        cu_keys,
        max_queries,
        max_keys,
        0.0,
        scale,
        is_causal,
        window_size,
    )[:2]


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_attn_probs=False,
):
    """By the documentation of the package of this name, and of the kernel that torch has from it."""
    assert q.dtype in HALF and q.dtype == k.dtype == v.dtype and dropout_p == 0.0
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] <= 256 and not q.shape[-1] % 8
    left, right = window_size
    is_causal = causal or right == 0
    assert is_causal or (left, right) == (-1, -1)
    entries = Entries(cu_seqlens_q, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    window = None if left == -1 else left + 1
    out, lse = OpaqueStandIn(q.device)(
        q, k, v, entries, is_causal, AttentionRules(scale, window, softcap or None)
    )
    return out, lse, None
