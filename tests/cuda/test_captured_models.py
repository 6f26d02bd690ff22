"""Captured forwards of whole models on the CPU: tapes of operators stand in for CUDA graphs."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cuda import captured as captured_forwards
from hf_slospec.cuda import flash_kernels as flash_kernel_choice
from hf_slospec.model.batch import CachedSequence
from hf_slospec.model.measure import CURVE, HELD_OUT, SLOPES, Forwards
from hf_slospec.model.memory import as_memory_error
from tests.support.breadth import quick_or
from tests.support.graph_bench import Bench
from tests.support.packed import packed_model
from tests.support.stand_ins.graphs import OpaqueStandIn, Tapes
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

GREEDY: dict[str, Any] = dict(do_sample=False)
# Without packed weights, which are for CPUs: packed experts would be read by the host.
CONFIG = SLOSpecConfig(
    attention="flash",
    policy="fixed",
    max_depth=3,
    max_width=2,
    prepack=False,
    check_invariants=True,
)


def test_pools_without_graphs_have_no_padding(tapes):
    for settings in (dict(attention="sdpa"), dict(attention="flash", cuda_graphs=False)):
        packed = packed_model(tiny_model("llama"), **settings)
        cache = packed.kv_cache
        cache.reserve({CachedSequence(): 10})
        assert packed.path("cuda_graphs") is None and len(cache.pool.keys[0]) == 10


def test_models_that_make_the_host_wait_run_without_graphs(tapes, caplog):
    model = copy.deepcopy(tiny_model("llama"))
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden) if hidden.abs().sum() > 0 else hidden
    layer.per_token = True
    generator = SLOSpecGenerator(model, config=CONFIG)
    with caplog.at_level(logging.INFO, "hf_slospec.cuda.graphs"):
        assert_same_as_stock(
            model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20
        )
    (record,) = caplog.records
    assert "makes the host wait" in record.getMessage() and not tapes.num_captured


def test_hooks_that_collect_hidden_states_allow_graphs(tapes):
    """The hooks that transformers leaves there do nothing but collect."""
    model = copy.deepcopy(tiny_model("llama"))
    model(torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    assert model.model.layers[0]._forward_hooks
    generator = SLOSpecGenerator(model, config=CONFIG)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    assert tapes.num_replayed


class OpaqueWithoutSoftcap(OpaqueStandIn):
    has_softcap = False


def test_layers_that_go_to_sdpa_are_not_captured(tapes, monkeypatch):
    monkeypatch.setattr(flash_kernel_choice, "KERNELS", (OpaqueWithoutSoftcap,))
    generator = SLOSpecGenerator(tiny_model("gemma2"), config=CONFIG)
    assert_same_as_stock(
        tiny_model("gemma2"), generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20
    )
    assert not tapes.num_captured


class BrokenTapes(Tapes):
    def capture(self, run):
        raise RuntimeError("operation not permitted when stream is capturing")


class WrongTapes(Tapes):
    def capture(self, run):
        out = torch.zeros_like(run())
        return lambda: out


@pytest.mark.parametrize("capturer", [BrokenTapes, WrongTapes])
def test_failed_captures_turn_graphs_off(capturer, tapes, monkeypatch, caplog):
    monkeypatch.setattr(captured_forwards, "capturer_for", lambda device: capturer())
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, config=CONFIG)
    with caplog.at_level(logging.INFO, "hf_slospec.cuda.graphs"):
        for _ in range(2):
            assert_same_as_stock(
                model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20
            )
    assert len(caplog.records) == 1


def test_measured_forwards_are_replays_at_all_sizes(tapes):
    packed = packed_model(tiny_model("llama"), "flash", prepack=False)
    forward_s = Forwards(packed)
    for size in (*CURVE, *SLOPES, *HELD_OUT):
        before = packed.path("cuda_graphs").counts
        assert forward_s(size) > 0
        now = packed.path("cuda_graphs").counts
        assert now == replace(before, captures=now.captures, replays=before.replays + 1), size


def test_larger_pools_capture_known_forwards_at_once(tapes):
    bench = Bench(tiny_model("llama"))
    for _ in range(3):
        bench.verify()
    before = bench.packed.path("cuda_graphs").counts
    pool = bench.sequences.cache.pool
    bench.sequences.cache.reserve({CachedSequence(): pool.num_slots + 1})
    assert bench.sequences.cache.pool is not pool
    bench.verify()
    assert bench.packed.path("cuda_graphs").counts == replace(before, captures=before.captures + 1)


def test_attributes_that_no_forward_reads_keep_graphs(tapes):
    model = copy.deepcopy(tiny_model("llama"))
    bench = Bench(model)
    for _ in range(3):
        bench.verify()
    model._cached_continuous_batching_manager = object()
    bench.packed.renew()
    before = bench.packed.path("cuda_graphs").counts
    bench.verify()
    assert bench.packed.path("cuda_graphs").counts == replace(before, replays=before.replays + 1)


def test_calls_replay_graphs_of_earlier_calls(tapes):
    model = tiny_model("llama")
    draft = tiny_model("llama", noise=0.03)
    generator = SLOSpecGenerator(model, draft, config=CONFIG)
    inputs = ragged_prompts(2)
    captured = []
    for _ in range(quick_or(4, 6)):
        before = tapes.num_captured
        assert_same_as_stock(model, generator.generate, inputs, **GREEDY, max_new_tokens=20)
        captured.append(tapes.num_captured - before)
    assert captured[0] and not captured[-1]
    assert all(model.kv_bytes for model in generator.decoder.speculator.models)
    replayed = tapes.num_replayed
    assert_same_as_stock(model, generator.generate, inputs, do_sample=True, max_new_tokens=20)
    assert tapes.num_replayed > replayed
    assert_same_as_stock(
        model, generator.generate, ragged_prompts(5), **GREEDY, max_new_tokens=30
    )  # a larger pool
    assert_same_as_stock(model, generator.generate, inputs, **GREEDY, max_new_tokens=20)


def test_calls_with_and_without_inference_mode(tapes):
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    for is_inference in (True, False):
        with torch.inference_mode(is_inference):
            assert_same_as_stock(
                model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20
            )
    assert tapes.num_replayed


def test_idle_pools_stay_small_and_are_freed_when_memory_is_short(tapes):
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    models = generator.decoder.speculator.models
    sizes = []
    for batch in (4, 5, 5):  # more, and the same again
        generator.generate(**ragged_prompts(batch), **GREEDY, max_new_tokens=30)
        sizes.append(sum(own.kv_bytes for own in models))
    assert sizes[0] < sizes[1] < 1.5 * sizes[0] and sizes[2] == sizes[1]
    with pytest.raises(MemoryError), as_memory_error():
        raise torch.OutOfMemoryError
    assert not any(own.kv_bytes for own in models)
