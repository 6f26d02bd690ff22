"""Drafting from the tokens that the target found probable before."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from hf_slospec import Drafter, Plan, Request, SLOSpecConfig, SLOSpecGenerator, TokenTree, load_drafter
from hf_slospec.algo.tree import FloatArray, IntArray
from hf_slospec.drafters.recycling import MIN_PROB, TRUST, RecyclingDrafter, Successors
from hf_slospec.engine.request import RequestParams
from hf_slospec.models import target as target_module
from hf_slospec.models.sampling import most_probable
from tests.serving.test_hybrids import tiny
from tests.support.breadth import nightly_but, quick_or
from tests.support.served_pair import WAIT_S, Holds
from tests.support.toys.noise import KnownNoise
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model
from tests.support.toys.trees import SEEDS, path_to

GREEDY: dict[str, Any] = dict(do_sample=False, eos_token_id=None)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.7, eos_token_id=None)
WHOLE = SLOSpecConfig(policy="fixed", max_depth=4, max_width=3, check_invariants=True)


def request_of(tokens: Sequence[int], index: int = 0, **options: Any) -> Request:
    return Request(index, RequestParams(tokens, 1000, **options))


def told(drafter: RecyclingDrafter, request: Request, begin: int, *after: dict[int, float]) -> None:
    """Say what the target found probable after the request's tokens from ``begin`` on."""
    width = max(map(len, after))
    tokens, probs = np.zeros((len(after), width), np.int64), np.zeros((len(after), width))
    for row, successors in enumerate(after):
        tokens[row, : len(successors)], probs[row, : len(successors)] = list(successors), list(successors.values())
    chain = TokenTree.chain(request.tokens[begin], request.tokens[begin + 1 : begin + len(after)], 1.0)
    drafter.take_successors(request, begin, chain, tokens, probs)


def draft(drafter: RecyclingDrafter, request: Request, depth: int = 3, width: int = 2) -> dict[tuple[int, ...], float]:
    """The paths of the tree and their probabilities."""
    [tree] = drafter.draft([request], Plan(depth, width))
    tree.check()
    assert tree.tokens[0] == request.tokens[-1]
    assert tree.max_depth <= depth and tree.num_nodes - 1 <= depth * width
    paths = [tuple(path_to(tree, node)) for node in range(1, tree.num_nodes)]
    assert len(set(paths)) == len(paths)
    return dict(zip(paths, tree.path_probs[1:].tolist(), strict=True))


def test_two_tokens_of_context_come_before_one() -> None:
    drafter, request = RecyclingDrafter(), request_of([1, 2, 3, 2])
    told(drafter, request, 0, {2: 0.9}, {3: 0.8, 4: 0.1}, {2: 0.7})
    assert draft(drafter, request, 2, 3) == pytest.approx(
        {(3,): 0.8 * TRUST, (4,): 0.1 * TRUST, (3, 2): 0.8 * TRUST * 0.7}  # 2 was not seen behind 3, 3 was behind 2
    )
    request.emit(1)
    request.emit(2)
    assert draft(drafter, request, 1, 2) == pytest.approx({(3,): 0.8, (4,): 0.1})
    told(drafter, request, 1, {5: 0.5})
    assert draft(drafter, request, 1, 2) == {(5,): 0.5}  # the latest counts


def test_nothing_is_drafted_after_unknown_tokens() -> None:
    drafter, request = RecyclingDrafter(), request_of([1, 2, 3])
    assert draft(drafter, request) == {}
    told(drafter, request, 2, {7: 0.9, 8: MIN_PROB / 2})
    assert draft(drafter, request) == {(7,): 0.9}


@given(seed=SEEDS, depth=st.integers(1, 5), width=st.integers(1, 4), num_tokens=st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_trees_hold_recorded_successors_only(seed: int, depth: int, width: int, num_tokens: int) -> None:
    rng, drafter = np.random.default_rng(seed), RecyclingDrafter()
    request = request_of(rng.integers(0, num_tokens, 20).tolist())
    seen = set[tuple[int, int]]()
    for begin in range(0, 15, 5):
        rows = [
            dict(
                zip(rng.permutation(num_tokens).tolist(), sorted(rng.dirichlet(np.ones(num_tokens)))[::-1], strict=True)
            )
            for _ in range(5)
        ]
        told(drafter, request, begin, *rows)
        seen |= {(request.tokens[begin + i], token) for i, row in enumerate(rows) for token in row}
    paths = draft(drafter, request, depth, width)
    assert all(pair in seen for path in paths for pair in zip((request.tokens[-1], *path), path, strict=False))
    assert list(paths.values()) == sorted(paths.values(), reverse=True)
    assert draft(drafter, request, depth, width) == paths


def test_the_oldest_contexts_are_dropped() -> None:
    known = Successors(max_contexts=6)
    for token in range(10):
        known.record(99, TokenTree.root_only(token), np.array([[token + 1]]), np.array([[0.9]]))
        assert len(known) <= 6
    assert known.after(0, 99, 9) == ([10], [0.9])
    assert known.after(0, 98, 9)[0] == [10]
    assert known.after(0, 99, 0) == ((), ())


def test_requests_share_by_salt_and_only_if_they_are_allowed_to() -> None:
    for shares_texts in (False, True):
        drafter = RecyclingDrafter(shares_texts=shares_texts)
        told(drafter, request_of([1, 2], cache_salt="a"), 0, {2: 0.9}, {3: 0.9})
        assert bool(draft(drafter, request_of([1, 2], 1, cache_salt="a"))) is shares_texts
        assert draft(drafter, request_of([1, 2], 2, cache_salt="b")) == {}


def test_release_and_requests_that_are_gone() -> None:
    drafter, request = RecyclingDrafter(), request_of([1, 2])
    for _ in range(2):
        told(drafter, request, 0, {2: 0.9}, {3: 0.9})
        assert draft(drafter, request)
        drafter.release(request)
        drafter.release(request)
        assert draft(drafter, request) == {}
    del request
    gc.collect()
    assert not drafter._of_requests


def test_noise_orders_branches() -> None:
    request = Request(0, RequestParams([7, 1], 100, is_sampled=True), new_noise=lambda _: KnownNoise())
    drafter, plain = RecyclingDrafter(), request_of([7, 1], 1)
    for each in (request, plain):
        told(drafter, each, 0, {1: 0.9}, {5: 0.4, 3: 0.3, 4: 0.05})
    trees = drafter.draft([request, plain], Plan(1, 2))
    assert [tree.tokens.tolist() for tree in trees] == [[1, 4, 5], [1, 5, 3]]


class Listener(Drafter):
    """Drafts two branches, and keeps what it is told."""

    num_successors = 3

    def __init__(self) -> None:
        self.told: list[tuple[list[int], TokenTree, IntArray, FloatArray]] = []

    def draft(self, requests: Sequence[Request], plan: Plan) -> list[TokenTree]:
        columns = ([-1, 0, 0, 2], [0, 1, 1, 2], [1.0, 0.6, 0.4, 0.3])
        trees = (TokenTree(np.array([r.tokens[-1], 5, 6, 7]), *map(np.array, columns)) for r in requests)
        return [tree.up_to(plan.depth) for tree in trees]

    def take_successors(self, request: Request, begin: int, tree: TokenTree, *successors: Any) -> None:
        assert request.tokens[begin] == tree.tokens[0]
        self.told.append((request.tokens[:begin], tree, *successors))


@pytest.mark.parametrize("max_rows", [512, 7, 1])
def test_drafters_are_told_the_targets_most_probable_tokens(monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
    monkeypatch.setattr(target_module, "MAX_PROMPT_ROWS", max_rows)
    model, listener, inputs = tiny_model("llama"), Listener(), ragged_prompts(2)
    ours = SLOSpecGenerator(model, drafter=listener, config=WHOLE)
    assert_same_as_stock(model, ours.generate, inputs, **GREEDY, max_new_tokens=6)
    for before, tree, tokens, probs in listener.told:
        assert tokens.shape == probs.shape == (tree.num_nodes, 3) and probs.dtype == np.float64
        for node in (0, tree.num_nodes - 1):
            ids = torch.tensor([[*before, int(tree.tokens[0]), *path_to(tree, node)]])
            expected = model(ids).logits[0, -1].softmax(-1).topk(3)
            assert tokens[node].tolist() == expected.indices.tolist()
            assert probs[node] == pytest.approx(expected.values.tolist(), abs=1e-4)
    prompt_lens = inputs["attention_mask"].sum(1).tolist()
    in_prompts = [tree.num_nodes for before, tree, *_ in listener.told if len(before) + 1 < min(prompt_lens)]
    limits = [min(length - 1, max_rows // 2) for length in prompt_lens]
    assert sorted(limit for limit in limits if limit) == sorted(in_prompts)
    assert any(tree.num_nodes == 4 for _, tree, *_ in listener.told)  # rejected nodes as well


@pytest.mark.parametrize("vocab", [5, 64, 101, 1000])
def test_most_probable_tokens(vocab: int) -> None:
    logits = 4.0 * torch.randn(7, vocab)
    tokens, probs = most_probable(logits, 8)
    expected = logits.softmax(-1).topk(min(8, vocab))
    assert torch.equal(tokens, expected.indices)
    assert (probs >= expected.values - 1e-6).all() and (probs.sum(1) <= 1.0 + 1e-6).all()
    tokens, probs = most_probable(torch.full((1, vocab), torch.nan), 8)
    assert (tokens < vocab).all() and not probs.any()
    assert most_probable(logits[:0], 8)[0].shape == (0, min(8, vocab))


def a_cycle(length: int) -> LlamaForCausalLM:
    """A model whose next token depends on the last one only, in a cycle from token 3 on."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.model.layers.parameters():
        parameter.data.zero_()
    model.model.embed_tokens.weight.data = torch.eye(64)
    following = [3 + (token - 2) % length for token in range(64)]
    model.lm_head.weight.data = 2.0 * torch.eye(64)[following].T.contiguous()  # [next token, token]
    return model


def test_known_successors_are_accepted_from_the_second_time_on() -> None:
    model = a_cycle(10)
    ids = torch.tensor([[3, 4]])
    ours = SLOSpecGenerator(model, drafter="recycling", config=SLOSpecConfig(policy="fixed", max_depth=4, max_width=1))
    out = assert_same_as_stock(model, ours.generate, {"input_ids": ids}, **GREEDY, max_new_tokens=61)
    assert out.sequences[0, :14].tolist() == [*range(3, 13), 3, 4, 5, 6]
    assert out.slo[0].steps < 24  # 9 until the cycle is known, then 5 tokens a step


@pytest.mark.parametrize(
    "drafter",
    nightly_but(
        ("recycling", "lookup+suffix+recycling"),
        ("recycling", "lookup+recycling", "suffix+recycling", "lookup+suffix+recycling"),
    ),
)
@pytest.mark.parametrize("options", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"])
def test_same_tokens_as_stock(drafter: str, options: dict[str, Any]) -> None:
    model = tiny_model("llama")
    for policy in ("fixed", "auto"):
        config = SLOSpecConfig(policy=policy, max_depth=4, max_width=3, check_invariants=True)
        ours = SLOSpecGenerator(model, drafter=drafter, config=config)
        for batch in (1, 3):
            out = assert_same_as_stock(
                model, ours.generate, ragged_prompts(batch), **options, max_new_tokens=quick_or(20, 40)
            )
            assert policy == "auto" or sum(metrics.drafted for metrics in out.slo) > 0


def test_a_model_may_follow() -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, drafter=["recycling", tiny_model("llama", noise=0.03)], config=WHOLE)
    assert_same_as_stock(model, ours.generate, ragged_prompts(2), **GREEDY, max_new_tokens=16)


@pytest.mark.parametrize("family", ["Lfm2", "Qwen3_5"])
def test_models_with_states(family: str) -> None:
    model = tiny(family)
    ours = SLOSpecGenerator(model, drafter="recycling", config=WHOLE)
    for options in (GREEDY, SAMPLED):
        out = assert_same_as_stock(model, ours.generate, ragged_prompts(2), **options, max_new_tokens=16)
        assert sum(metrics.drafted for metrics in out.slo) > 0


@pytest.mark.parametrize(
    ("drafter", "shares_texts"), [("recycling", False), ("recycling", True), ("lookup+suffix+recycling", False)]
)
def test_the_batcher_and_preemption(drafter: str, shares_texts: bool) -> None:
    model = tiny_model("llama")
    method = load_drafter(drafter, model, share_texts=shares_texts)
    options = dict(**GREEDY, max_new_tokens=40)
    prompts = [torch.randint(3, VOCAB, (length,)).tolist() for length in (40, 33, 9, 20)]
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    config = SLOSpecConfig(policy="adaserve", check_invariants=True, prefill_chunk=64, kv_tokens=2_000, max_batch=2)
    with SLOSpecGenerator(model, drafter=method, config=config) as generator:
        with Holds() as holds:
            spare = [generator.submit(p, **options, stopping_criteria=[holds]) for p in prompts[:2]]
            assert holds.is_reached.wait(WAIT_S)
            urgent = [generator.submit(p, **options, slo_tpot=10.0, slo_ttft=100.0) for p in prompts[2:]]
        assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == expected
        assert sum(handle.metrics.preempted for handle in spare) > 0
        assert all(handle.metrics.drafted for handle in (*spare, *urgent))
