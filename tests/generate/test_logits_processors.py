"""Logits processors, by option and of the user's own: stock and ours on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import (
    SuppressTokensLogitsProcessor,
    TopKLogitsWarper,
)

from hf_slospec import (
    FallbackWarning,
    InvalidInputError,
)
from tests.support.against_stock import GREEDY, SAMPLED, check, generator
from tests.support.breadth import nightly_but, quick_or
from tests.support.generate_arguments import Returns
from tests.support.toys.tiny_models import ragged_prompts


@pytest.mark.parametrize(
    "mode", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"]
)
@pytest.mark.parametrize(
    "options",
    [
        dict(repetition_penalty=1.4),
        dict(encoder_repetition_penalty=1.3),
        dict(no_repeat_ngram_size=2),
        dict(encoder_no_repeat_ngram_size=2),
        dict(bad_words_ids=[[5], [7, 8], [11, 12, 13]]),
        dict(min_length=quick_or(25, 40)),
        dict(min_new_tokens=quick_or(8, 15), eos_token_id=[2, 9, 30]),
        dict(forced_bos_token_id=17),
        dict(forced_eos_token_id=2),
        dict(suppress_tokens=[4, 5, 6]),
        dict(begin_suppress_tokens=[1, 3, 50, 60]),
        dict(sequence_bias={(10,): 5.0, (11, 12): -4.0}),
        dict(exponential_decay_length_penalty=(5, 1.3)),
        dict(
            repetition_penalty=1.2,
            no_repeat_ngram_size=3,
            min_new_tokens=6,
            temperature=0.9,
            top_k=30,
        ),
    ],
    ids=str,
)
def test_processors(mode: dict[str, Any], options: dict[str, Any]) -> None:
    if mode is GREEDY and "temperature" in options:
        options = {k: v for k, v in options.items() if k not in ("temperature", "top_k")}
    check(mode | options, batches=quick_or((3,), (1, 3)))


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
        return (
            scores
            + 6.0 * torch.randn(3, 101, generator=torch.Generator().manual_seed(1))[: len(scores)]
        )


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
@pytest.mark.parametrize(("mode", "batch"), [(GREEDY, 1), (SAMPLED, 3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("make", CUSTOM, ids=lambda make: getattr(make, "__name__", "?"))
def test_custom_processors(make: Any, mode: dict[str, Any], batch: int) -> None:
    ours = generator()
    inputs = ragged_prompts(batch, seed=batch)
    seen = []
    for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
        torch.manual_seed(7)
        out = generate(**inputs, **mode, logits_processor=[make()], return_dict_in_generate=True)
        seen.append((out.sequences.tolist(), torch.get_rng_state().tolist()))
        if make is not Narrowing:
            seen[-1] += ([logits.isinf().tolist() for logits in out.logits],)
    assert seen[0] == seen[1]


def test_what_may_look_at_the_whole_batch_is_decoded_in_step_and_says_so() -> None:
    ours = generator()
    inputs = ragged_prompts(3)
    with pytest.warns(FallbackWarning, match="Countdown may look at the whole batch"):
        out = ours.generate(
            **inputs, **GREEDY, logits_processor=[Countdown()], return_dict_in_generate=True
        )
    assert [metrics.drafted for metrics in out.slo] == [0, 0, 0]
    assert all(metrics.tpot_s > 0 and metrics.tokens == 1 + metrics.steps for metrics in out.slo)
    out = ours.generate(
        **inputs, **GREEDY, logits_processor=[Counting()], return_dict_in_generate=True
    )
    assert all(metrics.drafted for metrics in out.slo)


@pytest.mark.parametrize("found", [None, torch.zeros(101)])
@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_processors_that_return_something_else(mode: dict[str, Any], found: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"logits_processor .* must return scores of shape"):
        generator().generate(
            **ragged_prompts(1), **mode, logits_processor=LogitsProcessorList([Returns(found)])
        )


def test_prefix_allowed_tokens() -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return [(int(tokens[-1]) * k + row) % 101 for k in range(3, 30)]

    check(GREEDY, prefix_allowed_tokens_fn=allowed)
    check(SAMPLED, prefix_allowed_tokens_fn=allowed)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_classifier_free_guidance(mode: dict[str, Any]) -> None:
    check(mode, batches=quick_or((3,), (1, 3)), guidance_scale=1.6)
    negative = ragged_prompts(3, seed=9)
    for batch in quick_or((3,), (1, 3)):
        check(
            mode, batches=(batch,), guidance_scale=1.6, negative_prompt_ids=negative["input_ids"][:batch],
            negative_prompt_attention_mask=negative["attention_mask"][:batch],
        )  # fmt: skip
