"""Drafted tokens whose hidden states are NaN: outputs equal those of stock, which never computes
these tokens.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model.eager import EagerPath
from hf_slospec.tree.tree import TokenTree
from tests.support.breadth import nightly_rows_but
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_encoder_decoders import texts, tiny_text_model
from tests.support.toys.tiny_models import FAMILIES, ragged_prompts, sharpened, tiny_model

FIXED = dict(policy="fixed", max_depth=2, max_width=4)
NEW_TOKENS = 10
SAMPLED = dict(do_sample=True, temperature=0.7, top_k=5)
EAGER = dict(compile=False)
COMPILED = dict(compile="wait")
MASKED = dict(compile=False, attention="4d_mask")
QUICK = [
    ("llama", EAGER, {}),
    ("llama", MASKED, {}),
    ("T5", EAGER, {}),
    ("T5", MASKED, {}),
    ("BloomForCausalLM", EAGER, {}),
    ("DeepseekV3ForCausalLM", EAGER, {}),
    ("Qwen3NextForCausalLM", EAGER, {}),
    ("llama", COMPILED, SAMPLED),
]


def stock(family):
    """Return a tiny model and the arguments of a call."""
    if family == "T5":
        return tiny_text_model(family), dict(texts(3), max_new_tokens=NEW_TOKENS)
    if family in FAMILIES:
        return tiny_model(family), dict(ragged_prompts(3), max_new_tokens=NEW_TOKENS)
    kind = getattr(transformers, family)
    model = sharpened(lambda: kind(tiny_config(kind.config_class)), 0)
    input_ids = torch.arange(3, 15)[None] % model.config.get_text_config().vocab_size
    return model, dict(input_ids=input_ids, max_new_tokens=NEW_TOKENS)


class Drafting:
    """Drafts trees of tokens that stock writes, and of tokens without finite embeddings beside and
    before them.
    """

    def __init__(self, written, lost):
        self.written = written
        self.lost = lost

    def draft(self, requests, plan):
        return [self._tree(request, plan.levels_of(request)) for request in requests]

    def _tree(self, request, levels):
        first, second = (
            self.written[(len(request.tokens) + more) % len(self.written)] for more in range(2)
        )
        tokens = np.array([request.tokens[-1], self.lost[0], first, second, self.lost[1], first])
        parents = np.array([-1, 0, 0, 0, 2, 1])
        depths = np.array([0, 1, 1, 1, 2, 2])
        kept = depths <= levels
        return TokenTree(tokens[kept], parents[kept], depths[kept], 0.5 ** depths[kept])

    def release(self, request):
        """Drop nothing."""


def without(model, tokens, value=torch.nan):
    """Return a copy of the model whose embeddings of some tokens are not finite."""
    model = copy.deepcopy(model)
    inputs = model.get_input_embeddings()
    outputs = model.get_output_embeddings()
    if inputs.weight is outputs.weight:
        outputs.weight = nn.Parameter(outputs.weight.clone())
    with torch.no_grad():
        inputs.weight[tokens] = value
    return model


def lost_case(family, value=torch.nan, **options):
    """Return a model with lost tokens, a call, stock's output of it, and what drafts lost tokens
    for it.
    """
    base, call = stock(family)
    torch.manual_seed(0)
    written = set(base.generate(**call, **options).unique().tolist())
    used = written | set(call["input_ids"].unique().tolist())
    lost = [
        token for token in range(4, base.config.get_text_config().vocab_size) if token not in used
    ][-6:]
    model = without(base, lost, value)
    torch.manual_seed(0)
    return model, call, model.generate(**call, **options), Drafting(sorted(written), lost)


@pytest.mark.parametrize(
    ("family", "settings", "options"),
    nightly_rows_but(
        QUICK,
        QUICK
        + [
            (family, EAGER, {})
            for family in ("gemma2", "gpt-oss", "GPTJForCausalLM", "Llama4ForCausalLM")
        ]
        + [(family, EAGER, {}) for family in ("Mamba2ForCausalLM", "MambaForCausalLM")]
        + [("llama", COMPILED, {})],
    ),
)
def test_lost_tokens_change_no_output(family, settings, options):
    """By attention through the interface, over gathered, latent and chunked keys, and by states."""
    value = torch.inf if settings is COMPILED else torch.nan
    model, call, expected, drafter = lost_case(family, value, **options)
    generator = SLOSpecGenerator(model, drafter=drafter, config=SLOSpecConfig(**FIXED | settings))
    before = generator.stats().forwards
    torch.manual_seed(0)
    assert torch.equal(generator.generate(**call, **options), expected)
    assert generator.stats().forwards == before


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_drafts_with_the_same_lost_tokens(options):
    model, call, expected, drafter = lost_case("llama", **options)
    draft = without(tiny_model("qwen2", seed=3), drafter.lost)
    generator = SLOSpecGenerator(model, draft, config=SLOSpecConfig(compile=False, **FIXED))
    torch.manual_seed(0)
    assert torch.equal(generator.generate(**call, **options), expected)


def test_requests_beside_a_lost_one_and_after_it():
    """With one mask for all requests, NaN in the pool would reach all of them."""
    model, call, _, drafter = lost_case("llama")
    prompts = [
        row[mask.bool()].tolist()
        for row, mask in zip(call["input_ids"], call["attention_mask"], strict=True)
    ]
    lost = [*prompts[0], drafter.lost[0]]
    texts_ = [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS)[0, len(prompt) :]
        for prompt in prompts
    ]
    with SLOSpecGenerator(
        model, drafter=drafter, config=SLOSpecConfig(compile=False, attention="4d_mask", **FIXED)
    ) as generator:
        for _ in range(2):
            handles = [
                generator.submit(prompt, max_new_tokens=NEW_TOKENS) for prompt in (lost, *prompts)
            ]
            results = [handle.result(60).token_ids for handle in handles]
            assert results[1:] == [text.tolist() for text in texts_]


def test_a_lost_prompt_has_the_output_of_stock():
    model, _, _, drafter = lost_case("llama")
    call = dict(
        input_ids=torch.tensor([[5, 6, drafter.lost[0], 7]]), max_new_tokens=5, eos_token_id=None
    )
    generator = SLOSpecGenerator(
        model, drafter=drafter, config=SLOSpecConfig(compile=False, **FIXED)
    )
    assert torch.equal(generator.generate(**call), model.generate(**call))


def test_forwards_are_repeated_for_nan_only(monkeypatch):
    model, call = stock("llama")
    monkeypatch.delattr(EagerPath, "isolated")
    generator = SLOSpecGenerator(
        model, drafter=Drafting([5, 6], [7, 8]), config=SLOSpecConfig(compile=False, **FIXED)
    )
    assert torch.equal(generator.generate(**call), model.generate(**call))
