"""Rows of one call: ``auto`` spends its budget on those that end last."""

from __future__ import annotations

import numpy as np

from hf_slospec.assembly import EngineParts, new_engine
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.events import StepEvent
from hf_slospec.lab.hardware import Hardware, lines
from hf_slospec.lab.models import SimulatedDrafter, SimulatedTarget, VirtualClock
from hf_slospec.lab.texts import Library, TextModel
from hf_slospec.policies.auto import AutoPolicy, SpeculationHistory
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage

PROMPT = [1] * 8
LENGTH = 96
CHEAP, DEAR = (Hardware(lines((9.0, 0.03)), lines((level_ms, 0.004))) for level_ms in (1.6, 6.0))


class Calls:
    """Simulated calls of ``auto`` that learn from each other; ``options`` are those of all
    requests.
    """

    def __init__(self, hardware, acceptances, seed=1, **options):
        self.hardware = hardware
        self.acceptances = acceptances
        self.options = options
        self.config = SLOSpecConfig()
        self.rng = np.random.default_rng(seed)
        self.costs, self.history = hardware.costs(), SpeculationHistory(self.config)
        self.total_s = 0.0
        self.events = list[StepEvent]()

    def run(self, lengths=None, number=12):
        """Run calls in which rows end after so many tokens, if not by the limit."""
        for _ in range(number):
            texts = [
                TextModel(acceptance, np.inf).write(self.rng, LENGTH)
                for acceptance in self.acceptances
            ]
            library = Library(texts)
            clock = VirtualClock()
            target = SimulatedTarget(library, self.hardware, clock)
            drafter = SimulatedDrafter(library, self.hardware, clock, int(self.rng.integers(100)))
            requests = [
                Request(row, self.params(None if lengths is None else lengths[row]))
                for row in range(len(texts))
            ]
            policy = AutoPolicy(self.config, self.costs, self.history)
            engine = new_engine(
                self.config,
                EngineParts(target, drafter, policy, self.costs, clock),
                requests=requests,
            )
            while engine.scheduler.running:
                self.events.append(engine.step())
            self.total_s += clock.now_s
        return self

    def params(self, length):
        """Return the parameters of a request that ends after so many tokens."""
        ends = (
            (lambda tokens: False)
            if length is None
            else (lambda tokens: len(tokens) >= len(PROMPT) + length)
        )
        return RequestParams(PROMPT, LENGTH, is_stop=ends, **self.options)  # type: ignore[arg-type]

    @property
    def nodes(self):
        """Mean nodes of each row while all decode."""
        whole = [event for event in self.events if event.num_decoding == len(self.acceptances)]
        means: list[float] = np.mean(
            [[part.nodes for part in event.requests] for event in whole], axis=0
        ).tolist()
        return means


def test_calls_end_sooner_as_the_slowest_row_gets_most_nodes():
    rows = 0.9, 0.9, 0.9, 0.4
    even = Calls(CHEAP, rows).run()
    ours = Calls(CHEAP, rows, ends_with_others=True).run()
    assert max(even.nodes[:-1]) > 0.8 * even.nodes[-1]
    assert max(ours.nodes[:-1]) < 0.8 * ours.nodes[-1]
    assert ours.total_s < 0.975 * even.total_s


def test_drafts_that_only_other_rows_gain_by_delay_the_last_one_less():
    rows = 0.9, 0.9, 0.9, 0.2
    even = Calls(DEAR, rows).run()
    ours = Calls(DEAR, rows, ends_with_others=True).run()
    assert even.total_s > 12 * LENGTH * float(
        DEAR.target(len(rows), len(rows), 0)
    )  # without drafts
    assert ours.total_s < 0.99 * even.total_s


def test_where_the_last_row_is_another_than_expected_little_is_lost():
    # the row that accepts least ends first
    rows = (0.9, 0.7, 0.7, 0.4)
    lengths = (90, 60, 25, 15)
    even, ours = (
        Calls(CHEAP, rows, **own).run(lengths, 30) for own in ({}, {"ends_with_others": True})
    )
    assert ours.total_s < 1.02 * even.total_s


def test_rows_with_targets_count_by_these():
    slo = {"stages": (Stage(1e-3),)}  # missed, so that urgencies are at work
    even, ours = (
        Calls(CHEAP, (0.9, 0.4), **slo, **own).run() for own in ({}, {"ends_with_others": True})
    )
    assert ours.nodes == even.nodes and ours.total_s == even.total_s
