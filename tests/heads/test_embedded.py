"""The trained heads of the embedded target: they load, pack, and draft better than the embedded
draft model.
"""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import DynamicCache

from hf_slospec import load_tiny_pair
from hf_slospec.heads.loading import load_head
from hf_slospec.heads.mtp import DraftHead
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.trial import check_by_trial
from hf_slospec.tiny.embedded import FOLDER, tiny_prompts
from tests.support.breadth import quick_or

LEVELS = 4
NEW_TOKENS = 64
STRIDE = 6
KINDS = ["eagle3", "mtp"]

pair = functools.cache(load_tiny_pair)


@functools.cache
def greedy_texts():
    """Prompts with greedy text of the target.  [1, length] int64 each"""
    target, _, tokenizer = pair()
    prompts = [
        tokenizer(prompt, return_tensors="pt") for prompt in tiny_prompts()[: quick_or(3, 6)]
    ]
    return [
        target.generate(
            **prompt, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
        for prompt in prompts
    ]


def accepted(drafted, text, begin):
    """Return how many drafted tokens are those of the text from ``begin`` on, up to the first that
    is not.
    """
    same = [token == int(text[0, begin + level]) for level, token in enumerate(drafted)]
    return [*same, False].index(False)


def chain_of(head, features, text, begin):
    """Draft the tokens from ``begin`` on, one level after another."""
    cache = DynamicCache()
    drafted = list[int]()
    tokens, hidden, positions = (
        text[:, 1:begin],
        head.combine(features[:, : begin - 1]),
        torch.arange(begin - 1)[None],
    )
    for _ in range(LEVELS):
        inputs = torch.cat((head.embed_tokens(tokens), hidden), dim=-1)
        out = head(inputs_embeds=inputs, position_ids=positions, cache=cache).logits[:, -1:]
        logits, hidden = out.split([out.shape[-1] - head.hidden_size, head.hidden_size], dim=-1)
        tokens = logits.argmax(-1)
        positions = positions[:, -1:] + 1
        tokens = tokens if head.target_ids is None else head.target_ids[tokens]
        drafted.append(int(tokens))
    return drafted


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_forward_is_that_of_a_plain_one(kind):
    check_by_trial(PackedModel(load_head(str(FOLDER / kind), pair()[0])))


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_more_of_its_tokens_are_accepted_than_of_the_draft_model(kind):
    target, draft, _ = pair()
    head: DraftHead = load_head(str(FOLDER / kind), target)
    own = 0
    of_draft = 0
    for text in greedy_texts():
        states = target(text, output_hidden_states=True).hidden_states
        features = torch.cat([states[layer] for layer in head.feature_layers], dim=-1)
        choices = draft(text).logits[0].argmax(-1).tolist()
        for begin in range(text.shape[1] - NEW_TOKENS, text.shape[1] - LEVELS, STRIDE):
            own += accepted(chain_of(head, features, text, begin), text, begin)
            of_draft += accepted(choices[begin - 1 : begin - 1 + LEVELS], text, begin)
    assert own > 1.2 * of_draft
