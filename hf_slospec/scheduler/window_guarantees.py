"""Guarantees of TTFT SLOs, and of TPOT SLOs over every window of ten tokens, with a stated
probability.

SLOs are kept by planning with a share of each: admission admits requests as if their SLOs were
shorter, and prefill beside decoding requests leaves time accordingly. Windows are kept in one of
two ways: either decoding is so fast that they are rarely missed, given how much step times,
committed tokens and requests' paces varied lately (``planned_share`` in
:mod:`hf_slospec.request.metrics`), or even plain decoding is fast enough. Shares are corrected by
which guarantees were kept and which were broken."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from hf_slospec.engine.costs import RecentSteps, rounded
from hf_slospec.request.metrics import planned_share
from hf_slospec.request.request import Request

# Shares of TPOT SLOs and of TTFT SLOs to plan with if no probability is stated; less than 1, since
# tokens per step and step times vary. In simulated loads most requests attain their SLOs with these.
MARGIN = 0.95
FIRST_MARGIN = 0.85
# a broken guarantee changes a share's logarithm by this, times the stated probability
LEARNED = 0.1
# Maximum share of a TPOT SLO to plan with; less than steps may take, as their times are not
# predicted exactly
MAX_SHARE = 0.9
FIRST = 0.0  # key of the correction for TTFT SLOs among the corrections by TPOT SLO
# Share of a correction that is forgotten in every step while no guarantee of its SLO is open
FADE = 0.01
# Initial guess of the standard deviation, over requests, of the logarithm of mean tokens per step
SPREAD = 0.2
SPREAD_WEIGHT = 0.05  # weight of one request in the running average of the square of that deviation
REVIEW = 16  # recompute the planned share at least once in this many steps


class WindowGuarantees:
    """Open guarantees of one engine, and the shares of SLOs to plan with.

    Shares are corrected as in adaptive conformal inference (Gibbs and Candes, arXiv 2106.00170): a
    broken guarantee lowers the share of the SLO that was missed as much as ``p / (1 - p)`` kept
    guarantees raise it; the rise is divided among the SLOs of the request. So in the long run a
    share ``p`` of all guarantees is kept, however wrong the model is. A kept guarantee counts only
    if another request was refused meanwhile; otherwise it was not the share that kept it.
    Corrections fade while no guarantee of their SLO is open."""

    def __init__(self, probability: float | None, recent: RecentSteps, falls_back: bool = False):
        """Begin without guarantees.

        Args:
            probability: stated probability with which guarantees are kept; None: none is stated,
                and shares are constant.
            falls_back: the policy decodes plainly if drafting would make a guaranteed request late.
        """
        self.probability = probability
        self.recent = recent
        self.falls_back = falls_back
        self.output_tokens = 100.0  # mean output tokens per request; set by the scheduler
        # time at which a guarantee was last refused; set by the scheduler
        self.refused_s = -math.inf
        # TPOT SLO in seconds, time of the guarantee
        self._open: dict[Request, tuple[float, float]] = {}
        # Corrections, which are added to the logarithm of a share: by rounded TPOT SLO, and under
        # FIRST for TTFT SLOs.
        self._corrections: defaultdict[float, float] = defaultdict(float)
        self._spread_variance = SPREAD**2
        self._planned = MARGIN  # share of TPOT SLOs to plan with, before correction
        self._review_at = 0  # value of ``recent.num_steps`` at which ``_planned`` is computed again

    def share(self, tpot_slo_s: float) -> float:
        """Return the share of a TPOT SLO to plan with."""
        if self.probability is None:
            return MARGIN
        recent = self.recent
        if recent.num_steps >= self._review_at:
            spread = math.sqrt(max(self._spread_variance, 0.0))
            variation = math.sqrt(recent.step_variance)
            self._planned = planned_share(
                self.probability, recent.committed, variation, spread, self.output_tokens
            )
            self._review_at = recent.num_steps + min(recent.num_steps // 2 + 1, REVIEW)
        return min(self._planned * math.exp(self._corrections[rounded(tpot_slo_s)]), MAX_SHARE)

    def plain_share(self, tpot_slo_s: float) -> float:
        """Return the share of a TPOT SLO within which a step of plain decoding has to end."""
        return MAX_SHARE * math.exp(min(self._corrections[rounded(tpot_slo_s)], 0.0))

    def first_share(self) -> float:
        """Return the share to plan with of the time that is left until a first token is due."""
        return FIRST_MARGIN * math.exp(min(self._corrections[FIRST], 0.0))

    def is_too_late(self, request: Request) -> bool:
        """Return whether the request can get no guarantee any more, as some of its windows began
        without one; False if no probability is stated.
        """
        stats = request.stats
        return self.probability is not None and (len(stats.commits) > 1 or stats.has_missed_window)

    def give(self, request: Request, tpot_slo_s: float, now_s: float) -> None:
        """Guarantee the SLOs of a request if a probability is stated; ``tpot_slo_s`` is the
        tightest SLO to plan its decoding with.
        """
        if self.probability is None:
            return
        has_tpot_slo = any(stage.tpot_slo_s is not None for stage in request.params.stages)
        if has_tpot_slo:
            request.window_guarantee = self.probability
        if has_tpot_slo or request.params.ttft_slo_s is not None:
            self._open[request] = tpot_slo_s, now_s

    def observe(self, now_s: float) -> None:
        """Learn from the guarantees that the latest step, which ended at ``now_s``, broke."""
        if self.probability is None:
            return
        for request in list(self._open):
            if request.stats.has_missed_window or _is_first_late(request, now_s):
                tpot_slo_s, _ = self._open.pop(request)
                key = rounded(tpot_slo_s) if request.stats.has_missed_window else FIRST
                self._corrections[key] -= LEARNED * self.probability
        is_open = {
            key
            for request, (tpot_slo_s, _) in self._open.items()
            for key in _keys(request, tpot_slo_s)
        }
        for key in self._corrections.keys() - is_open:
            self._corrections[key] *= 1.0 - FADE

    def end(self, request: Request) -> None:
        """Learn from the guarantee and the tokens per step of a request that left the engine."""
        tpot_slo_s, since_s = self._open.pop(request, (math.inf, math.inf))
        if self.probability is None or request.finish_reason not in ("stop", "length"):
            return
        if since_s <= self.refused_s:
            keys = _keys(request, tpot_slo_s)
            for key in keys:
                # A correction rises only until its share reaches the maximum, so that later broken
                # guarantees lower the share at once.
                max_correction = (
                    0.0 if key == FIRST else max(math.log(MAX_SHARE / self._planned), 0.0)
                )
                raised = self._corrections[key] + LEARNED * (1.0 - self.probability) / len(keys)
                self._corrections[key] = min(raised, max_correction)
        if num_steps := request.stats.num_steps:
            numbers = np.arange(len(self.recent.committed))
            probs = self.recent.committed
            mean = float(probs @ numbers)
            by_chance = (float(probs @ numbers**2) - mean**2) / mean**2 / num_steps
            tokens_per_step = max(
                (request.num_emitted - 1 - request.stats.num_resumed) / num_steps, 1.0
            )
            self._spread_variance += SPREAD_WEIGHT * (
                math.log(tokens_per_step / mean) ** 2 - by_chance - self._spread_variance
            )


def _keys(request: Request, tpot_slo_s: float) -> list[float]:
    """Return the keys of the corrections for the SLOs of a request."""
    return (
        [rounded(tpot_slo_s)] if request.params.ttft_slo_s is None else [rounded(tpot_slo_s), FIRST]
    )


def _is_first_late(request: Request, now_s: float) -> bool:
    ttft_slo_s = request.params.ttft_slo_s
    stats = request.stats
    if ttft_slo_s is None or stats.num_resumed:
        return False
    first_s = now_s if stats.first_token_s is None else stats.first_token_s
    return first_s > stats.arrived_s + ttft_slo_s
