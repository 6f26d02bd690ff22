"""The cost model: seconds of a step, from a profile that every measured step corrects."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from hf_slospec.engine.events import PhaseTimes, StepEvent
from hf_slospec.engine.first_tokens import FirstTokens
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.tree.tree import FloatArray, IntArray, TokenTree

Count = IntArray | FloatArray | float
Seconds = TypeVar("Seconds", float, FloatArray)
OnReplaced = Callable[[ForwardCost, ForwardCost], None]  # the profiled cost, and its replacement

WEIGHT = 0.1  # weight of one step in the averages over recent steps
VARIANCE_WEIGHT = 0.02  # weight of one step in averages that describe how steps vary
ARRIVAL_MEMORY = 100.0  # steps over which the arrival of prompts is averaged
ARRIVAL_PRIOR = 16.0  # initial weight, in steps, of the prior that no prompts arrive
MAX_CATCH_UP = (
    64  # tokens per request; drafters spread more over several steps, so such a step is not typical
)
FAR, PATIENCE = (
    math.log(1.5),
    64,
)  # a correction that stayed this far from 1 for so many steps replaces the profile
MIN_FACTOR = 1e-3  # factor of a replaced draft cost, which must not become 0
# Relative rounding of `step_curve`, so that equal curves recur and results for them can be cached
ROUNDING = 0.05


class RecentSteps:
    """Exponential averages over the recent steps that decoded."""

    def __init__(self) -> None:
        self.tokens = 1.0  # tokens committed per request and step (acceptance length)
        self.nodes = 1.0  # nodes verified per request and step, roots included
        self.requests = 1.0  # decoding requests per step
        self.keys = 0.0  # tokens of context per request
        self.depth = 0.0  # planned draft levels
        self.draft_s = 0.0
        self.step_s = 0.0  # 0 before the first step
        self.step_variance = (
            0.25  # variance of a step's seconds over their mean; at first, that of unknown steps
        )
        self.committed = np.eye(1, 2, 1)[
            0
        ]  # probabilities of the tokens that a request commits in a step
        self.num_steps = 1  # that decoded, and one for what is assumed at first
        self._prefilled = self._elapsed_s = 0.0  # tokens and seconds of recent steps

    def observe(self, step: StepEvent) -> None:
        """Add one step to the averages; averages per request leave out steps that only prefill."""
        if self.step_s:  # prompts before the first decoding step do not tell how many arrive later
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
        self.tokens += WEIGHT * (sum(committed) / number - self.tokens)
        self.nodes += WEIGHT * (sum([request.nodes for request in decoding]) / number - self.nodes)
        self.requests += WEIGHT * (number - self.requests)
        self.keys += WEIGHT * (step.num_keys / number - self.keys)
        self.depth += WEIGHT * (step.depth - self.depth)
        self.draft_s += WEIGHT * (step.phases.draft_s - self.draft_s)
        self._observe_variation(committed, step.phases.total_s)
        self.step_s += (WEIGHT if self.step_s else 1.0) * (step.phases.total_s - self.step_s)

    def _observe_variation(self, committed: Sequence[int], step_s: float) -> None:
        self.num_steps += 1
        weight = max(VARIANCE_WEIGHT, 1.0 / self.num_steps)
        counts = np.bincount(np.maximum(committed, 1), minlength=len(self.committed)) / len(
            committed
        )
        before = np.pad(self.committed, (0, len(counts) - len(self.committed)))
        self.committed = before + weight * (counts - before)
        deviation = step_s / self.step_s - 1.0 if self.step_s else 0.0
        self.step_variance += weight * (deviation**2 - self.step_variance)

    @property
    def prefill_rate(self) -> float:
        """Return the prompt tokens per second that arrive, which the draft has to prefill as well.

        Requests arrive whether steps are fast or slow, so they are counted by time and not by
        committed tokens."""
        return self._prefilled / self._elapsed_s if self._elapsed_s else 0.0

    @property
    def acceptance(self) -> float:
        """Return the acceptance rate a at which infinitely long chains commit as much: 1 / (1 - a)
        tokens per step.
        """
        return 1.0 - 1.0 / max(self.tokens, 1.0)


class SizeCorrection:
    """Ratio of measured to profiled seconds of recent forwards, by the forward's size in powers of
    two.

    A size that was not observed lately follows the average over all sizes. Observations fade, so a
    change of the machine's speed is learned within some dozens of forwards.
    """

    MEMORY = 40.0  # observations
    TRUST = 4.0  # observations of one size that weigh as much as the average over all sizes
    LIMIT = math.log(
        4.0
    )  # largest step of one observation, in log ratio: it may contain a pause of the machine

    def __init__(self) -> None:
        self.path = ""  # on which the forwards were measured
        self._octaves = np.arange(16.0)
        self.reset()

    def reset(self) -> None:
        """Drop all observations."""
        self._logs, self._counts = (
            np.zeros(16),
            np.zeros(16),
        )  # by rounded log2(tokens): sums of log ratios, weights
        self._log_sum = self._count_sum = 0.0  # as _logs and _counts, over all sizes
        self._log_factors = np.zeros(16)

    def __call__(self, num_tokens: Count) -> FloatArray:
        """Return the factor for forwards of these sizes, interpolated between the powers of two."""
        octaves = np.log2(np.maximum(num_tokens, 1))
        return np.exp(np.interp(octaves, self._octaves, self._log_factors))

    def at(self, num_tokens: float) -> float:
        """Return the factor for forwards of one size, as a call does, but faster."""
        octave = min(math.log2(max(num_tokens, 1.0)), 15.0)
        below = self._log_factors[int(octave)]
        above = self._log_factors[math.ceil(octave)]
        return math.exp(below + (octave - int(octave)) * (above - below))

    @property
    def overall_log(self) -> float:
        """Average log ratio over all sizes; 0 before any observation."""
        return self._log_sum / self._count_sum if self._count_sum else 0.0

    def observe(self, num_tokens: int, profiled_s: float, measured_s: float) -> None:
        """Learn from one forward; ``profiled_s`` is the profile's prediction without any
        correction.
        """
        octave = min(round(math.log2(max(num_tokens, 1))), 15)
        current = float(self._log_factors[octave])
        log_ratio = min(
            max(math.log(measured_s / profiled_s), current - self.LIMIT), current + self.LIMIT
        )
        fade = 1.0 - 1.0 / self.MEMORY
        self._logs *= fade
        self._counts *= fade
        self._logs[octave] += log_ratio
        self._counts[octave] += 1.0
        self._log_sum = fade * self._log_sum + log_ratio
        self._count_sum = fade * self._count_sum + 1.0
        self._log_factors = (self._logs + self.TRUST * self.overall_log) / (
            self._counts + self.TRUST
        )


class DraftCorrection:
    """Seconds of drafting as ``constant_s + factor * profiled_s``: least squares on relative
    errors, with fading.

    The constant is what a drafting step costs whatever its depth (building trees, copies, host
    time). Both start from a prior of 0 and 1.
    """

    MEMORY = 40.0  # observations
    PRIOR = 2.0  # initial weight, in observations, of the prior factor 1
    RIDGE = 0.5  # weight, in observations, of the prior constant 0
    # Largest ratio of one observation to the current prediction: it may contain a pause of the
    # machine
    LIMIT = 4.0

    def __init__(self) -> None:
        self.constant_s = 0.0
        self.factor = 1.0
        # Sums of 1, u, u u, v, u v with u = 1 / profiled_s and v = measured_s / profiled_s, from
        # the prior on.
        self._sums = [self.PRIOR, 0.0, 0.0, self.PRIOR, 0.0]

    def __call__(self, profiled_s: FloatArray) -> FloatArray:
        """Return corrected seconds; a profiled 0 stays 0."""
        return np.where(profiled_s > 0.0, self.constant_s + self.factor * profiled_s, 0.0)

    def at(self, profiled_s: float) -> float:
        """Return the corrected seconds of one step's drafting, as a call does, but faster."""
        return self.constant_s + self.factor * profiled_s if profiled_s > 0.0 else 0.0

    def observe(self, profiled_s: float, measured_s: float) -> None:
        """Learn from one step's drafting."""
        predicted_s = self.at(profiled_s)
        measured_s = min(max(measured_s, predicted_s / self.LIMIT), predicted_s * self.LIMIT)
        u = 1.0 / profiled_s
        v = measured_s / profiled_s
        fade = 1.0 - 1.0 / self.MEMORY
        self._sums = [
            fade * old + new for old, new in zip(self._sums, (1.0, u, u * u, v, u * v), strict=True)
        ]
        count, sum_u, sum_uu, sum_v, sum_uv = self._sums
        ridged_uu = sum_uu * (1.0 + self.RIDGE / count)
        determinant = count * ridged_uu - sum_u * sum_u  # positive, as sum_u^2 <= count * sum_uu
        factor = (sum_v * ridged_uu - sum_u * sum_uv) / determinant
        constant_s = (count * sum_uv - sum_u * sum_v) / determinant
        if constant_s < 0.0 or factor < 0.0:
            factor = sum_v / count
            constant_s = 0.0
        self.factor = factor
        self.constant_s = constant_s


class StepCosts:
    """Seconds of a step's parts: draft levels, then one verify forward with everything else a step
    does.

    The costs come from a profile. The engine passes every step to :meth:`observe`, which corrects
    them; policies and schedulers read them. Once corrections have stayed far from 1, as after
    profiling on a busy machine, measured costs replace the profile. Methods that end in ``_at``
    compute the same for single numbers, faster."""

    def __init__(
        self,
        verify: ForwardCost,
        draft_level: ForwardCost,
        on_replaced: OnReplaced = lambda old, new: None,
    ):
        """Start from profiled costs.

        Args:
            verify, draft_level: the costs.
            on_replaced: called when a measured cost replaces a profiled one.
        """
        self.verify = verify
        self.draft_level = draft_level
        self.on_replaced = on_replaced
        self.recent = RecentSteps()
        self.first_tokens = FirstTokens()
        self._verify_correction = SizeCorrection()
        self._draft_correction = DraftCorrection()
        self._num_far = {
            "verify": 0,
            "draft": 0,
        }  # observations in a row with a correction far from 1

    def for_own_engine(self) -> StepCosts:
        """Return a copy with separate averages over recent steps, for one of several engines on the
        same models.
        """
        costs = copy.copy(self)
        costs.recent = RecentSteps()
        costs.first_tokens = FirstTokens()
        return costs

    def verify_s(
        self, num_tokens: Count, num_requests: Count = 1, num_keys: Count = 0
    ) -> FloatArray:
        """Return the seconds of everything in a step but drafting.

        Args:
            num_tokens: tokens of the forward: nodes verified, roots included, and prefill tokens.
            num_requests: decoding requests.
            num_keys: sum of their cached tokens.
        """
        return self.verify(num_tokens, num_requests, num_keys) * self._verify_correction(num_tokens)

    def verify_at(self, num_tokens: float, num_requests: float = 1, num_keys: float = 0) -> float:
        """Return the seconds of one step without drafting, as :meth:`verify_s` does, but faster."""
        return self.verify.at(num_tokens, num_requests, num_keys) * self._verify_correction.at(
            num_tokens
        )

    def draft_s(
        self,
        num_requests: IntArray | int,
        depth: IntArray | int,
        width: IntArray | int,
        num_keys: IntArray | int = 0,
        num_catch_up: FloatArray | float | None = None,
    ) -> FloatArray:
        """Return the seconds of drafting; counts, depths and widths may be arrays that broadcast.

        The first level forwards the committed tokens that the draft has not processed yet, each
        further level a beam of every request.

        Args:
            num_catch_up: tokens of the first level; None: as many as recent steps committed.
        """
        catch_up: Any = num_requests * self.recent.tokens if num_catch_up is None else num_catch_up
        depths = np.asarray(depth)
        widths = np.asarray(width)
        profiled_s = _levels_s(self.draft_level, num_requests, depths, widths, num_keys, catch_up)
        return self._draft_correction(np.where(depths > 0, profiled_s, 0.0))

    def draft_at(
        self,
        num_requests: int,
        depth: int,
        width: int,
        num_keys: int,
        num_catch_up: float,
        level_share: float = 1.0,
    ) -> float:
        """Return the seconds of one step's drafting, as :meth:`draft_s` does, but faster.

        ``level_share`` is the mean share of the requests that levels after the first draft for.
        """
        sizes = num_requests, depth, width, num_keys, num_catch_up
        return self._draft_correction.at(self._profiled_draft_at(*sizes, level_share))

    def steady_draft_s(
        self,
        num_requests: int,
        depth: IntArray,
        width: IntArray,
        num_keys: int,
        num_committed: FloatArray,
        verify_s: FloatArray,
        prompt_len: float,
    ) -> FloatArray:
        """Return the mean seconds of drafting in steps that commit ``num_committed`` tokens, while
        prompts arrive.

        The draft processes a prompt as a whole, in the first step in which it drafts for the
        request.

        Args:
            num_committed: tokens of all requests.
            verify_s: seconds of everything else in such steps.
            prompt_len: mean tokens of a prompt.
        """
        without_s = self.draft_s(num_requests, depth, width, num_keys, num_committed)
        if not (rate := self.recent.prefill_rate):
            return without_s
        arriving = rate * (without_s + verify_s) / prompt_len  # prompts per step
        num_catch_up = num_committed + np.maximum(arriving, 1.0) * prompt_len
        with_s = self.draft_s(num_requests, depth, width, num_keys, num_catch_up)
        seconds: FloatArray = without_s + np.minimum(arriving, 1.0) * (with_s - without_s)
        return seconds

    def level_s(self, num_requests: float, width: int, num_keys: float = 0) -> float:
        """Return the seconds of one more draft level."""
        return self._draft_correction.factor * self.draft_level.at(
            num_requests * width, num_requests, num_keys
        )

    def level_parts_s(self, num_requests: int, width: int, num_keys: int) -> tuple[float, float]:
        """Return the seconds of one more draft level in two parts: for up to so many requests, and
        for each of them.
        """
        whole_s, half_s = (
            self.level_s(share * num_requests, width, share * num_keys) for share in (1.0, 0.5)
        )
        request_s = min(2.0 * (whole_s - half_s), whole_s) / num_requests
        return whole_s - num_requests * request_s, request_s

    def step_s(
        self, num_decoding: IntArray | int, num_prefill_tokens: IntArray | int = 0
    ) -> FloatArray:
        """Return the seconds of a step whose requests draft and verify as much as they did
        recently.
        """
        num_tokens = num_decoding * self.recent.nodes + num_prefill_tokens
        draft_s = np.where(np.asarray(num_decoding) > 0, self.recent.draft_s, 0.0)
        num_requests = np.maximum(num_decoding, 1)
        num_keys = num_decoding * self.recent.keys
        seconds: FloatArray = (
            self.verify_s(np.asarray(num_tokens), num_requests, np.asarray(num_keys)) + draft_s
        )
        return seconds

    def step_at(self, num_decoding: int, num_prefill_tokens: int = 0) -> float:
        """Return the seconds of one step, as :meth:`step_s` does, but faster."""
        num_tokens, num_keys = (
            num_decoding * self.recent.nodes + num_prefill_tokens,
            num_decoding * self.recent.keys,
        )
        draft_s = self.recent.draft_s if num_decoding else 0.0
        return self.verify_at(num_tokens, max(num_decoding, 1), num_keys) + draft_s

    def step_curve(self, max_tokens: int) -> LatencyCurve:
        """Return the seconds of steps by tokens, drafting excluded, at the recent number of
        requests and keys.
        """
        profiled = (tokens for tokens in self.verify.curve.num_tokens if tokens < max_tokens)
        sizes = sorted(
            {*profiled, *(2**power for power in range(max_tokens.bit_length())), max_tokens}
        )
        recent = self.recent
        seconds = self.verify_s(np.array(sizes), recent.requests, recent.requests * recent.keys)
        return LatencyCurve(
            tuple(sizes), tuple(map(rounded, np.maximum.accumulate(seconds).tolist()))
        )

    def predicted(self, step: StepEvent) -> PhaseTimes:
        """Return the predicted seconds of a step of this size, everything but drafting as
        ``verify_s``.
        """
        sizes = (
            step.num_drafted_for,
            step.draft_levels,
            step.width,
            step.num_keys,
            step.num_catch_up,
            step.level_share,
        )
        verify_s = self.verify_at(step.num_tokens, max(step.num_decoding, 1), step.num_keys)
        return PhaseTimes(
            draft_s=self.draft_at(*sizes) if step.num_drafted_for else 0.0, verify_s=verify_s
        )

    def follow(self, path: str) -> None:
        """Drop the correction of forwards if they are computed in another way now; the next step
        sets it anew.

        All copies for engines on the same models follow.
        """
        correction = self._verify_correction
        if correction.path and correction.path != path:
            correction.reset()
        correction.path = path

    def observe(self, step: StepEvent, is_typical: bool = True) -> None:
        """Learn from a step of the engine; an untypical one says nothing about the time of later
        ones.
        """
        self.recent.observe(step)
        if not step.num_tokens or not is_typical:
            return
        self._observe_verify(step)
        if step.num_drafted_for and step.num_catch_up <= MAX_CATCH_UP * step.num_drafted_for:
            self._observe_draft(step)

    def _observe_verify(self, step: StepEvent) -> None:
        num_tokens = step.num_tokens
        profiled_s = self.verify.at(num_tokens, max(step.num_decoding, 1), step.num_keys)
        measured_s = step.phases.total_s - step.phases.draft_s
        if profiled_s > 0.0 and measured_s > 0.0:
            self._verify_correction.observe(num_tokens, profiled_s, measured_s)
            self._replace_wrong("verify", self._verify_correction.overall_log)

    def _observe_draft(self, step: StepEvent) -> None:
        profiled_s = self._profiled_draft_at(
            step.num_drafted_for,
            step.draft_levels,
            step.width,
            step.num_keys,
            step.num_catch_up,
            step.level_share,
        )
        if profiled_s > 0.0 and step.phases.draft_s > 0.0:
            self._draft_correction.observe(profiled_s, step.phases.draft_s)
            ratio = self._draft_correction.at(profiled_s) / profiled_s
            logs = (
                math.log(max(factor, MIN_FACTOR))
                for factor in (self._draft_correction.factor, ratio)
            )
            self._replace_wrong(
                "draft", min(logs, key=abs)
            )  # the profile does not contain constant costs of drafting

    def _profiled_draft_at(
        self,
        num_requests: int,
        depth: int,
        width: int,
        num_keys: int,
        num_catch_up: float,
        level_share: float,
    ) -> float:
        if not depth:
            return 0.0
        return _levels_s(
            self.draft_level.at, num_requests, depth, width, num_keys, num_catch_up, level_share
        )

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
            self._verify_correction = SizeCorrection()
        else:
            old = self.draft_level
            factor, constant_s = (
                max(self._draft_correction.factor, MIN_FACTOR),
                self._draft_correction.constant_s,
            )
            self.draft_level = cost = old.scaled([factor] * len(old.curve.num_tokens), factor)
            self._draft_correction = DraftCorrection()
            self._draft_correction.constant_s = constant_s
        self.on_replaced(old, cost)


def _levels_s(
    cost: Callable[..., Seconds],
    num_requests: Any,
    depth: Any,
    width: Any,
    num_keys: Any,
    num_catch_up: Count,
    level_share: float = 1.0,
) -> Seconds:
    """Return the profiled seconds of ``depth`` draft levels, at least one; ``cost`` takes arrays or
    numbers.

    Levels after the first draft for ``level_share`` of the requests on average.
    """
    first_s = cost(num_catch_up, num_requests, num_keys)
    share = level_share
    level_s = cost(share * num_requests * width, share * num_requests, share * num_keys)
    seconds: Seconds = first_s + level_s * (depth - 1)
    return seconds


def level_share(candidates: Sequence[TokenTree], num_drafted_for: int) -> float:
    """Return the mean share of the requests drafted for that levels after the first draft for; 1
    without such.
    """
    levels = [tree.max_depth - 1 for tree in candidates if tree.max_depth > 1]
    return sum(levels) / (num_drafted_for * max(levels)) if levels else 1.0


def rounded(value: float) -> float:
    """Return the value rounded to a grid of steps of 5 %; 0 and inf stay."""
    return (
        math.exp(round(math.log(value) / ROUNDING) * ROUNDING) if 0.0 < value < math.inf else value
    )
