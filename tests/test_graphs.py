"""Captured forwards on the CPU: tapes of operators stand in for CUDA graphs."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.algo.latency import ForwardCost, LatencyCurve
from hf_slospec.algo.tree import TokenTree
from hf_slospec.engine.protocols import Plan
from hf_slospec.engine.request import Request
from hf_slospec.models import packed
from hf_slospec.models.attention import NewTokens, kernel_choice
from hf_slospec.models.cuda import graphs
from hf_slospec.models.cuda.bucket_sizes import BUCKETS
from hf_slospec.models.cuda.deferred import DeferredFlags
from hf_slospec.models.cuda.graphs import Graphs
from hf_slospec.models.cuda.padding import MAX_PADDING_SLOTS, padded
from hf_slospec.models.cuda.sync_guard import HostSyncError, SyncGuard
from hf_slospec.models.cuda.transfer import DeviceCopy, signature, tensors_in
from hf_slospec.models.drafters.assistant import AssistantDrafter
from hf_slospec.models.kv_cache import sequences as sequences_module
from hf_slospec.models.kv_cache.pool import CachedSequence, KVPool
from hf_slospec.models.memory import as_memory_error
from hf_slospec.models.packed import PackedModel
from tests.graph_bench import TREES, Bench, tree
from tests.graph_stand_in import OpaqueStandIn, Tapes
from tests.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

CPU = torch.device("cpu")
GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=30, top_p=0.95)
CONFIG = SLOSpecConfig(attention="flash", policy="fixed", max_depth=3, max_width=2, check_invariants=True)
COST = ForwardCost(LatencyCurve((1, 16), (0.001, 0.002)))  # measuring would capture forwards of many sizes


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> Tapes:
    """Stands in for CUDA's graphs of all models that are made while the test runs."""
    made = Tapes()
    monkeypatch.setattr(kernel_choice, "KERNELS", (OpaqueStandIn,))
    monkeypatch.setattr(packed, "capturer_for", lambda device: made)
    monkeypatch.setattr(graphs, "PATIENCE", 1)
    monkeypatch.setattr("hf_slospec.generate.speculator.load_profile", lambda packed: COST)
    return made


# ---- whole models


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window", "gemma2", "gemma3", "mixtral", "gpt-oss"])
def test_whole_models_token_for_token(family: str, tapes: Tapes) -> None:
    model = tiny_model(family)
    generator = SLOSpecGenerator(model, tiny_model(family, noise=0.03), config=CONFIG)
    for options in (GREEDY, SAMPLED):
        assert_same_as_stock(model, generator.generate, ragged_prompts(3), **options, max_new_tokens=36)
    assert tapes.num_replayed > 3 * tapes.num_captured > 0


def test_pools_that_grow(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs of a pool go with it."""
    monkeypatch.setattr(sequences_module, "FIRST_ROOM", 12)
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=60)
    assert tapes.num_replayed > tapes.num_captured > 0


def test_requests_come_and_go_and_lose_their_room(tapes: Tapes) -> None:
    model = tiny_model("llama")
    config = CONFIG.model_copy(update=dict(kv_tokens=150, max_batch=3, prefill_chunk=16))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 101, rng.integers(3, 30)).tolist() for _ in range(9)]
    lengths = rng.integers(5, 30, 9).tolist()
    expected = []
    for prompt, length in zip(prompts, lengths, strict=True):
        row = torch.tensor([prompt])
        out = model.generate(row, attention_mask=torch.ones_like(row), do_sample=False, max_new_tokens=length)
        expected.append(out[0, len(prompt) :].tolist())
    with SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=config) as generator:
        handles = [
            generator.submit(prompt, do_sample=False, max_new_tokens=length, best_effort=index < 5, slo_ttft=60.0)
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        assert [handle.result(120).token_ids for handle in handles] == expected
        assert generator.stats().preempted > 0
    assert tapes.num_replayed > tapes.num_captured > 0


def test_switched_off(tapes: Tapes) -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, config=CONFIG.model_copy(update=dict(cuda_graphs=False)))
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=12)
    assert not tapes.num_captured
    assert not PackedModel(model, "flash", cuda_graphs=False).new_pool(10).num_padding_slots


def test_no_graphs_and_no_padding_on_a_cpu() -> None:
    model = PackedModel(tiny_model("llama"))
    pool = model.new_pool(10)
    assert not model.has_graphs and pool.graphs is None and len(pool.keys[0]) == 10


def test_a_model_that_asks_the_device_runs_without_graphs(tapes: Tapes, caplog: pytest.LogCaptureFixture) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layer = model.model.layers[0].mlp
    plain = layer.forward
    layer.forward = lambda hidden: plain(hidden) if hidden.abs().sum() > 0 else hidden
    generator = SLOSpecGenerator(model, config=CONFIG)
    with caplog.at_level(logging.INFO, "hf_slospec.models.cuda.graphs"):
        assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    (record,) = caplog.records
    assert "makes the host wait" in record.getMessage() and not tapes.num_captured


def test_a_model_once_asked_for_hidden_states_has_graphs(tapes: Tapes) -> None:
    """The hooks that transformers leaves there do nothing but collect."""
    model = copy.deepcopy(tiny_model("llama"))
    model(torch.ones(1, 2, dtype=torch.int64), output_hidden_states=True)
    assert model.model.layers[0]._forward_hooks
    generator = SLOSpecGenerator(model, config=CONFIG)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    assert tapes.num_replayed


def test_layers_that_go_to_sdpa_are_not_captured(tapes: Tapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpaqueStandIn, "has_softcap", False)
    generator = SLOSpecGenerator(tiny_model("gemma2"), config=CONFIG)
    assert_same_as_stock(tiny_model("gemma2"), generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    assert not tapes.num_captured


class BrokenTapes(Tapes):
    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")


class WrongTapes(Tapes):
    def capture(self, run: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        out = torch.zeros_like(run())
        return lambda: out


@pytest.mark.parametrize("maker", [BrokenTapes, WrongTapes])
def test_a_capture_that_fails_ends_it_and_nothing_else(
    maker: Any, tapes: Tapes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed, "capturer_for", lambda device: maker())
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, config=CONFIG)
    with caplog.at_level(logging.INFO, "hf_slospec.models.cuda.graphs"):
        for _ in range(2):
            assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    assert len(caplog.records) == 1


def test_calls_take_over_the_graphs_of_those_before(tapes: Tapes) -> None:
    model, draft = tiny_model("llama"), tiny_model("llama", noise=0.03)
    generator = SLOSpecGenerator(model, draft, config=CONFIG)
    inputs = ragged_prompts(2)
    captured = []
    for _ in range(6):
        before = tapes.num_captured
        assert_same_as_stock(model, generator.generate, inputs, **GREEDY, max_new_tokens=20)
        captured.append(tapes.num_captured - before)
    assert captured[0] and not captured[-1]
    assert all(model.kept_bytes for model in generator._decoder.speculator.models)
    replayed = tapes.num_replayed
    assert_same_as_stock(model, generator.generate, inputs, do_sample=True, max_new_tokens=20)
    assert tapes.num_replayed > replayed
    assert_same_as_stock(model, generator.generate, ragged_prompts(5), **GREEDY, max_new_tokens=60)  # a larger pool
    assert_same_as_stock(model, generator.generate, inputs, **GREEDY, max_new_tokens=20)


def test_what_changes_between_calls_is_seen(tapes: Tapes) -> None:
    """Also where it is no parameter: an adapter's scale, a forward of a layer's own, a tensor, the config."""
    model: Any = copy.deepcopy(tiny_model("llama"))
    layer = model.model.layers[0].mlp
    layer.scaling, layer.shift, plain = {"default": 1.0}, torch.zeros(32), layer.forward
    layer.forward = lambda hidden: plain(hidden) * layer.scaling["default"] + layer.shift
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)

    def check() -> torch.Tensor:
        replayed = tapes.num_replayed
        output = assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
        assert tapes.num_replayed > replayed
        return output.sequences

    found = [check()]
    layer.scaling["default"] = -3.0
    found.append(check())
    layer.shift = torch.linspace(-4, 4, 32)
    found.append(check())
    layer.forward = lambda hidden: -plain(hidden)
    found.append(check())
    assert len({str(sequences.tolist()) for sequences in found}) == len(found)
    granted = graphs.GraphPreconditions(model)
    before = granted.now()
    model.config.some_softcapping = 3.0
    granted.renew()
    assert granted.now() != before


def test_calls_with_and_without_inference_mode(tapes: Tapes) -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    for is_inference in (True, False, True, False):
        with torch.inference_mode(is_inference):
            assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)
    assert tapes.num_replayed


def test_a_kept_pool_takes_no_more_than_is_needed_and_goes_when_memory_is_short(tapes: Tapes) -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    models = generator._decoder.speculator.models
    sizes = []
    for batch in (4, 5, 5):  # more, and the same again
        generator.generate(**ragged_prompts(batch), **GREEDY, max_new_tokens=30)
        sizes.append(sum(own.kept_bytes for own in models))
    assert sizes[0] < sizes[1] < 1.5 * sizes[0] and sizes[2] == sizes[1]
    with pytest.raises(MemoryError), as_memory_error():
        raise torch.OutOfMemoryError
    assert not any(own.kept_bytes for own in models)


def test_calls_of_several_threads_have_pools_of_their_own(tapes: Tapes) -> None:
    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    inputs = [ragged_prompts(2, seed) for seed in range(6)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda own: generator.generate(**own, **GREEDY, max_new_tokens=20), inputs))
    for own, output in zip(inputs, found, strict=True):
        assert torch.equal(output, model.generate(**own, **GREEDY, max_new_tokens=20))


def test_what_a_broken_call_leaves_is_not_taken_over(tapes: Tapes) -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 40:
            raise ValueError("broken")
        return scores

    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, tiny_model("llama", noise=0.03), config=CONFIG)
    with pytest.raises(ValueError, match="broken"):
        generator.generate(**ragged_prompts(1), **GREEDY, max_new_tokens=40, logits_processor=[broken])
    assert tapes.num_captured and not any(own.kept_bytes for own in generator._decoder.speculator.models)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **GREEDY, max_new_tokens=20)


# ---- padding and its ghosts


def fresh(length: int) -> NewTokens:
    return NewTokens(CachedSequence(0, 999), torch.ones(length), torch.ones(length), torch.ones(length, length).bool())


@given(st.lists(st.integers(1, 20), min_size=1, max_size=64), st.data())
@settings(max_examples=200)
def test_rows_come_in_few_sizes(lengths: list[int], data: st.DataObject) -> None:
    pool, parts = KVPool([], 1000, MAX_PADDING_SLOTS), [fresh(length) for length in lengths]
    num_logits = data.draw(st.integers(0, sum(lengths)))
    larger = padded(parts, torch.arange(num_logits), pool)
    if larger is None:
        assert sum(lengths) > BUCKETS[-1] - MAX_PADDING_SLOTS
        return
    more, logit_rows = larger
    assert more[: len(parts)] == parts and len(more) in BUCKETS
    assert sum(len(part.input_ids) for part in more) in BUCKETS and len(logit_rows) in (0, 1, *BUCKETS)
    assert logit_rows[:num_logits].tolist() == list(range(num_logits)) and not logit_rows[num_logits:].any()
    slots = [slot for ghost in more[len(parts) :] for slot in own_slots(ghost)]
    assert slots == list(range(1000, 1000 + len(slots))) and len(slots) <= MAX_PADDING_SLOTS
    for ghost in more[len(parts) :]:
        assert len(ghost.input_ids) and torch.equal(ghost.mask, torch.eye(len(ghost.input_ids)).bool())


def own_slots(part: NewTokens) -> range:
    start = part.sequence.start + part.sequence.length
    return range(start, start + len(part.input_ids))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_ghosts_touch_nothing_and_are_not_seen(family: str, tapes: Tapes) -> None:
    """Whatever their slots hold; before the capture, with it, and replayed as texts grow over their window."""
    ours, plain = Bench(tiny_model(family)), Bench(tiny_model(family), cuda_graphs=False)
    pool = ours.sequences.pool
    for _ in range(8):
        own = [slot for part in ours.parts() for slot in own_slots(part)]
        others = torch.ones(pool.num_slots, dtype=torch.bool).index_fill(0, torch.tensor(own), False)
        before = [stored[: pool.num_slots].clone() for stored in (*pool.keys, *pool.values)]
        for stored in (*pool.keys, *pool.values):
            stored[pool.num_slots :] = torch.nan
        torch.testing.assert_close(ours.verify(), plain.verify())
        for stored, old in zip((*pool.keys, *pool.values), before, strict=True):
            assert torch.equal(stored[: pool.num_slots][others], old[others])
            assert not torch.equal(stored[own], old[own]) and not stored[: pool.num_slots].isnan().any()
        ours.grow(2)
        plain.grow(2)
        ours.sequences.check(ours.requests)
    assert tapes.num_replayed > tapes.num_captured > 0


# ---- signatures


def test_a_forward_of_the_same_sizes_has_the_same_signature_and_of_others_another(tapes: Tapes) -> None:
    bench = Bench(tiny_model("gemma3"))
    bench.verify()

    def inputs(trees: list[tuple[int, ...]] = TREES) -> Any:
        pairs = zip(bench.requests, trees, strict=True)
        parts = [bench.sequences.chain_and_tree(r, r.tokens[-1:], tree(r, parents)) for r, parents in pairs]
        larger = padded(parts, torch.arange(5), bench.sequences.pool)
        assert larger is not None
        return bench.packed._inputs(packed.PackedBatch.of(larger[0], is_padded=True), *larger)

    first = inputs()
    assert any(key[2] is not None for key in first.plans) and len(tensors_in(first)) > 10
    assert signature(inputs([(-1, 0, 1, 1, 2), (-1,), (-1, 0, 0)])) == signature(first)
    assert signature(inputs([(-1, *range(12)), (-1,), (-1,)])) != signature(first)
    bench.grow(3)
    later = inputs()
    assert signature(later) == signature(first)
    assert any(not torch.equal(a, b) for a, b in zip(tensors_in(later), tensors_in(first), strict=True))


def test_whatever_the_host_reads_is_in_the_signature() -> None:
    def made(**changes: Any) -> Any:
        values = dict(a=torch.ones(2, 3), n=4, none=None, items=[torch.ones(1)], key=7) | changes
        return {values.pop("key"): values}

    first = signature(made())
    assert signature(made(a=torch.zeros(2, 3))) == first
    for changes in (
        dict(a=torch.ones(3, 2)), dict(a=torch.ones(2, 3).bool()), dict(a=torch.ones(2, 3, device="meta")),
        dict(n=5), dict(n=4.0), dict(none=torch.ones(1)), dict(items=[torch.ones(1)] * 2), dict(key=8),
        dict(items=(torch.ones(1),)),
    ):  # fmt: skip
        assert signature(made(**changes)) != first, changes


def test_a_parcel_holds_what_is_put_in() -> None:
    def made(start: int) -> Any:
        ranges = [torch.arange(start, start + n) for n in (3, 0, 5)]
        return {
            "a": ranges,
            "b": (torch.tensor([[True, False]]), ranges[2].int(), ranges[0].double().view(3, 1)),
            "c": 1,
        }

    parcel = DeviceCopy(made(0), CPU)
    for start in (3, 9):
        parcel.fill(made(start))
        assert signature(parcel.content) == signature(made(start))
        for found, right in zip(tensors_in(parcel.content), tensors_in(made(start)), strict=True):
            assert torch.equal(found, right)


# ---- which graphs there are


def scaled(inputs: Any) -> torch.Tensor:
    return inputs["x"] * inputs["factor"]


def inputs_of(size: int, factor: int = 2) -> Any:
    return {"x": torch.arange(size), "factor": factor}


def test_graphs_are_captured_when_they_recur_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    tapes = Tapes()
    held = Graphs(tapes, CPU)
    for _ in range(graphs.PATIENCE):
        assert held.run(inputs_of(3), scaled, 0) is None
    captured, replayed = held.run(inputs_of(3), scaled, 0), held.run(inputs_of(3), scaled, 0)
    assert captured.tolist() == replayed.tolist() == [0, 2, 4]
    held.patience = 0
    for size in (4, 3, 5):
        held.run(inputs_of(size), scaled, 0)
    assert (len(held), tapes.num_captured) == (2, 3)
    held.run(inputs_of(3), scaled, 0)
    assert tapes.num_captured == 3  # it was used after the one that went
    held.run(inputs_of(4), scaled, 0)
    assert tapes.num_captured == 4
    assert held.run(inputs_of(4, factor=5), scaled, 0).tolist() == [0, 5, 10, 15]


def test_graphs_go_when_what_they_take_for_granted_changes() -> None:
    held = Graphs(Tapes(), CPU)
    held.patience = 0
    held.run(inputs_of(3), scaled, "here")
    held.run(inputs_of(4), scaled, "here")
    assert len(held) == 2
    held.run(inputs_of(4), scaled, "there")
    assert len(held) == 1


def test_graphs_that_take_too_much_memory_end(caplog: pytest.LogCaptureFixture) -> None:
    class Large(Tapes):
        max_bytes = 25

        def num_bytes(self) -> int:
            return 10 * self.num_captured

    held = Graphs(Large(), CPU)
    held.patience = 0
    with caplog.at_level(logging.INFO, "hf_slospec.models.cuda.graphs"):
        for size in range(1, 6):
            out = held.run(inputs_of(size), scaled, 0)
            assert held.is_off == (size >= 3) and (out is None) == (size > 3)
    assert not len(held) and len(caplog.records) == 1


def test_weights_that_move_and_settings_that_change_are_noticed() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    granted = graphs.GraphPreconditions(model)
    first = granted.now()
    model[0].weight.data.mul_(2.0)
    assert granted.now() == first  # graphs read the weights where they are
    model[0].weight.data = model[0].weight.data.clone()
    second = granted.now()
    assert second != first
    model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    third = granted.now()
    assert third != second
    model[1].eps = 1.0
    granted.renew()
    assert granted.now() != third and granted.is_plain
    model[1].register_forward_hook(lambda *_: None)
    granted.renew()
    assert not granted.is_plain


# ---- without waiting for the device

READS_ON_HOST = {
    getattr(torch.Tensor, name)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")
}


class NoRead(torch.overrides.TorchFunctionMode):
    """Also finds, on a CPU, what would wait on a GPU only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS_ON_HOST, f"{func} has the host wait for the device"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("patience", [0, 999])
def test_drafting_and_verifying_wait_for_nothing(
    family: str, patience: int, tapes: Tapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny_model(family))
    drafter = AssistantDrafter(bench.packed, 20, 101)
    plan = Plan(4, 2, min_path_prob=1e-9, min_gain=1e-9, min_confidence=1e-9)
    expected = drafter.draft(bench.requests, plan)
    bench.verify()
    layers = list[Any]()
    monkeypatch.setattr(drafter, "_trees", lambda requests, made: layers.extend(made) or [])  # the copy to the host
    monkeypatch.setattr(DeferredFlags, "next", lambda self, answer: False)  # what waits is a level behind
    for sequences in (drafter.sequences, bench.sequences):
        sequences.pool.graphs.patience = patience
    for request in bench.requests:
        drafter.sequences.of(request).length -= 1
    if patience == 0:  # captures look at their first result
        drafter._draft(bench.requests, plan)
        bench.verify()
        for request in bench.requests:
            drafter.sequences.of(request).length -= 1
    layers.clear()
    captured = tapes.num_captured
    with SyncGuard(), NoRead():
        drafter._draft(bench.requests, plan)
        bench.verify()
    assert tapes.num_captured == captured and bool(captured) == (patience == 0)
    for index, found in enumerate(expected):
        assert found.tokens[1:].tolist() == torch.cat([tokens[index] for tokens, _, _ in layers]).tolist()


def test_reads_are_found() -> None:
    x = torch.ones(3)
    for reads in (
        lambda: x.sum().item(), lambda: bool((x > 0).any()), lambda: x.nonzero(), lambda: x[x > 0],
        lambda: x.masked_select(x > 0), lambda: x.repeat_interleave(x.long()), lambda: x.unique(),
        lambda: torch.where(x > 0), lambda: x.to("meta"),
    ):  # fmt: skip
        with SyncGuard(), pytest.raises(HostSyncError):
            reads()
    with SyncGuard():
        assert x[torch.tensor([0])].shape == x.index_put((torch.tensor([0]),), x[:1])[:1].shape


def test_an_answer_one_question_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafting ends a level later, and no other way."""
    answers = DeferredFlags(CPU)
    assert [answers.next(torch.tensor(answer)) for answer in (False, True, False)] == [False, True, False]
    requests = [Request(index, [1, 5 + index, 9], 40) for index in range(4)]

    def drafted() -> list[TokenTree]:
        drafter = AssistantDrafter(PackedModel(tiny_model("llama")), 8, 101)
        return drafter.draft(requests, Plan(8, 1, min_path_prob=0.0, min_gain=0.3))

    at_once = drafted()
    monkeypatch.setattr("hf_slospec.models.drafters.assistant.DeferredFlags", Late)
    for early, late in zip(at_once, drafted(), strict=True):
        assert late.max_depth == early.max_depth + 1 < 8
        assert late.up_to(early.max_depth).tokens.tolist() == early.tokens.tolist()


class Late(DeferredFlags):
    def __init__(self, device: torch.device):
        super().__init__(device)
        self.lag = 1
