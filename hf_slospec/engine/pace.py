"""How fast requests decode, lately, and what a step would take."""

from __future__ import annotations

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import FloatArray, IntArray
from hf_slospec.engine.events import StepEvent

FADE = 0.1  # weight of a step in running figures


class Pace:
    """Running figures of steps that decode, and step times by them."""

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self.tokens = 1.0  # committed per request and step
        self.nodes = 1.0  # verified per request and step
        self.depth = 0.0
        self.draft_s = 0.0  # of a step

    def observe(self, step: StepEvent) -> None:
        if step.is_prefill:
            return
        num_requests = len(step.requests)
        for name, value in (
            ("tokens", step.committed / num_requests),
            ("nodes", step.nodes / num_requests),
            ("depth", step.depth),
            ("draft_s", step.phases.draft_s),
        ):
            setattr(self, name, getattr(self, name) + FADE * (value - getattr(self, name)))

    def step_s(self, num_decoding: IntArray | int, num_fed: IntArray | int = 0) -> FloatArray:
        """Seconds of a step of so many decoding requests that feeds so many prefill tokens."""
        num_nodes = np.asarray(num_decoding * self.nodes + num_fed, np.float64)
        return self.costs.verify_s(num_nodes) + self.draft_s

    @property
    def acceptance(self) -> float:
        """The acceptance rate a of endless chains that commit as much: 1 / (1 - a) tokens."""
        return 1.0 - 1.0 / max(self.tokens, 1.0)
