"""Rows of one call: ``auto`` spends its budget on those that end last."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hf_slospec.assembly import Parts, static_engine
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.engine.protocols import Policy
from hf_slospec.engine.request import Request, RequestParams
from hf_slospec.lab.hardware import Hardware, lines
from hf_slospec.lab.models import SimulatedDrafter, SimulatedTarget, VirtualClock
from hf_slospec.lab.texts import Library, Text, TextModel
from hf_slospec.policies.auto import AutoPolicy, SpeculationHistory

LENGTH = 96
CHEAP, DEAR = (Hardware(lines((9.0, 0.03)), lines((level_ms, 0.004))) for level_ms in (1.6, 6.0))


def run(texts: list[Text], hardware: Hardware, policy: Policy) -> tuple[float, list[StepEvent]]:
    """Return the seconds of a call, and its steps."""
    clock, library = VirtualClock(), Library(texts)
    target, drafter = SimulatedTarget(library, hardware, clock), SimulatedDrafter(library, hardware, clock)
    requests = [Request(index, RequestParams([1] * 8, LENGTH)) for index in range(len(texts))]
    engine = static_engine(SLOSpecConfig(), Parts(target, drafter, policy, hardware.costs(), clock), requests)
    events = []
    while engine.scheduler.running:
        events.append(engine.step())
    return clock.now_s, events


class Even(AutoPolicy):
    """``auto`` as if the rows were requests of their own."""

    ends_together = property(lambda self: False, lambda self, value: None)  # type: ignore[assignment]


def calls(kind: type[AutoPolicy], hardware: Hardware, acceptances: Sequence[float]) -> tuple[float, list[float]]:
    """Return seconds of calls that learn from each other, and the mean nodes of each row while all decode."""
    config, rng = SLOSpecConfig(), np.random.default_rng(1)
    history, total_s, nodes = SpeculationHistory(config), 0.0, list[list[int]]()
    for _ in range(12):
        texts = [TextModel(acceptance, np.inf).write(rng, LENGTH) for acceptance in acceptances]
        seconds, events = run(texts, hardware, kind(config, hardware.costs(), history))
        total_s += seconds
        whole = [event for event in events if event.num_decoding == len(acceptances)]
        nodes += [[part.nodes for part in event.requests] for event in whole]
    return total_s, np.mean(nodes, axis=0).tolist()


def test_calls_end_sooner_as_the_slowest_row_gets_most_nodes() -> None:
    rows = 0.9, 0.9, 0.9, 0.4
    even_s, (*others, last) = calls(Even, CHEAP, rows)
    assert max(others) > 0.8 * last
    sooner_s, (*others, last) = calls(AutoPolicy, CHEAP, rows)
    assert max(others) < 0.5 * last
    assert sooner_s < 0.95 * even_s


def test_drafts_that_only_other_rows_gain_by_do_not_delay_the_last_one() -> None:
    rows = 0.9, 0.9, 0.9, 0.2
    plain_s = 12 * LENGTH * float(DEAR.target(len(rows), len(rows), 0))
    assert calls(AutoPolicy, DEAR, rows)[0] < plain_s < calls(Even, DEAR, rows)[0]
