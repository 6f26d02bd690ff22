"""SLOs as callers write them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import hf_slospec
from hf_slospec import InvalidInputError, InvalidTypeError, SLOStage
from hf_slospec.generate.prepare import stages_by_row
from hf_slospec.generate.rows import StopStrings
from hf_slospec.request.slo import Stage, parse_slo

THINK = SLOStage(slo_tpot=0.01, until="</think>")
ANSWER = SLOStage(slo_tpot=0.05)
AS_DICTS = [{"slo_tpot": 0.01, "until": "</think>"}, {"slo_tpot": 0.05}]


BOTH = (0.01, 0.05)


def tpots(slo):
    """Return the seconds of every stage, in the form in which the SLO is parsed."""
    parsed = parse_slo(slo, lambda text: lambda tokens: False)
    rows = parsed if isinstance(parsed, list) else [parsed]
    seconds = [tuple(stage.tpot_slo_s for stage in stages) for stages in rows]
    return seconds if isinstance(parsed, list) else seconds[0]


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        (None, (None,)),
        (2, (2,)),
        (np.float32(0.5), (0.5,)),
        (torch.tensor(0.5), (0.5,)),
        ([0.5, None], [(0.5,), (None,)]),
        ((0.5, 0.25), [(0.5,), (0.25,)]),
        (np.array([0.5, 0.25]), [(0.5,), (0.25,)]),
        (np.array([0.5, None]), [(0.5,), (None,)]),
        (torch.tensor([0.5, 0.25]), [(0.5,), (0.25,)]),
        ([THINK, ANSWER], BOTH),
        (AS_DICTS, BOTH),
        ((THINK, AS_DICTS[1]), BOTH),
        ([ANSWER], (0.05,)),
        ([[THINK, ANSWER], 0.5, None, AS_DICTS], [BOTH, (0.5,), (None,), BOTH]),
        ([SLOStage(slo_tpot=None, tokens=3), ANSWER], (None, 0.05)),
    ],
)
def test_parsed_slos(slo, expected):
    assert tpots(slo) == expected


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (0, "positive"),
        (math.nan, "positive"),
        ([0.1, math.inf], "positive"),
        (np.array([0.1, -1.0]), "positive"),
        ([SLOStage(slo_tpot=-1.0)], "positive"),
        ([0.1, [{"slo_tpot": math.nan}]], "positive"),
        ([ANSWER, THINK], "without an end"),
        ([{"until": "x"}], "slo_tpot: Field required"),
        ([{"slo_tpot": 0.1, "til": "x"}], "til: Extra inputs"),
        ([{"slo_tpot": 0.1, "tokens": 0}], "tokens: .*greater than or equal to 1"),
        ([{"slo_tpot": 0.1, "tokens": 3, "until": "x"}], "not by both"),
    ],
)
def test_impossible_slos_are_named(bad, why):
    with pytest.raises(InvalidInputError, match=f"slo_tpot(.|\n)*{why}"):
        parse_slo(bad)


@pytest.mark.parametrize(
    "bad", ["0.1", True, {"slo_tpot": 0.1}, ANSWER, [ANSWER, 0.1], [[]], [[0.1]], np.array([[0.1]])]
)
def test_slos_of_wrong_type_are_named(bad):
    with pytest.raises(InvalidTypeError, match="slo_tpot must be"):
        parse_slo(bad)


def test_one_slo_is_for_all_rows_and_a_list_for_prompts_or_rows():
    for slo, num_rows, num_return_sequences, expected in (
        (0.5, 3, 1, [0.5] * 3),
        ([0.5, None], 4, 2, [0.5, 0.5, None, None]),
        ([1.0, 2.0, 3.0, 4.0], 4, 2, [1.0, 2.0, 3.0, 4.0]),
    ):
        by_row = stages_by_row(parse_slo(slo), num_rows, num_return_sequences)
        assert [stage.tpot_slo_s for (stage,) in by_row] == expected
    for wrong in ([], [0.5], [0.5] * 3):
        with pytest.raises(
            InvalidInputError, match=f"slo_tpot has {len(wrong)} entries for 4 rows"
        ):
            stages_by_row(parse_slo(wrong), 4, 2)


def test_stages_by_text_end_with_the_token_that_completes_it():
    with pytest.raises(InvalidInputError, match="tokenizer"):
        parse_slo((THINK, ANSWER))
    tokenizer = hf_slospec.load_tiny_pair()[2]
    text = "def f(self):\n    return self.x\n"
    ids = tokenizer(text)["input_ids"]
    stages = (SLOStage(slo_tpot=0.1, until="return"), ANSWER)
    thinking, answer = parse_slo(stages, lambda text: StopStrings(tokenizer, text).ends)
    assert isinstance(thinking, Stage)
    over = [end for end in range(1, len(ids) + 1) if thinking.is_over(ids[:end])]
    first = next(end for end in range(1, len(ids) + 1) if "return" in tokenizer.decode(ids[:end]))
    assert over == [first]
    assert not answer.is_over(ids)


def test_only_one_of_a_front_and_its_replica_warns(caplog):
    parse_slo([50.0, None], warns=False)
    assert not caplog.records
    parse_slo([50.0, None])
    assert len(caplog.records) == 1
