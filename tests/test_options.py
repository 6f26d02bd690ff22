"""Every option of ``generate``: stock and ours on the same inputs, tokens and whatever else is returned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StaticCache, StoppingCriteria
from transformers.generation import (
    MaxTimeCriteria,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from hf_slospec import (
    FallbackWarning,
    InvalidInputError,
    InvalidTypeError,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
    disable,
    enable,
)
from hf_slospec.generate.processors import IGNORE_SEQUENCE
from tests.tiny_models import assert_same_as_stock, assert_same_cache, ragged_prompts, tiny_model

DRAFTS_ALWAYS = SLOSpecConfig(policy="adaserve", check_invariants=True, token_budget=40)
NEW: dict[str, Any] = dict(max_new_tokens=24, output_scores=True, output_logits=True)
GREEDY: dict[str, Any] = NEW | dict(do_sample=False)
SAMPLED: dict[str, Any] = NEW | dict(do_sample=True)


def generator(family: str = "llama", **options: Any) -> SLOSpecGenerator:
    return SLOSpecGenerator(tiny_model(family), tiny_model(family, noise=0.03), config=DRAFTS_ALWAYS, **options)


def check(options: dict[str, Any], batches: tuple[int, ...] = (1, 3), family: str = "llama", **extra: Any) -> None:
    ours = generator(family)
    for batch in batches:
        assert_same_as_stock(ours.model, ours.generate, ragged_prompts(batch, seed=batch), **options, **extra)


# ---------------------------------------------------------------- sampling

WARPERS: list[dict[str, Any]] = [
    dict(),
    dict(temperature=0.4),
    dict(temperature=1.7, top_k=7),
    dict(top_p=0.8),
    dict(top_k=40, top_p=0.9, temperature=0.7),
    dict(min_p=0.05),
    dict(typical_p=0.7),
    dict(epsilon_cutoff=0.02),
    dict(eta_cutoff=0.02),
    dict(top_h=0.5),
    dict(renormalize_logits=True, top_k=20),
    dict(remove_invalid_values=True),
]


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
def test_sampling(warpers: dict[str, Any]) -> None:
    check(SAMPLED | warpers)


@pytest.mark.parametrize("warpers", [WARPERS[0], WARPERS[4]], ids=str)
def test_sampling_node_by_node_where_a_step_has_many_logits(
    monkeypatch: pytest.MonkeyPatch, warpers: dict[str, Any]
) -> None:
    monkeypatch.setattr("hf_slospec.models.sampling.MAX_BATCHED_LOGITS", 0)
    check(SAMPLED | warpers)


def test_processors_that_ignore_the_sequence_do_so() -> None:
    scores, ids = torch.randn(5, 50), torch.empty(5, 0, dtype=torch.int64)
    made = {
        "TopKLogitsWarper": dict(top_k=5), "TopPLogitsWarper": dict(top_p=0.7), "TopHLogitsWarper": dict(top_h=0.4),
        "MinPLogitsWarper": dict(min_p=0.1), "TypicalLogitsWarper": dict(mass=0.7), "EpsilonLogitsWarper": dict(
        epsilon=0.02), "EtaLogitsWarper": dict(epsilon=0.02), "TemperatureLogitsWarper": dict(temperature=0.5),
        "SuppressTokensLogitsProcessor": dict(suppress_tokens=[3, 4]),
    }  # fmt: skip
    for kind in IGNORE_SEQUENCE:
        processor = kind(**made.get(kind.__name__, {}))
        together = processor(ids, scores.clone())
        for row in range(5):
            alone = processor(torch.randint(0, 50, (1, 9)), scores[row : row + 1].clone())
            torch.testing.assert_close(together[row : row + 1], alone)


def test_several_sequences_per_prompt() -> None:
    check(SAMPLED, batches=(1, 2), num_return_sequences=3)


def test_impossible_distributions_are_an_error_as_in_stock() -> None:
    def spoil(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * float("nan")

    with pytest.raises(RuntimeError, match="inf or nan"):
        generator().generate(**ragged_prompts(1), **SAMPLED, logits_processor=[spoil])


# ---------------------------------------------------------------- processors


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.4),
        dict(encoder_repetition_penalty=1.3),
        dict(no_repeat_ngram_size=2),
        dict(encoder_no_repeat_ngram_size=2),
        dict(bad_words_ids=[[5], [7, 8], [11, 12, 13]]),
        dict(min_length=40),
        dict(min_new_tokens=15, eos_token_id=[2, 9, 30]),
        dict(forced_bos_token_id=17),
        dict(forced_eos_token_id=2),
        dict(suppress_tokens=[4, 5, 6]),
        dict(begin_suppress_tokens=[1, 3, 50, 60]),
        dict(sequence_bias={(10,): 5.0, (11, 12): -4.0}),
        dict(exponential_decay_length_penalty=(5, 1.3)),
        dict(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=6, temperature=0.9, top_k=30),
    ],
    ids=str,
)
def test_processors(mode: dict[str, Any], options: dict[str, Any]) -> None:
    if mode is GREEDY and "temperature" in options:
        options = {k: v for k, v in options.items() if k not in ("temperature", "top_k")}
    check(mode | options)


class Countdown(LogitsProcessor):
    """Remembers how often it was called, and moves the scores by it."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores.roll(self.calls % 5, dims=-1) + input_ids[:, -1:] % 3


class Widened(TopKLogitsWarper):
    """A subclass of a processor that ignores the sequence, and does not."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores) + (input_ids[:, -1:] % 7)


class Counting(Countdown):
    """The same, and says that it treats every row by itself."""

    per_row = True


class RowBias(LogitsProcessor):
    """Tells rows apart by their place in the batch."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 6.0 * torch.randn(3, 101, generator=torch.Generator().manual_seed(1))[: len(scores)]


class Drawing(LogitsProcessor):
    """Draws from the global generator."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + torch.rand_like(scores)


class InPlace(LogitsProcessor):
    per_row = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, 5:60:2] = -torch.inf
        return scores


class Narrowing(LogitsProcessor):
    """Cuts the vocabulary, and changes the dtype."""

    per_row = True

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :50].bfloat16()


def stateful_function() -> Any:
    calls = [0]

    def processor(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return scores.roll(calls[0] % 5, -1)

    return processor


CUSTOM = [Countdown, lambda: Widened(5), RowBias, Drawing, stateful_function, Counting, InPlace, Narrowing,
          lambda: SuppressTokensLogitsProcessor([7, 8])]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*decoded in step:hf_slospec.FallbackWarning")
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("make", CUSTOM, ids=lambda make: getattr(make, "__name__", "?"))
def test_custom_processors(make: Any, mode: dict[str, Any], batch: int) -> None:
    ours, inputs, seen = generator(), ragged_prompts(batch, seed=batch), []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        torch.manual_seed(7)
        out = generate(**inputs, **mode, logits_processor=[make()], return_dict_in_generate=True)
        seen.append((out.sequences.tolist(), torch.get_rng_state().tolist()))
        if make is not Narrowing:
            seen[-1] += ([logits.isinf().tolist() for logits in out.logits],)
    assert seen[0] == seen[1]


def test_what_may_look_at_the_whole_batch_is_decoded_in_step_and_says_so() -> None:
    ours, inputs = generator(), ragged_prompts(3)
    with pytest.warns(FallbackWarning, match="Countdown may look at the whole batch"):
        out = ours.generate(**inputs, **GREEDY, logits_processor=[Countdown()], return_dict_in_generate=True)
    assert [metrics.drafted for metrics in out.slo] == [0, 0, 0]
    assert all(metrics.tpot_s > 0 and metrics.tokens == 1 + metrics.steps for metrics in out.slo)
    out = ours.generate(**inputs, **GREEDY, logits_processor=[Counting()], return_dict_in_generate=True)
    assert all(metrics.drafted for metrics in out.slo)


def test_prefix_allowed_tokens() -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return [(int(tokens[-1]) * k + row) % 101 for k in range(3, 30)]

    check(GREEDY, prefix_allowed_tokens_fn=allowed)
    check(SAMPLED, prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_classifier_free_guidance(mode: dict[str, Any]) -> None:
    check(mode, guidance_scale=1.6)
    negative = ragged_prompts(3, seed=9)
    for batch in (1, 3):
        check(
            mode, batches=(batch,), guidance_scale=1.6, negative_prompt_ids=negative["input_ids"][:batch],
            negative_prompt_attention_mask=negative["attention_mask"][:batch],
        )  # fmt: skip


# ---------------------------------------------------------------- stopping


class StopAt(StoppingCriteria):
    """Stops a row at a token."""

    per_row = True

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("eos", [None, 2, [2, 17, 40]])
def test_custom_criteria_are_checked_per_token(mode: dict[str, Any], eos: Any) -> None:
    criteria = StoppingCriteriaList([StopAt(*range(20, 36)), MaxTimeCriteria(1000.0)])
    check(mode | dict(max_new_tokens=40), (1, 3, 5), stopping_criteria=criteria, eos_token_id=eos)


class Recorder:
    """Streams into a list."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.puts.append([])


@pytest.mark.parametrize("seed", range(12))
def test_rows_written_on_stream_and_draw_no_further_than_stock(seed: int) -> None:
    ours, inputs = generator(), ragged_prompts(3, seed=seed)
    options: dict[str, Any] = dict(do_sample=True, max_new_tokens=40, eos_token_id=None)
    seen = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        torch.manual_seed(seed)
        streamer = Recorder()
        generate(**inputs, **options, stopping_criteria=[StopAt(*range(20, 36))], streamer=streamer)
        seen.append((streamer.puts, torch.get_rng_state().tolist()))
    assert seen[0] == seen[1]


class AnyRow(StoppingCriteria):
    """Stops all rows when one is at a token."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
        return bool(torch.isin(input_ids[:, -1], torch.arange(20, 36)).any())


class MaxCalls(StoppingCriteria):
    """Stops by the number of times it was asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls += 1
        return torch.full((len(input_ids),), self.calls >= 10)


class SureEnough(StoppingCriteria):
    """Reads scores."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return scores[-1].softmax(-1).max(-1).values > 0.9


@pytest.mark.filterwarnings("ignore:.*decoded in step:hf_slospec.FallbackWarning")
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", [AnyRow, MaxCalls, SureEnough])
@pytest.mark.parametrize("eos", [None, 2])
def test_criteria_of_the_whole_batch(mode: dict[str, Any], make: Any, eos: Any) -> None:
    for batch in (1, 3):
        ours, inputs, seen = generator(), ragged_prompts(batch, seed=batch), []
        for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
            torch.manual_seed(7)
            out = generate(**inputs, **mode, stopping_criteria=[make()], eos_token_id=eos, return_dict_in_generate=True)
            seen.append((out.sequences.tolist(), torch.get_rng_state().tolist(), len(out.scores)))
        assert seen[0] == seen[1]


def test_criteria_may_look_at_what_was_streamed() -> None:
    class Streamed(StoppingCriteria):
        def __init__(self, streamer: Recorder):
            self.streamer = streamer

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), len(self.streamer.puts) >= 6)

    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, model, config=SLOSpecConfig(policy="adaserve", max_width=1, token_budget=40))
    lengths = []
    for generate in (type(model).generate.__get__(model), ours.generate):
        streamer = Recorder()
        criteria = [Streamed(streamer)]
        lengths.append(
            generate(
                **ragged_prompts(1), **GREEDY, eos_token_id=None, streamer=streamer, stopping_criteria=criteria
            ).shape
        )
    assert lengths[0] == lengths[1]


def test_no_time_left_ends_after_one_token() -> None:
    out = generator().generate(**ragged_prompts(2), do_sample=False, max_new_tokens=30, max_time=1e-9)
    assert out.shape[1] == ragged_prompts(2)["input_ids"].shape[1] + 1


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_end_apart_have_stocks_scores_and_cache_behind_their_ends(mode: dict[str, Any]) -> None:
    check(mode | dict(max_new_tokens=40), (8,), eos_token_id=[2, 17, 40, 41, 42], pad_token_id=5)


# ---------------------------------------------------------------- caches and embeddings

FAMILIES = ["llama", "mistral-window", "gemma3", "gpt2"]


def text_and_cache(family: str, batch: int, cache: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A first turn written into the cache by stock.  -> the text so far, with new words after it, and its mask"""
    inputs = ragged_prompts(batch, seed=batch)
    text = tiny_model(family).generate(
        **inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, past_key_values=cache
    )
    new = torch.randint(3, 101, (batch, 5), generator=torch.Generator().manual_seed(4))
    return torch.cat((text, new), 1), torch.cat((inputs["attention_mask"], torch.ones(batch, 13).long()), 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("is_whole_text", [True, False])
def test_second_turn_on_a_cache(family: str, batch: int, is_whole_text: bool) -> None:
    ours, caches = generator(family), []
    outputs = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        caches.append(DynamicCache(config=ours.model.config))
        text, mask = text_and_cache(family, batch, caches[-1])
        ids = text if is_whole_text else text[:, caches[-1].get_seq_length() :]
        outputs.append(
            generate(
                input_ids=ids, attention_mask=mask, past_key_values=caches[-1], do_sample=False, max_new_tokens=20,
                eos_token_id=None, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(outputs[0].sequences, outputs[1].sequences)
    assert outputs[1].past_key_values is caches[1]
    assert_same_cache(caches[1], caches[0], mask)


@pytest.mark.parametrize("family", FAMILIES)
def test_our_cache_serves_a_second_turn(family: str) -> None:
    ours, cache = generator(family), DynamicCache(config=tiny_model(family).config)
    inputs = ragged_prompts(1)
    text = ours.generate(**inputs, do_sample=False, max_new_tokens=8, eos_token_id=None, past_key_values=cache)
    assert cache.get_seq_length() == text.shape[1] - 1  # filled though no dict was asked for
    expected = ours.model.generate(text, do_sample=False, max_new_tokens=10, eos_token_id=None)
    again = ours.model.generate(text, do_sample=False, max_new_tokens=10, eos_token_id=None, past_key_values=cache)
    assert torch.equal(again, expected)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])
def test_static_cache_over_three_turns(family: str) -> None:
    ours = generator(family)
    texts = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        cache, text = StaticCache(config=ours.model.config, max_cache_len=96), ragged_prompts(1)["input_ids"]
        for turn in range(3):
            new = torch.full((1, 4), 7 + turn)
            text = generate(
                torch.cat((text, new), 1), do_sample=False, max_new_tokens=8, eos_token_id=None, past_key_values=cache
            )
        texts.append(text)
    assert torch.equal(*texts)


def test_cache_of_another_batch_or_model() -> None:
    ours, cache = generator(), DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 2, cache)
    with pytest.raises(InvalidInputError, match="holds 2 rows, and this batch has 1"):
        ours.generate(text[:1], attention_mask=mask[:1], past_key_values=cache, max_new_tokens=3)
    text, mask = text_and_cache("gpt2", 1, cache := DynamicCache())
    with pytest.raises(InvalidInputError, match="same model"):
        ours.generate(text, attention_mask=mask, past_key_values=cache, max_new_tokens=3)


def test_static_cache_may_be_passed_or_asked_for() -> None:
    ours = generator()
    inputs = ragged_prompts(2)
    expected = ours.model.generate(**inputs, do_sample=False, max_new_tokens=12)
    cache = StaticCache(config=ours.model.config, max_cache_len=64)
    assert torch.equal(ours.generate(**inputs, do_sample=False, max_new_tokens=12, past_key_values=cache), expected)
    assert int(cache.get_seq_length()) == expected.shape[1] - 1
    out = ours.generate(**inputs, do_sample=False, max_new_tokens=12, cache_implementation="static")
    assert torch.equal(out, expected)


def test_without_cache() -> None:
    check(GREEDY, use_cache=False)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_ids", [False, True])
def test_prompt_given_as_embeddings(family: str, batch: int, with_ids: bool) -> None:
    ours = generator(family)
    inputs = ragged_prompts(batch, seed=batch)
    embeds = ours.model.get_input_embeddings()(inputs["input_ids"]).detach()
    soft = embeds + 0.05 * torch.randn(embeds.shape, generator=torch.Generator().manual_seed(3))
    given = {"inputs_embeds": soft, "attention_mask": inputs["attention_mask"]}
    if with_ids:
        given["input_ids"] = inputs["input_ids"]
    for mode in (GREEDY, SAMPLED):
        assert_same_as_stock(ours.model, ours.generate, given, **mode)
    if not with_ids:
        assert_same_as_stock(ours.model, ours.generate, given, max_length=embeds.shape[1] + 9, do_sample=False)


def test_embeddings_of_tokens_are_drafted_for_as_those_tokens() -> None:
    model = tiny_model("llama")
    ours = SLOSpecGenerator(model, model, config=SLOSpecConfig(policy="adaserve", max_depth=4, max_width=1))
    embeds = model.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    out = ours.generate(
        inputs_embeds=embeds, do_sample=False, max_new_tokens=21, eos_token_id=None, return_dict_in_generate=True
    )
    assert out.slo[0].acceptance_length == 5.0


def test_several_sequences_of_embeddings() -> None:
    ours = generator()
    embeds = ours.model.get_input_embeddings()(ragged_prompts(1)["input_ids"]).detach()
    assert_same_as_stock(ours.model, ours.generate, {"inputs_embeds": embeds}, **SAMPLED, num_return_sequences=2)


def test_tokens_masked_in_the_middle() -> None:
    for family in ("llama", "gpt2"):
        ours, inputs = generator(family), ragged_prompts(2)
        inputs["attention_mask"][0, -5:-2] = 0
        assert_same_as_stock(ours.model, ours.generate, inputs, **GREEDY)
    inputs["attention_mask"][0, -5:-2] = 0
    with pytest.raises(UnsupportedOptionError, match="sliding window"):
        generator("mistral-window").generate(**inputs, **GREEDY)


# ---------------------------------------------------------------- the rest


def test_text_may_be_far_shorter_than_its_limit() -> None:
    options: dict[str, Any] = dict(do_sample=True, eos_token_id=[2, 17, 40, 41, 42])
    ours = generator()
    assert_same_as_stock(ours.model, ours.generate, ragged_prompts(3), **options, max_new_tokens=10**9)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "gpt2"])
def test_storage_grows_with_the_text(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    monkeypatch.setattr("hf_slospec.models.kv_cache.sequences.FIRST_ROOM", 5)
    check(GREEDY | dict(max_new_tokens=70, eos_token_id=[2, 17]), (1, 3), family=family)
    check(SAMPLED | dict(max_new_tokens=70, eos_token_id=[2, 17]), (3,), family=family)


def test_model_in_training_mode() -> None:
    model = copy.deepcopy(tiny_model("gpt2")).train()
    ours = SLOSpecGenerator(model, tiny_model("gpt2"))
    with pytest.raises(UnsupportedModelError, match=r"model\.eval\(\)"):
        ours.generate(**ragged_prompts(1), **GREEDY)
    draft = copy.deepcopy(tiny_model("gpt2", noise=0.03)).train()
    ours = SLOSpecGenerator(tiny_model("gpt2"), draft, config=DRAFTS_ALWAYS)
    assert_same_as_stock(ours.model, ours.generate, ragged_prompts(2), **SAMPLED)
    assert draft.training
    llama = copy.deepcopy(tiny_model("llama")).train()  # has no dropout
    assert_same_as_stock(llama, SLOSpecGenerator(llama).generate, ragged_prompts(2), **SAMPLED)


def test_arguments_that_change_nothing() -> None:
    check(GREEDY, logits_to_keep=1)
    check(GREEDY, prefill_chunk_size=4)
    check(GREEDY, output_attentions=True, return_dict_in_generate=False)
    ours, inputs = generator(), ragged_prompts(3)
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    assert_same_as_stock(ours.model, ours.generate, inputs, **GREEDY, position_ids=positions)
    with pytest.raises(UnsupportedOptionError, match="position_ids"):
        ours.generate(**inputs, **GREEDY, position_ids=positions + 1)


def test_no_prompt_at_all_starts_from_bos() -> None:
    ours = generator()
    assert_same_as_stock(ours.model, ours.generate, {}, **GREEDY)


def test_missing_pad_token() -> None:
    ours = generator()
    inputs = ragged_prompts(4, seed=2)
    assert_same_as_stock(ours.model, ours.generate, inputs, **GREEDY, pad_token_id=None, eos_token_id=[2, 17, 40, 41])


def test_target_and_everything_else_from_a_saved_generation_config(tmp_path: Any) -> None:
    GenerationConfig(slo_tpot=[0.5, None], do_sample=True, top_k=9, **NEW, eos_token_id=2, pad_token_id=0,
                     return_dict_in_generate=True).save_pretrained(tmp_path)  # fmt: skip
    config = GenerationConfig.from_pretrained(tmp_path)
    model = enable(tiny_model("llama"), tiny_model("llama", noise=0.03))
    try:
        out = assert_same_as_stock(model, model.generate, ragged_prompts(2), generation_config=config)
    finally:
        disable(model)
    assert [metrics.tpot_slo_s for metrics in out.slo] == [0.5, None]


@pytest.mark.parametrize("place", ["argument", "config"])
def test_prompt_lookup_by_argument(place: str) -> None:
    lookup = dict(prompt_lookup_num_tokens=4, max_matching_ngram_size=2)
    ours = generator()
    inputs = {k: v.repeat(1, 2) for k, v in ragged_prompts(1).items()}
    expected = ours.model.generate(**inputs, do_sample=False, max_new_tokens=30)
    options: dict[str, Any] = dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    if place == "config":
        options = dict(generation_config=GenerationConfig(**options, **lookup, eos_token_id=2, pad_token_id=0))
        lookup = {}
    out = ours.generate(**inputs, **options, **lookup)
    assert torch.equal(out.sequences, expected)
    assert out.slo[0].drafted > 0
    with pytest.raises(InvalidInputError, match="prompt_lookup_num_tokens"):
        ours.generate(**inputs, prompt_lookup_num_tokens=0)


# ---------------------------------------------------------------- what cannot be done

UNSUPPORTED: list[tuple[dict[str, Any], str]] = [
    (dict(num_beams=2), "beam"),
    (dict(output_attentions=True, return_dict_in_generate=True), "output_attentions"),
    (dict(output_hidden_states=True, return_dict_in_generate=True), "output_hidden_states"),
    (dict(cache_implementation="quantized"), "cache_implementation"),
    (dict(token_healing=True), "token_healing"),
    (dict(synced_gpus=True), "synced_gpus"),
    (dict(past_key_values=DynamicCache(), use_cache=False), "use_cache"),
]


@pytest.mark.parametrize(("options", "name"), UNSUPPORTED, ids=lambda value: str(value))
def test_unsupported_options_are_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=name):
        generator().generate(**ragged_prompts(2), do_sample=False, max_new_tokens=6, **options)


def test_fallback_runs_stock_generate_and_says_so() -> None:
    model = enable(tiny_model("llama"), tiny_model("llama", noise=0.03), fallback=True)
    inputs, options = ragged_prompts(2), dict(do_sample=False, max_new_tokens=6, num_beams=2)
    expected = type(model).generate(model, **inputs, **options)
    try:
        with pytest.warns(FallbackWarning, match="beam"):
            assert torch.equal(model.generate(**inputs, **options, slo_tpot=0.1), expected)
        with pytest.raises(UnsupportedOptionError, match="beam"):
            model.generate(**inputs, **options, slo_tpot=0.1, fallback=False)
    finally:
        disable(model)
    with pytest.warns(FallbackWarning, match="beam"):
        assert torch.equal(generator().generate(**inputs, **options, fallback=True), expected)


def test_fallback_for_a_model_that_cannot_hold_a_tree() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=101, hidden_size=32, n_layer=2, n_head=4)).eval()
    inputs = ragged_prompts(2)
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=6)
    with pytest.raises(UnsupportedModelError, match="Bloom"):
        enable(model)
    enable(model, fallback=True)
    with pytest.warns(FallbackWarning, match="Bloom"):
        assert torch.equal(model.generate(**inputs, do_sample=False, max_new_tokens=6, slo_tpot=0.1), expected)


def test_fallback_does_not_stream_the_prompt_twice() -> None:
    inputs, streamer, stock = ragged_prompts(1), Recorder(), Recorder()
    options = dict(do_sample=False, max_new_tokens=6, output_hidden_states=True, return_dict_in_generate=True)
    tiny_model("llama").generate(**inputs, **options, streamer=stock)
    with pytest.warns(FallbackWarning):
        generator(fallback=True).generate(**inputs, **options, streamer=streamer)
    assert streamer.puts == stock.puts


@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        (dict(past_key_values=object()), InvalidTypeError, "past_key_values"),
        (dict(inputs_embeds=torch.zeros(2, 32)), InvalidInputError, "inputs_embeds"),
        (dict(inputs_embeds=torch.zeros(2, 3, 32)), UnsupportedOptionError, "inputs_embeds"),
    ],
)
def test_impossible_prompts(arguments: dict[str, Any], error: Any, name: str) -> None:
    with pytest.raises(error, match=name):
        generator().generate(**ragged_prompts(2), do_sample=False, max_new_tokens=6, **arguments)


def test_cache_that_holds_the_whole_prompt_already() -> None:
    ours, cache = generator(), DynamicCache(config=tiny_model("llama").config)
    text, mask = text_and_cache("llama", 1, cache)
    length = cache.get_seq_length()
    with pytest.raises(InvalidInputError, match="past_key_values holds"):
        ours.generate(text[:, :length], attention_mask=mask[:, :length], past_key_values=cache, max_new_tokens=3)
