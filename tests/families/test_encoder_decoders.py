"""Encoder-decoders: the output of stock ``generate``, token for token, on tiny random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
)
from hf_slospec.generate.rows import Rows
from tests.support.breadth import nightly_but, quick_or
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_encoder_decoders import (
    FRAMES,
    MELS,
    PREVIOUS,
    audio,
    halved,
    halved_decoder,
    texts,
    tiny_text_model,
    tiny_whisper,
)
from tests.support.toys.tiny_models import assert_same_as_stock, sharpened

CONFIG = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(2, 4)
)
NEW: dict[str, Any] = dict(max_new_tokens=quick_or(14, 24))


@pytest.fixture
def accepted(monkeypatch):
    """Accepted drafts of every decoded call so far."""
    counts = list[int]()
    end = Rows.end

    def ended(self):
        counts.append(sum(request.stats.num_accepted for request in self.requests))
        end(self)

    monkeypatch.setattr(Rows, "end", ended)
    return counts


def check(model, generate, inputs, **options):
    return assert_same_as_stock(
        model, generate, inputs, **dict(return_dict_in_generate=False) | options
    )


def test_the_encoder_has_an_effect_on_every_row():
    model = tiny_text_model("Bart")
    inputs = texts(2)
    ours = SLOSpecGenerator(tiny_text_model("Bart"), config=CONFIG)
    options = NEW | dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=2)
    one = check(model, ours.generate, inputs, **options).scores[0]
    changed = inputs | {"input_ids": inputs["input_ids"].flip(1) * inputs["attention_mask"]}
    other = check(model, ours.generate, changed, **options).scores[0]
    assert bool(((one - other).abs().amax(1) > 0.01).all())


def test_encoders_run_once_if_target_and_draft_share_one():
    model = copy.deepcopy(tiny_text_model("Bart"))
    draft = halved(model)
    calls = list[Any]()
    ours = SLOSpecGenerator(model, draft, config=CONFIG)
    for each in (model, draft):
        each.get_encoder().register_forward_hook(lambda module, *_: calls.append(module))
    ours.generate(**texts(2), **NEW)
    assert calls == [model.get_encoder()]


LONG: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": dict(temperature=0.7),
    "conditioned": dict(condition_on_prev_tokens=True, prompt_ids=torch.tensor([PREVIOUS, 20, 21])),
    "all segments": dict(condition_on_prev_tokens=True, prompt_condition_type="all-segments",
                         prompt_ids=torch.tensor([PREVIOUS, 20, 21])),
    "english only": dict(is_multilingual=False, temperature=(0.0, 0.5), logprob_threshold=-0.1,
                         no_speech_threshold=0.02),
    "thresholds": dict(temperature=(0.0, 0.5), logprob_threshold=-0.5, no_speech_threshold=0.02),
}  # fmt: skip


@pytest.mark.parametrize("name", nightly_but(("greedy", "conditioned", "english only"), LONG))
def test_long_form(name, accepted):
    """Audio of several segments, of different lengths in a batch, which drops rows that have ended."""
    model = copy.deepcopy(tiny_whisper())
    options = LONG[name]
    if options.get("is_multilingual") is False:
        del model.generation_config.lang_to_id, model.generation_config.task_to_id
    frames = torch.tensor([2 * FRAMES + 10, FRAMES + 20, FRAMES])
    features = audio(3, int(frames.max()), seed=1)
    mask = (torch.arange(features.shape[-1]) < frames[:, None]).long()
    ours = SLOSpecGenerator(model, halved_decoder(model), config=CONFIG)
    inputs = {"input_features": features, "attention_mask": mask}
    options = dict(return_timestamps=True, max_new_tokens=16) | options
    out = check(model, ours.generate, inputs, return_segments=True, **options)
    assert max(map(len, out["segments"])) > 1 and len(accepted) > 1 and sum(accepted) > 0


def test_audio_of_the_usual_size_has_the_encoders_positions():
    assert (
        audio(2).shape == (2, MELS, FRAMES)
        and tiny_whisper().config.max_source_positions == FRAMES // 2
    )


def test_cross_attention_with_a_softcap_and_rope():
    config = tiny_config(T5GemmaConfig)
    config.encoder.is_decoder = False
    config.decoder.attn_logit_softcapping = 0.5
    config.decoder.cross_attention_hidden_size = config.encoder.hidden_size
    config.decoder_start_token_id = 3
    model = sharpened(lambda: T5GemmaForConditionalGeneration(config), 0)
    for layer in model.get_decoder().layers:
        for parameter in layer.cross_attn.parameters():
            parameter.data.mul_(8.0)
    model.set_attn_implementation("eager")  # the only one of stock's that caps
    scores: dict[str, Any] = dict(return_dict_in_generate=True, output_scores=True)
    options: dict[str, Any] = (
        NEW | dict(decoder_start_token_id=3, pad_token_id=0, eos_token_id=2) | scores
    )
    capped = check(
        model, SLOSpecGenerator(model, config=CONFIG).generate, texts(3), **options
    ).scores[0]
    for layer in model.get_decoder().layers:
        layer.cross_attn.attn_logit_softcapping = None
    free = type(model).generate(model, **texts(3), **options).scores[0]
    assert (capped - free).abs().max() > 0.01
