"""How fast requests decode, lately, and what a step would take, whatever the policy."""

from __future__ import annotations

import math

import numpy as np

from hf_slospec.algo.latency import StepCosts
from hf_slospec.algo.tree import FloatArray, IntArray
from hf_slospec.engine.events import StepEvent

FADE = 0.1  # weight of a step in running figures
MAX_ERROR = 1.0  # log of the ratio by which one step may be off, as far as it counts: it may have met a pause


class Pace:
    """Running figures of steps that decode, and step times by them."""

    def __init__(self, costs: StepCosts):
        self.costs = costs
        self.tokens = 1.0  # committed per request and step
        self.nodes = 1.0  # verified per request and step
        self.depth = 0.0
        self.draft_s = 0.0  # of a step
        self._log_factor = 0.0  # of steps: measured over predicted

    def observe(self, step: StepEvent) -> None:
        nodes = sum(request.nodes for request in step.decoding)
        predicted_s = float(self._step_s(np.array(nodes), step.prefill_tokens))
        if step.phases.total_s > 0.0 and predicted_s > 0.0:
            error = math.log(step.phases.total_s / predicted_s) - self._log_factor
            self._log_factor += FADE * max(min(error, MAX_ERROR), -MAX_ERROR)
        if step.num_decoding:
            tokens = sum(request.committed for request in step.decoding)
            self.tokens += FADE * (tokens / step.num_decoding - self.tokens)
            self.nodes += FADE * (nodes / step.num_decoding - self.nodes)
            self.depth += FADE * (step.depth - self.depth)
            self.draft_s += FADE * (step.phases.draft_s - self.draft_s)

    def step_s(self, num_decoding: IntArray | int, num_prefill_tokens: IntArray | int = 0) -> FloatArray:
        """Seconds of a step of so many decoding requests that feeds so many prefill tokens."""
        return self._step_s(np.asarray(num_decoding * self.nodes), num_prefill_tokens) * self.factor

    @property
    def factor(self) -> float:
        """Times as long as the profile says that steps took lately."""
        return math.exp(self._log_factor)

    def _step_s(self, num_nodes: FloatArray, num_prefill_tokens: IntArray | int) -> FloatArray:
        draft_s: FloatArray = np.where(num_nodes > 0, self.draft_s, 0.0)
        return self.costs.verify(num_nodes + num_prefill_tokens) + draft_s

    @property
    def acceptance(self) -> float:
        """The acceptance rate a of endless chains that commit as much: 1 / (1 - a) tokens."""
        return 1.0 - 1.0 / max(self.tokens, 1.0)
