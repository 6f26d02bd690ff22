"""The trained heads of the embedded target draft better than the embedded draft model."""

from __future__ import annotations

import torch

from hf_slospec import load_drafter, load_tiny_pair
from hf_slospec.drafters.assistant import AssistantMethod
from hf_slospec.drafters.methods import Room
from hf_slospec.engine.interfaces import Plan
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.request.request import Request, RequestParams
from hf_slospec.tiny.embedded import FOLDER, tiny_prompts
from tests.support.breadth import quick_or

NEW_TOKENS = 64
LEVELS = 4


@torch.no_grad()
def test_more_proposals_of_the_heads_are_accepted_than_of_the_draft_model():
    target, draft, tokenizer = load_tiny_pair()
    texts = []
    for prompt in tiny_prompts()[: quick_or(3, 6)]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        out = target.generate(
            ids, do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS
        )
        texts.append((out[0].tolist(), target(out, output_hidden_states=True).hidden_states))

    def num_accepted(method):
        room = Room(LEVELS, target.config.vocab_size)
        drafter = method.new_drafter(PackedModel(method.model), room)
        total = 0
        for text, states in texts:
            for begin in range(len(text) - NEW_TOKENS, len(text) - LEVELS, 6):
                request = Request(0, RequestParams(text[:begin], NEW_TOKENS))
                if layers := drafter.feature_layers:
                    features = [states[layer][0, : begin - 1] for layer in layers]
                    drafter.take_features(request, 0, torch.cat(features, dim=-1))
                [tree] = drafter.draft([request], Plan(LEVELS, 1))
                expected = text[begin : begin + LEVELS]
                same = [*(tree.tokens[1:] == expected[: tree.max_depth]), False]
                total += same.index(False)
                drafter.release(request)
        return total

    of_draft = num_accepted(AssistantMethod(draft))
    for kind in ("eagle3", "mtp"):
        assert num_accepted(load_drafter(str(FOLDER / kind), target)) > 1.2 * of_draft
