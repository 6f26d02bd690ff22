"""Attainment of hand-made requests, and systems by name."""

from __future__ import annotations

import csv
import math

import pytest

from hf_slospec.engine.events import PhaseTimes
from hf_slospec.lab.outcomes import METRICS, Outcome, Run, Totals, write_requests
from hf_slospec.lab.systems import SYSTEMS, config_of
from hf_slospec.lab.workload import Job
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage


def outcome_of(commits, tpot_s, ttft_s=None, arrival_s=0.0, begun_s=math.nan, kind="all"):
    """A request that commits so many tokens at these times."""
    job = Job(arrival_s, 2, sum(count for count, _ in commits), tpot_s, ttft_s, kind)
    request = Request(
        0, RequestParams([0, 0], job.output_tokens, (Stage(tpot_s),), ttft_slo_s=ttft_s), arrival_s
    )
    for count, now_s in commits:
        for _ in range(count):
            request.emit(0)
        request.record_step(0, count - 1, float(count), PhaseTimes(), now_s)
    return Outcome.of(request, job, 0, begun_s, 0)


def verdicts(outcome):
    return [METRICS[name](outcome) for name in ("tpot", "adaserve", "slos-serve")]


def test_adaserve_divides_by_all_tokens_and_begins_with_the_first_decoding_step():
    # 11 tokens: the first at 1.0 s, decoding from 1.0 s on, the last at 2.0 s: 0.1 s a token,
    # AdaServe's 1 / 11
    even = [(1, 1.0), *((1, 1.0 + 0.1 * step) for step in range(1, 11))]
    assert verdicts(outcome_of(even, 0.1001, begun_s=1.0)) == [True, True, True]
    assert verdicts(outcome_of(even, 0.095, begun_s=1.0)) == [False, True, False]
    assert verdicts(outcome_of(even, 0.095, begun_s=1.1)) == [False, True, False]
    assert verdicts(outcome_of(even, 0.09, begun_s=1.0)) == [False, False, False]
    assert verdicts(outcome_of(even, 0.09, begun_s=1.05)) == [
        False,
        True,
        False,
    ]  # it waited before it decoded


def test_slos_serve_looks_at_any_ten_tokens():
    # 31 tokens in 3 s, with a pause of 1 s: 0.1 s a token over all, 0.17 s over the worst ten
    times = [0.0]
    for step in range(1, 31):
        times.append(times[-1] + (1.0 if step == 15 else 2.0 / 29))
    uneven = [(1, time_s) for time_s in times]
    worst_s = (1.0 + 9 * 2.0 / 29) / 10
    outcome = outcome_of(uneven, 0.11, begun_s=0.0)
    assert outcome.worst_tpot_s == pytest.approx(worst_s)
    assert outcome.windows_kept is (outcome.worst_tpot_s <= outcome.tpot_slo_s)
    assert verdicts(outcome) == [True, True, False]
    assert verdicts(outcome_of(uneven, worst_s + 1e-9, begun_s=0.0)) == [True, True, True]


def test_the_first_token_counts_where_it_was_promised_but_not_for_adaserve():
    late = [(1, 5.0), (1, 5.1)]
    assert verdicts(outcome_of(late, 0.2, 1.5, arrival_s=3.0, begun_s=5.0)) == [False, True, False]
    assert verdicts(outcome_of(late, 0.2, 2.5, arrival_s=3.0, begun_s=5.0)) == [True, True, True]
    assert verdicts(outcome_of(late, None, 2.5, arrival_s=3.0, begun_s=5.0)) == [True, None, True]
    assert verdicts(outcome_of(late, None, None, arrival_s=3.0, begun_s=5.0)) == [None, None, None]


def test_one_token_has_no_time_per_token_to_miss():
    assert verdicts(outcome_of([(1, 9.0)], 0.001, begun_s=9.0)) == [True, True, True]


def test_a_short_output_is_judged_over_all_of_it_by_slos_serve():
    assert verdicts(outcome_of([(1, 1.0), (3, 1.4)], 0.13, begun_s=1.0)) == [False, True, False]


def test_summaries_count_and_weigh():
    good = outcome_of([(1, 1.0), (4, 2.0)], 0.3, arrival_s=0.5, kind="a")
    bad = outcome_of([(1, 2.0), (9, 10.5)], 0.3, arrival_s=1.0, kind="b")
    free = outcome_of([(1, 3.0), (1, 4.0)], None, arrival_s=2.0, kind="b")
    summary = Run("s", (good, bad, free), Totals(), 0).summary()
    assert summary["seconds"] == 10.0 and summary["requests"] == 3
    assert summary["attainment"] == 0.5
    assert summary["goodput"] == 0.5 and summary["throughput"] == 1.7
    assert summary["ttft_s"] == pytest.approx((0.5 + 1.0 + 1.0) / 3)
    assert summary["tpot_ms"] == pytest.approx(1e3 * (0.25 + 8.5 / 9 + 1.0) / 3)
    assert summary["kinds"]["a"]["attainment"] == 1.0 and summary["kinds"]["b"]["attainment"] == 0.0
    none = Run("s", (free,), Totals(), 0).summary()
    assert none["attainment"] is None and none["goodput"] == 0.0


def test_every_request_of_every_run_is_a_line_of_csv(tmp_path):
    own = outcome_of([(1, 1.0), (1, 2.0)], 0.3, kind='a, "b"')
    runs = [("1/s", Run("x", (own, own), Totals(), 0)), ("2/s", Run("y", (own,), Totals(), 0))]
    write_requests(runs, METRICS["adaserve"], tmp_path / "r.csv")
    with (tmp_path / "r.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["load"], row["system"]) for row in rows] == [
        ("1/s", "x"),
        ("1/s", "x"),
        ("2/s", "y"),
    ]
    assert {row["attained"] for row in rows} == {str(METRICS["adaserve"](own))}
    assert {row["kind"] for row in rows} == {'a, "b"'} and rows[0]["finish_s"] == "2.0"


@pytest.mark.parametrize("system", SYSTEMS)
def test_known_systems_are_sound_and_take_settings(system):
    assert config_of(system) == config_of(f"  {system} {{}}")
    changed = config_of(f'{system} {{"max_depth": 5}}')
    assert changed == config_of(system).model_copy(update={"max_depth": 5})


def test_settings_alone_are_a_system():
    assert config_of('{"policy": "none"}').policy == "none"
