"""Gemma 4 assistants: chains against stock's candidate generator, and text that stays what stock
writes.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from hf_slospec import IncompatibleDraftError, InvalidInputError, SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cuda import flash_kernels as kernel_choice
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.hybrid import HybridMethod
from hf_slospec.drafters.load_drafter import assistant_method
from hf_slospec.drafters.lookup import LookupMethod
from hf_slospec.engine.interfaces import Plan
from hf_slospec.heads.shared_kv import Gemma4Method, SharedKVDrafter, cached_layers
from hf_slospec.model.sequences import Sequences
from hf_slospec.model.tree_mask import chain
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from tests.support.breadth import quick_or
from tests.support.packed import packed_model
from tests.support.stand_ins.flash import StandIn
from tests.support.toys.tiny_gemma4 import tiny_assistant, tiny_target
from tests.support.toys.tiny_models import VOCAB, WINDOW, ragged_prompts, tiny_model

DEPTH = 5
CHECKED = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(2, 4)
)
NEW_TOKENS = quick_or(12, 20)
GREEDY: dict[str, Any] = dict(do_sample=False, max_new_tokens=NEW_TOKENS)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=0.8, top_k=30, max_new_tokens=NEW_TOKENS)
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "shared": ({}, {}),
    "own": (dict(variant="own"), dict(variant="own")),
    "ordered": ({}, dict(ordered=True)),
    "unified": (dict(unified=True), dict(unified=True)),
    "multimodal": (dict(multimodal=True), {}),
}
# Texts without a root: of one token, around the window's edges, and longer than several windows.
LENGTHS = (1, 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, 3 * WINDOW, 60)


def pair(name):
    of_target, of_assistant = PAIRS[name]
    return tiny_target(**of_target), tiny_assistant(**of_assistant)


def texts_of(lengths):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(3, 100, (length + 1,), generator=generator).tolist() for length in lengths
    ]


def stock_chain(target, assistant, text):
    """The candidates of stock's own generator after a forward of all tokens but the last."""
    assistant.generation_config.num_assistant_tokens = DEPTH
    config = copy.deepcopy(target.generation_config)
    config.max_length = 1000
    for layer in cached_layers(
        target
    ).values():  # in transformers 5.23.0 targets without shared layers return none
        target.get_decoder().layers[layer].self_attn.store_full_length_kv = True
    generator = SinglePositionMultiTokenCandidateGenerator(
        assistant, target.get_input_embeddings(), config
    )
    with torch.no_grad():
        outputs = target(
            torch.tensor([text[:-1]]),
            use_cache=True,
            output_hidden_states=True,
            return_shared_kv_states=True,
        )
    mask = torch.ones(1, len(text), dtype=torch.int64)
    candidates, _ = generator.get_candidates(
        torch.tensor([text]), {"attention_mask": mask}, outputs, False, 0
    )
    chain: list[int] = candidates[0, len(text) :].tolist()
    return chain


def drafter_with(target, assistant, texts, attention="sdpa"):
    """A drafter, and requests of these texts as they are after their prefill."""
    sequences = Sequences(packed_model(target, attention), 16)
    requests = [Request(index, RequestParams(text, 10)) for index, text in enumerate(texts)]
    drafter = SharedKVDrafter(assistant, VOCAB)
    drafter.read_kv_of(sequences)
    sequences.reserve(requests)
    for request in requests:
        part = chain(sequences.packed, sequences.of(request), request.tokens[:-1])
        features = sequences.forward(
            [part], torch.empty(0, dtype=torch.int64), drafter.feature_layers
        ).features
        assert features is not None
        sequences.of(request).length += len(features)
        drafter.take_features(request, 0, features)
    return drafter, requests


@pytest.mark.parametrize("attention", ["sdpa", "4d_mask"])
@pytest.mark.parametrize("name", PAIRS)
def test_chains_are_those_of_stock(name, attention):
    target, assistant = pair(name)
    texts = texts_of(LENGTHS)
    drafter, requests = drafter_with(target, assistant, texts, attention)
    trees = drafter.draft(requests, Plan(DEPTH, 1))
    chains = [tree.tokens[1:].tolist() for tree in trees]
    assert chains == [stock_chain(target, assistant, text) for text in texts]
    assert len({tuple(chain) for chain in chains}) > len(LENGTHS) // 2


def test_paths_of_trees_are_chains_after_their_first_tokens():
    """Every node is computed from its parent's hidden state: its best child is the one of a chain
    through it.
    """
    target, assistant = pair("shared")
    drafter, requests = drafter_with(target, assistant, texts_of((20, 7)))
    for tree in drafter.draft(requests, Plan(4, 6)):
        tree.check()
        assert tree.num_nodes == 1 + 4 * 6 and tree.max_depth == 4
    (wide,), (chain,) = (drafter.draft(requests[:1], Plan(3, width)) for width in (VOCAB, 1))
    node = 0
    path = []
    for _ in range(3):  # a beam this wide keeps the best child of each node on the greedy path
        children = [child for child in range(wide.num_nodes) if wide.parents[child] == node]
        node = max(children, key=lambda child: float(wide.path_probs[child]))
        path.append(int(wide.tokens[node]))
    assert path == chain.tokens[1:].tolist()


def test_flash_attention_gives_the_same_trees(monkeypatch):
    target, assistant = pair("shared")
    texts = texts_of(LENGTHS)
    drafter, requests = drafter_with(target, assistant, texts)
    expected = drafter.draft(requests, Plan(3, 4))
    monkeypatch.setattr(kernel_choice, "KERNELS", (StandIn,))
    flash, requests = drafter_with(target, assistant, texts, "flash")
    assert flash._sequences.packed.backend.__name__.startswith("flash")
    for own, tree in zip(flash.draft(requests, Plan(3, 4)), expected, strict=True):
        assert own.tokens.tolist() == tree.tokens.tolist()
        torch.testing.assert_close(torch.tensor(own.path_probs), torch.tensor(tree.path_probs))


def test_requests_whose_state_is_not_known_get_roots():
    target, assistant = pair("shared")
    drafter, requests = drafter_with(target, assistant, texts_of((20, 7)))
    unknown = Request(9, RequestParams([5, 6, 7], 10))
    requests[1].tokens.append(3)  # committed without a feature
    trees = drafter.draft([unknown, *requests], Plan(2, 2))
    assert [tree.num_nodes for tree in trees] == [1, 5, 1] and trees[0].tokens[0] == 7
    drafter.release(requests[0])
    assert drafter.draft(requests[:1], Plan(2, 2))[0].num_nodes == 1
    drafter.close()


def test_trees_after_steps_are_those_of_a_new_prefill(monkeypatch):
    target, assistant = pair("shared")
    drafted: list[tuple[list[int], Plan, list[int]]] = []
    draft = SharedKVDrafter.draft

    def spy(self, requests, plan):
        trees = draft(self, requests, plan)
        drafted.extend(
            (list(r.tokens), plan, t.tokens.tolist()) for r, t in zip(requests, trees, strict=True)
        )
        return trees

    monkeypatch.setattr(SharedKVDrafter, "draft", spy)
    config = SLOSpecConfig(policy="fixed", max_depth=2, max_width=16)
    generator = SLOSpecGenerator(target, assistant, config=config)
    out = generator.generate(
        **ragged_prompts(3), **GREEDY, eos_token_id=None, return_dict_in_generate=True
    )
    assert sum(metrics.accepted for metrics in out.slo) > 0
    monkeypatch.undo()
    for text, plan, tokens in drafted:
        assert len(tokens) > 1
        drafter, requests = drafter_with(target, assistant, [text])
        assert drafter.draft(requests, plan)[0].tokens.tolist() == tokens
    assert len(drafted) > quick_or(10, 20)


def test_assistants_are_the_last_part_of_a_sum():
    with pytest.raises(InvalidInputError, match="written last"):
        HybridMethod([Gemma4Method(tiny_assistant()), LookupMethod()])


def test_levels_have_a_cost_which_steps_correct():
    target, assistant = pair("shared")
    speculator = SLOSpecGenerator(target, assistant).decoder.speculator
    costs = speculator.costs
    assert costs.level_s(1, 4) > 0.0 and speculator.costs is costs
    old, new = (
        costs.draft_level,
        costs.draft_level.scaled([2.0] * len(costs.draft_level.curve.num_tokens), 2.0),
    )
    costs.draft_level = new
    costs.on_replaced(old, new)
    assert speculator.costs is costs and speculator.costs.draft_level is new


def test_assistants_are_recognised_by_their_type():
    assert isinstance(assistant_method(tiny_assistant()), Gemma4Method)
    assert isinstance(assistant_method(tiny_assistant(unified=True)), Gemma4Method)
    assert isinstance(assistant_method(tiny_model("llama")), AssistantMethod)


@pytest.mark.parametrize(
    ("target", "assistant", "match"),
    [
        (tiny_target, lambda: tiny_assistant(backbone_hidden_size=48), "of size 48 and the target has 32"),
        (tiny_target, lambda: tiny_assistant(vocab_size=12), "vocabulary of 12"),
        (tiny_target, lambda: tiny_assistant(global_head_dim=32),
         r"'full_attention' have \(2, 32\) K/V heads .* and \(2, 16\) in the target"),
        (tiny_target, lambda: tiny_assistant(num_key_value_heads=4), r"'sliding_attention' have \(4, 8\)"),
        (lambda: tiny_model("llama"), tiny_assistant, "'sliding_attention' and the target caches K/V of none"),
        (tiny_target, lambda: tiny_assistant().bfloat16(), "bfloat16"),
        (tiny_target, lambda: tiny_assistant().to("meta"), "on meta"),
    ],
)  # fmt: skip
def test_assistants_of_other_targets_are_refused(target, assistant, match):
    with pytest.raises(IncompatibleDraftError, match=match):
        SLOSpecGenerator(target(), assistant())
