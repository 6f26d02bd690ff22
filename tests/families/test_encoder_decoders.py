"""Encoder-decoders: the output of stock ``generate``, token for token, on tiny random models."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import (
    EncoderDecoderCache,
    LogitsProcessor,
    LogitsProcessorList,
    T5GemmaConfig,
    T5GemmaForConditionalGeneration,
)

import hf_slospec
from hf_slospec import (
    FallbackWarning,
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
    TEXT_MODELS,
    audio,
    halved,
    halved_decoder,
    texts,
    tiny_text_model,
    tiny_whisper,
)
from tests.support.toys.tiny_models import VOCAB, sharpened, tiny_model

CONFIG = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(2, 4)
)
NEW: dict[str, Any] = dict(max_new_tokens=quick_or(14, 24))
SAMPLED: dict[str, Any] = NEW | dict(do_sample=True, temperature=0.9, top_k=40)


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Accepted drafts of every decoded call so far."""
    counts = list[int]()
    end = Rows.end

    def ended(self: Rows) -> None:
        counts.append(sum(request.stats.num_accepted for request in self.requests))
        end(self)

    monkeypatch.setattr(Rows, "end", ended)
    return counts


def check(model: Any, generate: Any, inputs: dict[str, Any], **options: Any) -> Any:
    """Stock and ours on the same inputs and seed: equal outputs and an equal state of the global
    generator.
    """
    torch.manual_seed(7)
    stock = type(model).generate(model, **copy.deepcopy(inputs), **copy.deepcopy(options))
    state = torch.get_rng_state()
    torch.manual_seed(7)
    ours = generate(**inputs, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal(ours, stock)
    return ours


def assert_equal(ours: Any, stock: Any) -> None:
    """Equal tokens; scores, logits and K/V up to rounding."""
    if isinstance(stock, torch.Tensor):
        assert ours.shape == stock.shape
        if stock.is_floating_point():
            torch.testing.assert_close(ours, stock, rtol=1e-3, atol=1e-3)
        else:
            assert torch.equal(ours, stock)
    elif isinstance(stock, EncoderDecoderCache):
        assert (
            ours.is_updated == stock.is_updated and ours.get_seq_length() == stock.get_seq_length()
        )
        for mine, theirs in zip(
            (ours.self_attention_cache, ours.cross_attention_cache),
            (stock.self_attention_cache, stock.cross_attention_cache),
            strict=True,
        ):
            assert_equal(
                [(a.keys, a.values) for a in mine.layers],
                [(a.keys, a.values) for a in theirs.layers],
            )
    elif isinstance(stock, dict):
        assert {name for name in ours if name not in ("slo", "steps")} == stock.keys()
        for name, value in stock.items():
            assert_equal(ours[name], value)
    elif isinstance(stock, (list, tuple)):
        assert len(ours) == len(stock)
        for mine, theirs in zip(ours, stock, strict=True):
            assert_equal(mine, theirs)
    else:
        assert ours == stock


@pytest.mark.parametrize("name", nightly_but(("Bart", "T5"), TEXT_MODELS))
def test_text_models_with_drafts_and_by_lookup(name: str) -> None:
    model = tiny_text_model(name)
    for draft in (halved(model), None):
        ours = SLOSpecGenerator(model, draft, config=CONFIG)
        for options in (NEW, SAMPLED):
            out = check(model, ours.generate, texts(3), **options, return_dict_in_generate=True)
            if draft is not None:
                assert (
                    sum(metrics.accepted for metrics in out.slo) > 0
                    and len(out.steps) < out.sequences.shape[1]
                )
        check(model, ours.generate, texts(1, seed=1), **NEW)


def test_the_encoder_has_an_effect_on_every_row() -> None:
    model = tiny_text_model("Bart")
    inputs = texts(2)
    ours = SLOSpecGenerator(tiny_text_model("Bart"), config=CONFIG)
    options = NEW | dict(return_dict_in_generate=True, output_scores=True, max_new_tokens=2)
    one = check(model, ours.generate, inputs, **options).scores[0]
    changed = inputs | {"input_ids": inputs["input_ids"].flip(1) * inputs["attention_mask"]}
    other = check(model, ours.generate, changed, **options).scores[0]
    assert bool(((one - other).abs().amax(1) > 0.01).all())


@pytest.mark.parametrize("name", nightly_but(("T5",), ("Bart", "T5")))
def test_options_and_outputs(name: str) -> None:
    model = tiny_text_model(name)
    ours = SLOSpecGenerator(model, halved(model), config=CONFIG)
    everything = dict(return_dict_in_generate=True, output_scores=True, output_logits=True)
    check(model, ours.generate, texts(2), **NEW, **everything)
    check(
        model,
        ours.generate,
        texts(2),
        **SAMPLED,
        **everything,
        num_return_sequences=2,
        repetition_penalty=1.3,
    )
    start = torch.full((2, 1), 3)
    prompt = torch.cat(
        (start, torch.randint(4, VOCAB, (2, 5), generator=torch.Generator().manual_seed(3))), 1
    )
    check(model, ours.generate, texts(2), **NEW, decoder_input_ids=prompt)
    check(
        model,
        ours.generate,
        texts(2),
        **NEW,
        forced_bos_token_id=9,
        no_repeat_ngram_size=2,
        min_new_tokens=8,
    )
    check(
        model,
        ours.generate,
        texts(2),
        **NEW,
        encoder_repetition_penalty=1.4,
        encoder_no_repeat_ngram_size=2,
    )
    check(model, ours.generate, texts(2), **NEW, **everything, use_cache=False)
    check(model, ours.generate, {"inputs": texts(2)["input_ids"]}, **NEW)
    with torch.no_grad():
        given = model.get_encoder()(**texts(2))
    check(
        model,
        ours.generate,
        {"encoder_outputs": given, "attention_mask": texts(2)["attention_mask"]},
        **NEW,
    )


def test_enabled_models_and_other_drafts(accepted: list[int]) -> None:
    model = copy.deepcopy(tiny_text_model("Bart"))
    expected = model.generate(**texts(3), **NEW)
    other = tiny_text_model("Bart", seed=1)  # with an encoder of its own
    hf_slospec.enable(model, assistant_model=other, config=CONFIG)
    assert torch.equal(model.generate(**texts(3), **NEW, slo_tpot=[0.01, None, 0.1]), expected)
    assert torch.equal(
        model.generate(**texts(3), **NEW, slo_tpot=0.01, assistant_model=halved(model)), expected
    )
    assert torch.equal(
        model.generate(**texts(3), **NEW, slo_tpot=0.01, prompt_lookup_num_tokens=3), expected
    )
    assert torch.equal(
        model.generate(**texts(3), **NEW, slo_tpot=0.01, assistant_model=tiny_model("llama")),
        expected,
    )
    assert accepted[1] > accepted[0]
    hf_slospec.disable(model)
    assert torch.equal(model.generate(**texts(3), **NEW), expected)


def test_encoders_run_once_if_target_and_draft_share_one() -> None:
    model = copy.deepcopy(tiny_text_model("Bart"))
    draft = halved(model)
    calls = list[Any]()
    ours = SLOSpecGenerator(model, draft, config=CONFIG)
    for each in (model, draft):
        each.get_encoder().register_forward_hook(lambda module, *_: calls.append(module))
    ours.generate(**texts(2), **NEW)
    assert calls == [model.get_encoder()]


WHISPER: dict[str, dict[str, Any]] = {
    "plain": {},
    "language and task": dict(language="de", task="translate"),
    "a language per row": dict(language=["de", "en", "de"]),
    "timestamps": dict(return_timestamps=True),
    "sampled": dict(temperature=0.9),
    "sampled timestamps": dict(temperature=0.8, return_timestamps=True, return_segments=True),
    "prompt": dict(prompt_ids=torch.tensor([PREVIOUS, 20, 21, 22])),
    "outputs": dict(return_dict_in_generate=True, output_scores=True, output_logits=True),
    "segments": dict(return_timestamps=True, return_dict_in_generate=True, return_segments=True),
    "processors": dict(repetition_penalty=1.4, no_repeat_ngram_size=3, min_new_tokens=10),
    "sequences": dict(do_sample=True, temperature=0.9, num_return_sequences=2),
    "fallback to higher temperatures": dict(
        temperature=(0.0, 0.4, 0.8), logprob_threshold=-0.5, compression_ratio_threshold=0.9, no_speech_threshold=0.02,
        return_timestamps=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    nightly_but(
        ("plain", "timestamps", "sampled", "processors", "fallback to higher temperatures"), WHISPER
    ),
)
def test_whisper(name: str, accepted: list[int]) -> None:
    model = tiny_whisper()
    options = WHISPER[name]
    ours = SLOSpecGenerator(model, halved_decoder(model), config=CONFIG)
    check(model, ours.generate, {"input_features": audio(3)}, **options)
    assert sum(accepted) > 0


@pytest.mark.parametrize(
    "kind", nightly_but(("lookup",), ("lookup", "with its encoder", "with another encoder"))
)
def test_other_drafts_for_whisper(kind: str, accepted: list[int]) -> None:
    model = tiny_whisper()
    draft = {"lookup": lambda: None, "with its encoder": lambda: halved(model)}.get(
        kind, lambda: tiny_whisper(1)
    )()
    ours = SLOSpecGenerator(model, draft, config=CONFIG)
    ids = check(model, ours.generate, {"input_features": audio(3)})
    assert len(set(map(tuple, ids.tolist()))) == 3, "the audio has no effect"
    check(
        model, ours.generate, {"input_features": audio(3)}, temperature=0.9, return_timestamps=True
    )
    assert sum(accepted) > 0 or kind == "with another encoder"


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
def test_long_form(name: str, accepted: list[int]) -> None:
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


class EndsLater(LogitsProcessor):
    """Forbids the end of the text before some length."""

    per_row = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < 20:
            scores[:, 2] = -float("inf")
        return scores


def test_enabled_whisper(accepted: list[int]) -> None:
    model = copy.deepcopy(tiny_whisper())
    processors = LogitsProcessorList([EndsLater()])
    expected = model.generate(audio(4), logits_processor=processors)
    hf_slospec.enable(model, assistant_model=halved_decoder(model), config=CONFIG, always=True)
    assert torch.equal(model.generate(audio(4), logits_processor=processors), expected)
    assert torch.equal(
        model.generate(audio(4), logits_processor=processors, slo_tpot=0.01), expected
    )
    assert len(accepted) == 2 and min(accepted) > 0
    lookup = model.generate(audio(4), logits_processor=processors, prompt_lookup_num_tokens=3)
    assert torch.equal(lookup, expected)


def test_audio_of_the_usual_size_has_the_encoders_positions() -> None:
    assert (
        audio(2).shape == (2, MELS, FRAMES)
        and tiny_whisper().config.max_source_positions == FRAMES // 2
    )


def test_cross_attention_with_a_softcap_and_rope() -> None:
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


def test_a_draft_in_another_dtype(accepted: list[int]) -> None:
    model = tiny_whisper()
    for draft in (halved_decoder(model).bfloat16(), copy.deepcopy(tiny_whisper(1)).bfloat16()):
        check(
            model,
            SLOSpecGenerator(model, draft, config=CONFIG).generate,
            {"input_features": audio(2)},
        )
    assert accepted[0] > 0


def test_beams_fall_back_to_stock() -> None:
    model = tiny_whisper()
    with pytest.warns(FallbackWarning, match="beam search"):
        out = SLOSpecGenerator(model, config=CONFIG).generate(audio(2), num_beams=2, fallback=True)
    assert torch.equal(out, model.generate(audio(2), num_beams=2))
