"""Tests for a CUDA device, and the whole engine, on a CPU stand-in for the device."""

from __future__ import annotations

import copy
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

from benchmarks.gpu import bandwidth, floor, identity
from benchmarks.gpu.__main__ import app
from benchmarks.gpu.contestants import COMPILED
from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
    tiny_prompts,
)
from hf_slospec.cuda import exact as exact_on_cuda
from hf_slospec.cuda.exact import InvariantProducts
from hf_slospec.drafters.assistant import AssistantDrafter
from hf_slospec.model import exact_trial
from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.measure import Forwards, Size
from hf_slospec.model.sampling import DoubledSums
from hf_slospec.model.target import PackedTarget
from tests.support.breadth import quick_or
from tests.support.cuda_tests import (  # noqa: F401  collected here once more
    check_self,
    moved,
    on_cuda,
    serve,
    test_a_capture_that_fails_leaves_cuda_usable,
    test_an_answer_one_question_late,
    test_auto_is_the_faster_of_triton_and_flash,
    test_drafting_and_verifying_wait_for_nothing,
    test_pieces_of_few_keys,
    test_replays_are_what_forwards_compute,
    test_too_much_memory_ends_it,
)
from tests.support.packed import overridden, packed_model
from tests.support.stand_ins.cuda_tensors import CUDA
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device"),
    pytest.mark.usefixtures("device"),
]
GREEDY = dict(do_sample=False)


# ---- what the stand-in is strict about


def test_operators_refuse_tensors_of_host_and_device_together():
    here = torch.ones(3)
    there = torch.ones(3, device="cuda")
    assert there.is_cuda and there.device == CUDA and not there.is_cpu
    for mix in (
        lambda: here + there,
        lambda: torch.cat([here, there]),
        lambda: there.index_add_(0, here.long(), there),
    ):
        with pytest.raises(RuntimeError, match="host and device"):
            mix()
    assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0, 2.0]  # one value may be of the host
    assert (here + there.cpu()).is_cpu and (here.to(CUDA) + there).is_cuda


def test_waits_of_the_host_are_counted_or_raise(device):
    there = torch.tensor([1, 0, 2], device="cuda")
    pinned = torch.empty(3, dtype=torch.int64, pin_memory=True)
    torch.cuda.set_sync_debug_mode("error")
    for wait in (
        there.tolist,
        there.nonzero,
        there.cpu,
        lambda: there[there > 0],
        lambda: bool(there.sum()),
    ):
        with pytest.raises(RuntimeError, match="synchronizing"):
            wait()
    pinned.copy_(there, non_blocking=True)
    there.copy_(torch.tensor([1, 0, 2]), non_blocking=True)
    torch.cuda.set_sync_debug_mode("default")
    before = device.num_waits
    assert there[there > 0].tolist() == [1, 2]
    assert device.num_waits == before + 2  # for the mask, and for the values


def test_copies_without_blocking_are_late():
    there = torch.tensor([1, 0, 2], device="cuda")
    here = torch.zeros(3, dtype=torch.int64)
    here.copy_(there, non_blocking=True)
    there.zero_()
    assert here.tolist() != [1, 0, 2]
    torch.cuda.synchronize()
    assert here.tolist() == [1, 0, 2]
    there.copy_(here, non_blocking=True)
    here.zero_()
    with pytest.raises(AssertionError, match="before the device had read it"):
        torch.cuda.synchronize()


def test_graphs_repeat_captured_operators():
    there = torch.ones(3, device="cuda")
    out = torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    out.copy_(there * 2 + 1)
    graph.capture_end()
    there.fill_(5.0)
    graph.replay()
    assert out.tolist() == [11.0, 11.0, 11.0]
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="capturing"):
        there.tolist()
    with pytest.raises(RuntimeError, match="previous error"):
        graph.capture_end()


def test_memory_pools_without_graphs_refuse_captures(device):
    memory = torch.cuda.graph_pool_handle()
    out = torch.zeros(3, device="cuda")

    def captured():
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(memory)
        out.add_(1)
        graph.capture_end()
        return graph

    kept = [captured(), captured()]
    assert device.users[memory] == 2
    kept.clear()
    with pytest.raises(RuntimeError, match="use_count > 0"):
        captured()


def test_captures_are_broken_by_calls_of_other_threads():
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    with ThreadPoolExecutor(1) as other:
        for call in (torch.cuda.synchronize, torch.cuda.empty_cache):
            with pytest.raises(RuntimeError, match="another thread captures"):
                other.submit(call).result(60)
    with pytest.raises(RuntimeError, match="previous error during capture"):
        graph.capture_end()
    with pytest.raises(RuntimeError, match="outside graph capture"):
        torch.rand(3, device="cuda")


# ---- the engine on the stand-in


def test_packed_forwards_on_cuda_disable_cudnn_attention(monkeypatch):
    enabled = list[bool]()
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return plain(*args, **kwargs)

    before = torch.backends.cuda.cudnn_sdp_enabled()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    for move, expected in ((on_cuda, False), (copy.deepcopy, before)):
        enabled.clear()
        packed = packed_model(move(tiny_model("llama")), "sdpa")
        enabled.clear()  # set by stock forwards, with which the model is checked
        Forwards(packed)(Size(4, 2, 8))
        assert enabled and set(enabled) == {expected}
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.nightly  # the interpreter takes half a minute
def test_exact_self_is_independent_of_the_batch(monkeypatch):
    monkeypatch.setattr(exact_trial, "PROMPTS", (3, 2))
    monkeypatch.setattr(exact_trial, "DEPTH", 1)
    models = [on_cuda(tiny_model("llama", noise=noise), torch.bfloat16) for noise in (0.0, 0.03)]
    for model in models:
        keep_one_layer(model)
    check_self(*models, [[5, 6, 7], [17]], max_new_tokens=2, **GREEDY)


def keep_one_layer(model):
    """Return the model with its first layer only, as the interpreter is slow."""
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


def test_models_that_cannot_be_exact_are_refused(monkeypatch):
    config = SLOSpecConfig(exact="self")
    match = r"Triton's attention is not available \(the kernel does not compute in torch.fl"
    with pytest.raises(UnsupportedOptionError, match=match):
        SLOSpecGenerator(on_cuda(tiny_model("llama")), config=config)
    monkeypatch.setattr(exact_trial, "PROMPTS", (9, 2))
    monkeypatch.setattr(exact_trial, "DEPTH", 3)  # rows of both trees: more than 16
    monkeypatch.setattr(exact_on_cuda, "_product", lambda rows, weight, _: products(rows, weight))
    match = r'exact="self" cannot be had of LlamaForCausalLM in torch.bf'
    model = keep_one_layer(on_cuda(tiny_model("llama"), torch.bfloat16))
    with pytest.raises(UnsupportedModelError, match=match):
        SLOSpecGenerator(model, config=config)


def test_means_of_a_row_are_the_same_beside_others():
    states = torch.randn(3, 70, 40, device=CUDA)

    def means(states):
        return states.mean(-1, keepdim=True), states.mean(dim=-1), states.mean(0), states.mean()

    with overridden(torch.nn.Module(), InvariantProducts()).in_force():
        found = means(states)
        assert torch.equal(states[1:2, 7:8].mean(-1), found[1][1:2, 7:8])
        assert torch.equal(torch.mean(states, -1), found[1])
    for ours, plain in zip(found, means(states), strict=True):
        torch.testing.assert_close(ours.cpu(), plain.cpu())


def products(rows, weight):
    """Products [num_rows, outputs] that divide sums by the number of rows, as cuBLAS's do."""
    parts = 2 if len(rows) > 16 else 1
    pairs = zip(rows.float().chunk(parts, -1), weight.float().chunk(parts, -1), strict=True)
    return sum((part @ other.T).to(rows.dtype) for part, other in pairs)


def test_running_sums_of_one_row_have_the_bits_of_several():
    seen = list[tuple[int, ...]]()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (torch.cumsum, torch.Tensor.cumsum):
                seen.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    probs = torch.rand(3, 50).softmax(-1)
    with Watch(), DoubledSums():
        sums = (
            probs[:1].cumsum(-1),
            torch.cumsum(probs[:1], dim=-1),
            probs.cumsum(-1)[:1],
            probs[0].cumsum(0)[None],
        )
    assert all(torch.equal(own, sums[0]) for own in sums)
    assert seen == [(2, 50), (2, 50), (3, 50), (50,)]


def test_a_step_makes_the_host_wait_twice(device, monkeypatch):
    """Once for the drafted trees and once for the chosen tokens, however many rows there are."""
    found = Counter[str]()

    def count(cls, name):
        method = getattr(cls, name)

        def run(*args):
            before = device.num_waits
            out = method(*args)
            found.update({f"waits to {name}": device.num_waits - before, f"calls to {name}": 1})
            return out

        monkeypatch.setattr(cls, name, run)

    count(AssistantDrafter, "draft")
    count(PackedTarget, "verify")
    models = [on_cuda(tiny_model("llama", noise=noise), torch.bfloat16) for noise in (0.0, 0.03)]
    config = SLOSpecConfig(policy="fixed", attention="flash", cuda_graphs=False)
    generator = SLOSpecGenerator(*models, config=config)
    generator.generate(**moved(ragged_prompts(4)), **GREEDY, max_new_tokens=12)
    assert found["calls to draft"] > 3
    assert found["waits to draft"] <= found["calls to draft"]
    assert found["waits to verify"] == found["calls to verify"]


def test_the_batcher_replays(kernel, captures):
    serve(*quick_or((3, 5), (4, 6)))
    assert captures


def test_streams_that_share_a_cache_wait_for_each_other():
    cache = packed_model(on_cuda(tiny_model("llama"))).kv_cache
    cache.reserve({CachedSequence(): 9})
    streams = torch.cuda.Stream(), torch.cuda.current_stream()
    addresses = {stack.data_ptr() for stack in cache.pool._stacks.values()}
    for stream, before in zip(streams, streams[::-1], strict=True):
        with torch.cuda.stream(stream):
            assert cache.pool is cache.pool
        assert stream.waited_for == [before] and stream.recorded == addresses


def test_calls_on_another_stream_beside_the_batcher():
    model = on_cuda(tiny_model("llama"))
    draft = on_cuda(tiny_model("llama", noise=0.03))
    inputs = moved(ragged_prompts(2))
    other = torch.cuda.Stream()
    alone = model.generate(**inputs, **GREEDY, max_new_tokens=6)
    config = SLOSpecConfig(policy="fixed", check_invariants=True)
    with SLOSpecGenerator(model, draft, config=config) as generator, torch.cuda.stream(other):
        handle = generator.submit([5, 6, 7], max_new_tokens=quick_or(10, 16), **GREEDY)
        for _ in range(quick_or(1, 2)):
            assert torch.equal(generator.generate(**inputs, **GREEDY, max_new_tokens=6), alone)
        handle.result(120)
    assert other.waited_for and torch.cuda.current_stream().waited_for


@pytest.mark.nightly
@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script.*:DeprecationWarning"
)  # torch's own, for static caches
def test_gpu_check_runs_through(tmp_path, monkeypatch):
    """All but its own tests, and times that say nothing."""
    monkeypatch.setitem(bandwidth.READ_BYTES, "cuda", 2**20)
    monkeypatch.setattr(floor, "NUM_FORWARDS", 2)
    monkeypatch.setattr(identity, "BATCH", 2)
    monkeypatch.setattr(identity, "tiny_prompts", lambda: [text[:30] for text in tiny_prompts()])
    monkeypatch.setattr(
        torch, "compile", lambda function, **_: function
    )  # there is no compiler for the stand-in
    path = tmp_path / "result.json"
    options = (
        "--shapes tiny --identity-shape tiny --batches 1 --skip-tests --profile --prompt-tokens 12"
        " --new-tokens 4 --repeats 1 --budget-s 3600 --json"
    )
    result = CliRunner().invoke(app, [*options.split(), str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())["results"]
    assert found["environment"]["device"] == "cuda:0"
    outcomes = {(record["dtype"], record["name"]): record["status"] for record in found["identity"]}
    assert outcomes.pop(("float32", "hf_slospec, flash")) == "refused"
    assert set(outcomes.values()) == {"passed"}
    (cell,) = found["speed"]
    rows = {row["name"]: row for row in cell["contestants"]}
    assert {row["status"] for row in [*rows.values(), cell["profile"]]} == {"measured"}, rows
    assert rows[COMPILED]["compiled"]
    assert len(found["floor"]) == 1
