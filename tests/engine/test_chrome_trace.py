"""Chrome traces of steps."""

from __future__ import annotations

import json

import pytest

from hf_slospec import write_chrome_trace
from hf_slospec.engine.events import PHASES, PhaseTimes, RequestStep, StepEvent


def part(index, nodes, committed):
    return RequestStep(index, nodes, committed, 1.234, None if index else 0.05, 1.0, 3)


STEPS = [
    StepEvent(10.0, 0, 0, 1, PhaseTimes(0.0, 0.0, 0.5, 0.25), 0.0, (part(0, 1, 1), part(1, 1, 1))),
    StepEvent(
        11.0, 2, 3, 2, PhaseTimes(0.125, 0.25, 0.5, 0.0625), 0.9, (part(0, 6, 3), part(1, 2, 1))
    ),
    StepEvent(12.0, 2, 0, 1, PhaseTimes(0.0, 0.125, 0.25, 0.125), 0.5, (part(1, 1, 1),)),
]


@pytest.fixture
def events(tmp_path):
    write_chrome_trace(iter(STEPS), tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_phases_follow_each_other_and_fill_the_step(events):
    assert len(events) == len(PHASES) * len(STEPS) + 5
    assert all(event["ph"] == "X" and event["dur"] >= 0.0 for event in events)
    phases = [event for event in events if event["pid"] == "steps"]
    for number, step in enumerate(STEPS):
        own = [event for event in phases if event["args"]["step"] == number]
        assert [event["tid"] for event in own] == list(PHASES)
        begun_us = step.begun_s * 1e6
        for event in own:
            assert event["ts"] == pytest.approx(begun_us)
            assert event["dur"] == pytest.approx(getattr(step.phases, f"{event['tid']}_s") * 1e6)
            begun_us += event["dur"]
        assert begun_us == pytest.approx((step.begun_s + step.phases.total_s) * 1e6)
        assert own[0]["args"] == dict(
            step=number, depth=step.depth, width=step.width, predicted_ms=step.predicted_s * 1e3
        )
    assert [event["name"] for event in phases if event["tid"] == "verify"] == [
        "prefill",
        "verify",
        "verify",
    ]


def test_every_request_has_a_lane(events):
    lanes = {
        lane: [
            (event["name"], event["ts"], event["dur"]) for event in events if event["tid"] == lane
        ]
        for lane in ("request 0", "request 1")
    }
    assert lanes == {
        "request 0": [("+1 of 1", 10e6, 0.75e6), ("+3 of 6", 11e6, 0.9375e6)],
        "request 1": [
            ("+1 of 1", 10e6, 0.75e6),
            ("+1 of 2", 11e6, 0.9375e6),
            ("+1 of 1", 12e6, 0.5e6),
        ],
    }
    counts = [event["args"] for event in events if event["pid"] == "requests"]
    assert sum(count["committed"] for count in counts) == sum(step.committed for step in STEPS)
    assert sum(count["nodes"] for count in counts) == sum(step.nodes for step in STEPS)
