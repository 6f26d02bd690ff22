"""``StepCosts``, the cost model: predicted seconds of a step, from a profile that every measured
step corrects. The curves and corrections are in ``engine/latency_curves.py``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.engine.first_tokens import FirstTokens
from hf_slospec.engine.latency_curves import (
    Count,
    DraftCorrection,
    ForwardCost,
    LatencyCurve,
    Seconds,
    SizeCorrection,
)
from hf_slospec.request.request import Request
from hf_slospec.tree.tree import FloatArray, IntArray

OnReplaced = Callable[[ForwardCost, ForwardCost], None]  # takes the old and the new cost

WEIGHT = 0.1  # weight of one step in the averages over recent steps
LASTING_WEIGHT = 0.005  # weight of one step in averages that hold for as long as a request takes
VARIANCE_WEIGHT = 0.02  # weight of one step in averages of variances and distributions
ARRIVAL_MEMORY = 100.0  # number of steps over which the prefill rate is averaged
ARRIVAL_PRIOR = 16.0  # initial weight, in steps, of the prior assumption that no prompts arrive
# Tokens per request that a drafter still has to prefill. Steps with more on average do not correct
# the draft costs, as drafters prefill longer stretches over several steps.
MAX_CATCH_UP = 64
# A measured cost replaces the profiled one if the absolute logarithm of its correction has exceeded
# FAR in PATIENCE successive steps.
FAR = math.log(1.5)
PATIENCE = 64
MIN_FACTOR = 1e-3  # least factor by which a draft cost is scaled, since a cost must not become 0
# Relative step of the grid to which `step_curve` rounds seconds, so that equal curves recur and
# results for them can be cached.
ROUNDING = 0.05
LEAST_S = 1e-6  # minimum seconds of a step in `step_curve`


class RecentSteps:
    """Exponential averages over the recent steps that had decoding requests."""

    def __init__(self) -> None:
        self.tokens = 1.0  # tokens committed per request and step (acceptance length)
        # The same over many more steps, for plans of whole requests
        self.lasting_tokens = 1.0
        self.nodes = 1.0  # nodes verified per request and step, roots included
        self.keys = 0.0  # cached tokens per request
        self.depth = 0.0  # planned draft levels
        self.draft_s = 0.0
        self.step_s = 0.0  # 0 before the first step
        # Variance of a step's seconds divided by their mean; starts with an assumed value.
        self.step_variance = 0.25
        # [max_tokens + 1] f64, probability that a step commits 0, 1, ... tokens of a request.
        self.committed = np.eye(1, 2, 1)[0]
        self.num_steps = 1  # steps that decoded; starts at 1, as the initial values count as a step
        self._prefilled = self._elapsed_s = 0.0  # fading sums of prefill tokens and of step seconds

    def observe(self, step: StepEvent) -> None:
        """Add one step to the averages. Steps that only prefill change nothing but the prefill
        rate.
        """
        # Prompts before the first decode step do not tell how many arrive later.
        if self.step_s:
            self._prefilled += step.prefill_tokens
            self._elapsed_s += step.phases.total_s
        if not (number := step.num_decoding):
            return
        if not self.step_s:
            self._elapsed_s = ARRIVAL_PRIOR * step.phases.total_s
        self._prefilled *= 1.0 - 1.0 / ARRIVAL_MEMORY
        self._elapsed_s *= 1.0 - 1.0 / ARRIVAL_MEMORY
        decoding = step.decoding
        committed = [request.committed for request in decoding]
        tokens = sum(committed) / number
        self.tokens += WEIGHT * (tokens - self.tokens)
        lasting = max(LASTING_WEIGHT, 1.0 / self.num_steps)
        self.lasting_tokens += lasting * (tokens - self.lasting_tokens)
        self.nodes += WEIGHT * (sum([request.nodes for request in decoding]) / number - self.nodes)
        self.keys += WEIGHT * (step.num_keys / number - self.keys)
        self.depth += WEIGHT * (step.depth - self.depth)
        self.draft_s += WEIGHT * (step.phases.draft_s - self.draft_s)
        self._observe_variation(committed, step.phases.total_s)
        self.step_s += (WEIGHT if self.step_s else 1.0) * (step.phases.total_s - self.step_s)

    def _observe_variation(self, committed: Sequence[int], step_s: float) -> None:
        self.num_steps += 1
        weight = max(VARIANCE_WEIGHT, 1.0 / self.num_steps)
        counts = np.bincount(np.maximum(committed, 1), minlength=len(self.committed))
        shares = counts * (weight / len(committed))
        shares[: len(self.committed)] += (1.0 - weight) * self.committed
        self.committed = shares
        deviation = step_s / self.step_s - 1.0 if self.step_s else 0.0
        self.step_variance += weight * (deviation**2 - self.step_variance)

    @property
    def prefill_rate(self) -> float:
        """Return the prompt tokens that arrive per second, which the draft model has to prefill as
        well.

        The rate is per second and not per committed token, since requests arrive at the same rate
        whether steps are fast or slow.
        """
        return self._prefilled / self._elapsed_s if self._elapsed_s else 0.0

    @property
    def acceptance(self) -> float:
        """Return the acceptance rate a at which infinitely long chains commit as many tokens per
        step as lately over many steps: 1 / (1 - a).
        """
        return 1.0 - 1.0 / max(self.lasting_tokens, 1.0)


class StepCosts:
    """Predicts the seconds of a step: of its draft levels, and of one verification forward with
    everything else in the step.

    Predictions start from a profile. The engine passes every step to :meth:`observe`, which
    corrects them; policies and schedulers read them. If corrections stay far from 1, as after
    profiling on a busy machine, measured costs replace the profile.
    """

    def __init__(
        self,
        verify: ForwardCost,
        draft_level: ForwardCost,
        on_replaced: OnReplaced = lambda old, new: None,
    ):
        """Start from profiled costs.

        Args:
            verify: cost of a verification forward and everything else but drafting.
            draft_level: cost of one draft level.
            on_replaced: called with the old and the new cost if a measured cost replaces a profiled
                one.
        """
        self.verify = verify
        self.draft_level = draft_level
        self.on_replaced = on_replaced
        self.recent = RecentSteps()
        self.first_tokens = FirstTokens()
        self._verify_correction = SizeCorrection()
        self._draft_correction = DraftCorrection()
        self._step_curves = dict[int, LatencyCurve]()  # keyed by max_tokens; cleared by observe()
        # Number of successive observations with a correction far from 1.
        self._num_far = {"verify": 0, "draft": 0}

    def for_own_engine(self) -> StepCosts:
        """Return a copy with separate averages over recent steps, for one of several engines on the
        same models. Corrections stay shared.
        """
        costs = copy.copy(self)
        costs.recent = RecentSteps()
        costs.first_tokens = FirstTokens()
        costs._step_curves = {}
        return costs

    def keep_sizes(self) -> None:
        """Keep what is measured of forwards of one size while others are computed; see
        :class:`~hf_slospec.engine.latency_curves.SizeCorrection`. This applies to all copies for
        engines on the same models.
        """
        self._verify_correction.keeps_sizes = True

    def verify_s(self, num_tokens: Count, num_requests: Count = 1, num_keys: Count = 0) -> Seconds:
        """Return the seconds of a step, drafting excluded.

        Args:
            num_tokens: tokens of the forward: verified nodes, roots included, and prefill tokens.
            num_requests: number of decoding requests.
            num_keys: cached tokens of these requests together.
        """
        return self.verify(num_tokens, num_requests, num_keys) * self._verify_correction(num_tokens)

    def draft_s(
        self,
        num_requests: Count,
        depth: Count,
        width: Count,
        num_keys: Count = 0,
        num_catch_up: Count | None = None,
        level_share: float = 1.0,
    ) -> Seconds:
        """Return the seconds of drafting. Numbers of requests, tokens, levels and nodes may be
        arrays that broadcast.

        The first level forwards the committed tokens that the draft model has not processed yet;
        each further level forwards a beam of every request.

        Args:
            num_requests: number of requests that are drafted for.
            depth: number of draft levels.
            width: nodes per request and level.
            num_keys: cached tokens of these requests together.
            num_catch_up: tokens of the first level; None: as many as recent steps committed.
            level_share: share of the requests that levels after the first draft for, averaged over
                levels.
        """
        catch_up = num_requests * self.recent.tokens if num_catch_up is None else num_catch_up
        sizes = num_requests, depth, width, num_keys, catch_up
        return self._draft_correction(self._profiled_draft_s(*sizes, level_share))

    def _profiled_draft_s(
        self,
        num_requests: Count,
        depth: Count,
        width: Count,
        num_keys: Count,
        num_catch_up: Count,
        level_share: float,
    ) -> Seconds:
        first_s = self.draft_level(num_catch_up, num_requests, num_keys)
        share = level_share
        level_s = self.draft_level(
            share * num_requests * width, share * num_requests, share * num_keys
        )
        return (first_s + level_s * (depth - 1)) * (depth > 0)

    def shape_s(
        self, requests: Sequence[Request], depth: Count, width: Count, num_tokens: Count
    ) -> Seconds:
        """Return the seconds of a step that drafts ``depth`` levels of ``width`` nodes for all
        requests and verifies ``num_tokens`` tokens.
        """
        num_keys = sum(len(request.tokens) for request in requests)
        draft_s = self.draft_s(len(requests), depth, width, num_keys)
        return draft_s + self.verify_s(num_tokens, len(requests), num_keys)

    def steady_draft_s(
        self,
        num_requests: int,
        depth: IntArray,
        width: IntArray,
        num_keys: int,
        num_committed: FloatArray,
        verify_s: FloatArray,
        prompt_len: float,
    ) -> Seconds:
        """Return the mean seconds of drafting per step while prompts keep arriving.

        The draft model processes a prompt as a whole, in the first step in which it drafts for the
        request.

        Args:
            num_requests, depth, width, num_keys: see :meth:`draft_s`.
            num_committed: tokens that a step commits for all requests together.
            verify_s: seconds of everything else in such a step.
            prompt_len: mean number of prompt tokens.
        """
        without_s = self.draft_s(num_requests, depth, width, num_keys, num_committed)
        if not (rate := self.recent.prefill_rate):
            return without_s
        arriving = rate * (without_s + verify_s) / prompt_len  # number of prompts per step
        num_catch_up = num_committed + np.maximum(arriving, 1.0) * prompt_len
        with_s = self.draft_s(num_requests, depth, width, num_keys, num_catch_up)
        return without_s + np.minimum(arriving, 1.0) * (with_s - without_s)

    def level_s(self, num_requests: float, width: int, num_keys: float = 0) -> float:
        """Return the seconds of one more draft level."""
        level_s: float = self.draft_level(num_requests * width, num_requests, num_keys)
        return self._draft_correction.factor * level_s

    def level_parts_s(self, num_requests: int, width: int, num_keys: int) -> tuple[float, float]:
        """Split the seconds of one more draft level into a fixed part and a part per request."""
        whole_s, half_s = (
            self.level_s(share * num_requests, width, share * num_keys) for share in (1.0, 0.5)
        )
        request_s = min(2.0 * (whole_s - half_s), whole_s) / num_requests
        return whole_s - num_requests * request_s, request_s

    def step_s(self, num_decoding: Count, num_prefill_tokens: Count = 0) -> Seconds:
        """Return the seconds of a step in which every request drafts and verifies as much as in
        recent steps.
        """
        num_tokens = num_decoding * self.recent.nodes + num_prefill_tokens
        num_requests = num_decoding + (num_decoding == 0)
        draft_s = self.recent.draft_s * (num_decoding > 0)
        return self.verify_s(num_tokens, num_requests, num_decoding * self.recent.keys) + draft_s

    def step_curve(self, max_tokens: int) -> LatencyCurve:
        """Return the seconds that the tokens of a step take, as a curve in their number.

        Drafting, and :attr:`request_s` for each request, come on top. The same object is returned
        until the next step is observed.
        """
        if max_tokens not in self._step_curves:
            powers = (2**power for power in range(max_tokens.bit_length()))
            profiled = (tokens for tokens in self.verify.curve.num_tokens if tokens < max_tokens)
            sizes = sorted({*profiled, *powers, max_tokens})
            seconds = np.maximum(self.verify_s(np.array(sizes), 0), LEAST_S)
            monotone = np.maximum.accumulate(seconds).tolist()
            curve = LatencyCurve(tuple(sizes), tuple(map(rounded, monotone)))
            self._step_curves[max_tokens] = curve
        return self._step_curves[max_tokens]

    @property
    def request_s(self) -> float:
        """Seconds that each request adds to a step, whatever its tokens: those of the request, and
        of as many cached tokens as requests had in recent steps.
        """
        return rounded(float(self.verify_s(1, 1, self.recent.keys) - self.verify_s(1, 0)))

    def predicted(self, step: StepEvent) -> PhaseTimes:
        """Return the predicted seconds of a step of this size. Everything but drafting is in
        ``verify_s``.
        """
        verify_s = self.verify_s(step.num_tokens, max(step.num_decoding, 1), step.num_keys)
        draft_s = self.draft_s(*_draft_sizes(step)) if step.num_drafted_for else 0.0
        return PhaseTimes(draft_s=draft_s, verify_s=verify_s)

    def follow(self, path: str) -> None:
        """Drop the correction of verification forwards if they are computed on another path now
        (see ``Target.path``); the next steps learn it anew.

        This applies to all copies for engines on the same models.
        """
        correction = self._verify_correction
        if correction.path and correction.path != path:
            correction.reset()
            self._step_curves.clear()
        correction.path = path

    def observe(self, step: StepEvent, is_typical: bool = True) -> None:
        """Update averages and corrections from a step of the engine.

        Args:
            step: the step.
            is_typical: False if the step had one-off costs, so that its times must not change
                corrections.
        """
        self._step_curves.clear()
        self.recent.observe(step)
        if not step.num_tokens or not is_typical:
            return
        self._observe_verify(step)
        if step.num_drafted_for and step.num_catch_up <= MAX_CATCH_UP * step.num_drafted_for:
            self._observe_draft(step)

    def _observe_verify(self, step: StepEvent) -> None:
        num_tokens = step.num_tokens
        profiled_s = self.verify(num_tokens, max(step.num_decoding, 1), step.num_keys)
        measured_s = step.phases.total_s - step.phases.draft_s
        if step.prefill_tokens:  # the step also admitted requests, and copied K/V of known prompts
            measured_s -= step.phases.select_s
        if profiled_s > 0.0 and measured_s > 0.0:
            self._verify_correction.observe(num_tokens, profiled_s, measured_s)
            self._replace_wrong("verify", self._verify_correction.overall_log)

    def _observe_draft(self, step: StepEvent) -> None:
        profiled_s = self._profiled_draft_s(*_draft_sizes(step))
        if profiled_s > 0.0 and step.phases.draft_s > 0.0:
            self._draft_correction.observe(profiled_s, step.phases.draft_s)
            ratio = self._draft_correction(profiled_s) / profiled_s
            logs = (
                math.log(max(factor, MIN_FACTOR))
                for factor in (self._draft_correction.factor, ratio)
            )
            # The profile lacks the constant part of draft costs, so the factor alone and the ratio
            # with the constant may both differ from 1; only if both are far is the profile wrong.
            self._replace_wrong("draft", min(logs, key=abs))

    def _replace_wrong(self, which: Literal["verify", "draft"], log_factor: float) -> None:
        """Replace a profiled cost by the measured one if its correction has stayed far from 1."""
        self._num_far[which] = self._num_far[which] + 1 if abs(log_factor) > FAR else 0
        if self._num_far[which] < PATIENCE:
            return
        self._num_far[which] = 0
        if which == "verify":
            old = self.verify
            sizes = self.verify.curve.num_tokens
            factors = self._verify_correction(np.array(sizes)).tolist()
            self.verify = cost = old.scaled(factors, math.exp(log_factor))
            self._verify_correction = SizeCorrection(self._verify_correction.keeps_sizes)
        else:
            old = self.draft_level
            factor = max(self._draft_correction.factor, MIN_FACTOR)
            constant_s = self._draft_correction.constant_s
            self.draft_level = cost = old.scaled([factor] * len(old.curve.num_tokens), factor)
            self._draft_correction = DraftCorrection()
            self._draft_correction.constant_s = constant_s
        self.on_replaced(old, cost)


def _draft_sizes(step: StepEvent) -> tuple[int, int, int, int, int, float]:
    """Return the positional arguments of :meth:`StepCosts.draft_s` for a step."""
    return (
        step.num_drafted_for,
        step.draft_levels,
        step.width,
        step.num_keys,
        step.num_catch_up,
        step.level_share,
    )


def level_share(max_depths: Sequence[int], num_drafted_for: int) -> float:
    """Return the share of the requests that draft levels after the first drafted for, averaged over
    levels; 1 if no tree has a second level.

    Args:
        max_depths: depths of a step's candidate trees.
        num_drafted_for: number of requests that were passed to the drafter.
    """
    levels = [depth - 1 for depth in max_depths if depth > 1]
    return sum(levels) / (num_drafted_for * max(levels)) if levels else 1.0


def rounded(value: float) -> float:
    """Return a value rounded to a geometric grid with steps of about 5 %; 0 and inf stay."""
    return (
        math.exp(round(math.log(value) / ROUNDING) * ROUNDING) if 0.0 < value < math.inf else value
    )
