"""Hidden states of committed tokens, handed to drafters once each, in order."""

from __future__ import annotations

import itertools

import pytest
import torch

from hf_slospec import (
    Request,
    SLOSpecConfig,
    SLOSpecGenerator,
    TokenTree,
    UnsupportedModelError,
)
from tests.support.served_pair import WAIT_S, Holds
from tests.support.toys.tiny_models import VOCAB, assert_same_as_stock, ragged_prompts, tiny_model

LAYERS = (0, 2, 1)


class Reader:
    """Drafts what a text of the same beginning went on with, wrong at every fourth token, and keeps
    all features.
    """

    def __init__(self, layers=LAYERS, texts=()):
        self.feature_layers = layers
        self.texts = texts
        self.features: dict[Request, list[tuple[int, torch.Tensor]]] = {}

    def take_features(self, request, begin, features):
        self.features.setdefault(request, []).append((begin, features))

    def draft(self, requests, plan):
        return [
            TokenTree.chain(r.tokens[-1], self.guess(r.tokens)[: plan.depth], 0.9) for r in requests
        ]

    def guess(self, tokens):
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), [])
        return [token if place % 4 else (token + 1) % VOCAB for place, token in enumerate(text)][
            len(tokens) :
        ]

    def release(self, request):
        """Keep the features."""

    def of(self, request):
        """All features since the request's last prefill, after a check that none is missing or came
        twice.
        """
        parts = self.features[request]
        parts = parts[max(index for index, (begin, _) in enumerate(parts) if begin == 0) :]
        for (begin, features), (following, _) in itertools.pairwise(parts):
            assert following == begin + len(features)
        return torch.cat([features for _, features in parts])


def plain_features(model, tokens, layers=LAYERS):
    states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def texts_of(model, inputs, **options):
    out = model.generate(**inputs, **options)
    begin = inputs["input_ids"].shape[1]
    pairs = zip(inputs["input_ids"], inputs["attention_mask"], out[:, begin:], strict=True)
    return [ids[mask == 1].tolist() + new.tolist() for ids, mask, new in pairs]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_features_are_those_of_a_plain_forward(family):
    model = tiny_model(family)
    inputs = ragged_prompts(3)
    reader = Reader(texts=texts_of(model, inputs, do_sample=False, max_new_tokens=24))
    ours = SLOSpecGenerator(
        model, drafter=reader, config=SLOSpecConfig(policy="fixed", max_depth=5, max_width=1)
    )
    out = assert_same_as_stock(model, ours.generate, inputs, do_sample=False, max_new_tokens=24)
    assert (
        10
        < sum(metrics.accepted for metrics in out.slo)
        < sum(metrics.drafted for metrics in out.slo)
    )
    for request in reader.features:
        found = reader.of(request)
        assert (
            len(found) >= len(request.tokens) - 7
        )  # those of the last step's tokens need not come
        torch.testing.assert_close(
            found, plain_features(model, request.tokens)[: len(found)], rtol=1e-3, atol=1e-3
        )


def test_features_of_chunked_prompts_and_of_preempted_requests():
    model = tiny_model("llama")
    reader = Reader()
    config = SLOSpecConfig(max_depth=2, max_width=2, max_batch=2, kept_tokens=0, prefill_chunk=16)
    prompts = torch.randint(3, VOCAB, (3, 40), generator=torch.Generator().manual_seed(0)).tolist()
    with SLOSpecGenerator(model, drafter=reader, config=config) as generator:
        options = dict(max_new_tokens=100, min_new_tokens=100)
        spare = [generator.submit(prompts[0], **options)]
        with Holds() as holds:
            spare.append(generator.submit(prompts[1], **options, stopping_criteria=[holds]))
            assert holds.is_reached.wait(WAIT_S)
            urgent = generator.submit(prompts[2], max_new_tokens=30, slo_tpot=10.0, slo_ttft=100.0)
        results = [handle.result(WAIT_S) for handle in (*spare, urgent)]
    assert sum(result.metrics.preempted for result in results) > 0
    for request in reader.features:
        found = reader.of(request)
        assert len(found) >= len(request.tokens) - 3
        torch.testing.assert_close(
            found, plain_features(model, request.tokens)[: len(found)], rtol=1e-3, atol=1e-3
        )


@pytest.mark.parametrize("layers", [(9,), (0, 4)])
def test_hidden_states_that_the_target_has_not_are_refused(layers):
    with pytest.raises(UnsupportedModelError, match=r"hidden states and the drafter reads number"):
        SLOSpecGenerator(tiny_model("llama"), drafter=Reader(layers))
