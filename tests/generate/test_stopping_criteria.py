"""Stopping criteria per row and of the whole batch: stock and ours on the same inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import StoppingCriteria
from transformers.generation import (
    MaxTimeCriteria,
    StoppingCriteriaList,
)

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
)
from tests.support.against_stock import GREEDY, SAMPLED, check, generator
from tests.support.breadth import nightly_but, quick_or
from tests.support.streamers import Recorder
from tests.support.toys.tiny_models import ragged_prompts, tiny_model


class StopAt(StoppingCriteria):
    """Stops a row at a token."""

    per_row = True

    def __init__(self, *tokens: int):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.mark.parametrize(
    "mode", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("eos", nightly_but([[2, 17, 40]], [None, 2, [2, 17, 40]]))
def test_custom_criteria_are_checked_per_token(mode: dict[str, Any], eos: Any) -> None:
    criteria = StoppingCriteriaList([StopAt(*range(20, 36)), MaxTimeCriteria(1000.0)])
    check(
        mode | dict(max_new_tokens=quick_or(24, 40)),
        quick_or((1, 5), (1, 3, 5)),
        stopping_criteria=criteria,
        eos_token_id=eos,
    )


@pytest.mark.parametrize("seed", nightly_but(range(3), range(12)))
def test_rows_written_on_stream_and_draw_no_further_than_stock(seed: int) -> None:
    ours = generator()
    inputs = ragged_prompts(3, seed=seed)
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
@pytest.mark.parametrize(
    "mode", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("make", [AnyRow, MaxCalls, SureEnough])
@pytest.mark.parametrize("eos", nightly_but([2], [None, 2]))
def test_criteria_of_the_whole_batch(mode: dict[str, Any], make: Any, eos: Any) -> None:
    for batch in (1, 3):
        ours = generator()
        inputs = ragged_prompts(batch, seed=batch)
        seen = []
        for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
            torch.manual_seed(7)
            out = generate(
                **inputs,
                **mode,
                stopping_criteria=[make()],
                eos_token_id=eos,
                return_dict_in_generate=True,
            )
            seen.append((out.sequences.tolist(), torch.get_rng_state().tolist(), len(out.scores)))
        assert seen[0] == seen[1]


def test_criteria_may_look_at_what_was_streamed() -> None:
    class Streamed(StoppingCriteria):
        def __init__(self, streamer: Recorder):
            self.streamer = streamer

        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), len(self.streamer.puts) >= 6)

    model = tiny_model("llama")
    ours = SLOSpecGenerator(
        model, model, config=SLOSpecConfig(policy="adaserve", max_width=1, token_budget=40)
    )
    lengths = []
    for generate in (type(model).generate.__get__(model), ours.generate):
        streamer = Recorder()
        criteria = [Streamed(streamer)]
        lengths.append(
            generate(
                **ragged_prompts(1),
                **GREEDY,
                eos_token_id=None,
                streamer=streamer,
                stopping_criteria=criteria,
            ).shape
        )
    assert lengths[0] == lengths[1]


def test_no_time_left_ends_after_one_token() -> None:
    out = generator().generate(
        **ragged_prompts(2), do_sample=False, max_new_tokens=30, max_time=1e-9
    )
    assert out.shape[1] == ragged_prompts(2)["input_ids"].shape[1] + 1


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_end_apart_have_stocks_scores_and_cache_behind_their_ends(
    mode: dict[str, Any],
) -> None:
    check(
        mode | dict(max_new_tokens=quick_or(24, 40)),
        (8,),
        eos_token_id=[2, 17, 40, 41, 42],
        pad_token_id=5,
    )


class Spelled:
    """A tokenizer that spells a token as a letter, so that a string of one letter stands for
    several tokens.
    """

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) - ord("a") for letter in text]

    def batch_decode(self, rows: torch.Tensor) -> list[str]:
        return ["".join(chr(ord("a") + token % 9) for token in row) for row in rows.tolist()]


class MultiTokenEOSCriteria(StoppingCriteria):
    """Ends all rows once each of them has had the string among its last tokens, as lm-eval's class
    of this name.
    """

    def __init__(self, sequence: str, prompt_len: int, batch: int):
        self.sequence = sequence
        self.prompt_len = prompt_len
        self.done_tracker = [False] * batch
        self.tokenizer = Spelled()
        self.sequence_id_len = len(self.tokenizer.encode(sequence)) + 2

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        texts = self.tokenizer.batch_decode(
            input_ids[:, self.prompt_len :][:, -self.sequence_id_len :]
        )
        self.done_tracker = [
            was or self.sequence in text for was, text in zip(self.done_tracker, texts, strict=True)
        ]
        return all(self.done_tracker)


@pytest.mark.filterwarnings("error::hf_slospec.FallbackWarning")
@pytest.mark.parametrize(
    "mode", nightly_but([SAMPLED], [GREEDY, SAMPLED]), ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("eos", nightly_but([[2, 17, 40, 41, 42]], [None, [2, 17, 40, 41, 42]]))
@pytest.mark.parametrize("others", [[], [StopAt(*range(20, 26))]], ids=["alone", "with another"])
def test_criteria_that_end_all_rows_once_each_is_done(
    mode: dict[str, Any], eos: Any, others: list[Any]
) -> None:
    ended_early = 0
    for seed, sequences in enumerate((["a"], ["bc", "e"], ["c", "ff", "aaa"], ["d", "ia"])):
        ours = generator()
        inputs = ragged_prompts(3, seed=seed)
        seen = []
        length = inputs["input_ids"].shape[1]
        for generate in (type(ours.model).generate.__get__(ours.model), ours.generate):
            torch.manual_seed(seed)
            criteria = [*(MultiTokenEOSCriteria(one, length, 3) for one in sequences), *others]
            streamer = Recorder()
            options = mode | dict(
                max_new_tokens=60, eos_token_id=eos, streamer=streamer, return_dict_in_generate=True
            )
            out = generate(**inputs, **options, stopping_criteria=criteria)
            seen.append(
                (
                    out.sequences.tolist(),
                    torch.get_rng_state().tolist(),
                    len(out.scores),
                    streamer.puts,
                )
            )
        assert seen[0] == seen[1]
        ended_early += seen[0][2] < 60
    assert ended_early


def test_rows_that_are_done_draft_on_until_all_are() -> None:
    model = tiny_model("llama")
    inputs = ragged_prompts(3)
    ours = SLOSpecGenerator(
        model, model, config=SLOSpecConfig(policy="adaserve", max_width=1, token_budget=40)
    )
    criterion = MultiTokenEOSCriteria("a", inputs["input_ids"].shape[1], 3)
    out = ours.generate(
        **inputs, **GREEDY, stopping_criteria=[criterion], return_dict_in_generate=True
    )
    assert all(row.acceptance_length > 1.5 for row in out.slo)
