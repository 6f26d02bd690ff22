"""Measurement of the gain over stock ``generate`` in two factors: faster steps, and drafts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_slospec.cli.benchmark import OURS, PLAIN, WITHOUT_DRAFTS, Bench, Sample

# Ratio of stock's longest and shortest time from which other processes are blamed: it takes the
# same time for all texts.
DISTURBED = 1.25


@dataclass(frozen=True)
class Gain:
    """Speed relative to stock ``generate`` at the same batch size, as a product of two factors."""

    batch: int
    total: float  # stock's time / ours, median over repeats
    range: tuple[float, float]  # smallest and largest total of a repeat
    steps: float  # stock's time / ours without drafts, median over repeats
    stock_tpot_s: float  # seconds per token and row, median over repeats
    tpot_s: float  # the same of ours
    tokens_per_step: float
    drafted_per_step: float  # nodes per step and row
    is_equal: bool  # all tokens are those of stock generate
    is_disturbed: bool  # other processes slowed some runs
    why_no_drafts: str | None  # None if anything was drafted

    @property
    def drafts(self) -> float:
        """Factor by drafts: time of ours without drafts / ours."""
        return 1.0 if self.why_no_drafts else self.total / self.steps

    def record(self) -> dict[str, Any]:
        """Return the values for JSON."""
        return asdict(self) | {"drafts": self.drafts}

    def __str__(self) -> str:
        low, high = self.range
        total = (
            f"batch {self.batch}: {self.total:.2f}x the speed of stock generate "
            f"({low:.2f}x to {high:.2f}x in single runs"
            + ("; other processes disturbed them)" if self.is_disturbed else ")")
        )
        by_steps = f"by {'faster' if self.steps >= 1 else 'slower'} steps"
        if self.why_no_drafts:
            return f"{total}, all of it {by_steps}; nothing was drafted: {self.why_no_drafts}"
        return (
            f"{total} = {self.steps:.2f}x {by_steps} x {self.drafts:.2f}x by drafts; "
            f"{self.tokens_per_step:.2f} tokens per step, "
            f"{self.drafted_per_step:.1f} nodes drafted per step"
        )


def measure_gain(
    bench: Bench, batch: int, repeats: int = 3, show: Callable[[str], None] = lambda text: None
) -> Gain:
    """Return the gain at a batch size, after a warm-up, while no compiler of this package runs.

    Stock ``generate``, ours without drafts and ours take turns, so that the machine's other load
    affects all alike.

    Args:
        bench: models, prompts and config.
        batch: rows of a call.
        repeats: timed calls of each method.
        show: called with what is being done.
    """
    return gain_of(bench, bench.run(bench.gain_methods(batch), repeats, show), batch)


def gain_of(bench: Bench, samples: dict[tuple[str, int], list[Sample]], batch: int) -> Gain:
    """Return the gain at a batch size by the samples of :meth:`Bench.run`."""
    stock, without, ours = (samples[name, batch] for name in (PLAIN, WITHOUT_DRAFTS, OURS))
    rows = [row for sample in ours for row in sample.slo]
    num_steps = sum(row.steps for row in rows) or 1
    num_drafted = sum(row.drafted for row in rows)
    totals = _ratios(stock, ours)
    # Without drafts both run the same steps, so both tell how fast these are.
    plain = without if num_drafted else [*without, *ours]
    steps = statistics.median(_ratios([*stock, *stock][: len(plain)], plain))
    stock_s = [sample.seconds for sample in stock]
    return Gain(
        batch=batch,
        total=statistics.median(totals) if num_drafted else steps,
        range=(min(totals), max(totals)),
        steps=steps,
        stock_tpot_s=statistics.median(stock_s) / bench.new_tokens,
        tpot_s=statistics.median(sample.seconds for sample in ours) / bench.new_tokens,
        tokens_per_step=sum(row.tokens - 1 for row in rows) / num_steps,
        drafted_per_step=num_drafted / num_steps,
        is_equal=all(
            torch.equal(a.sequences, b.sequences) for a, b in zip(stock, ours, strict=True)
        ),
        is_disturbed=max(stock_s) > DISTURBED * min(stock_s),
        why_no_drafts=None if num_drafted else _why_no_drafts(bench, ours, batch),
    )


def _ratios(slow: Sequence[Sample], fast: Sequence[Sample]) -> list[float]:
    return [a.seconds / b.seconds for a, b in zip(slow, fast, strict=True)]


def _why_no_drafts(bench: Bench, ours: Sequence[Sample], batch: int) -> str:
    """Return why our runs drafted nothing, with the predicted times that led to it."""
    policy = bench.config.policy
    if policy == "none":
        return "the policy is none"
    if not any(step.depth for sample in ours for step in sample.steps):
        costs = bench.generator.decoder.speculator.costs
        few_ms = 1e3 * costs.verify_s(batch, batch)
        many_ms = 1e3 * costs.verify_s(2 * batch, batch)
        return (
            f"the policy {policy} predicts that drafts do not pay on this machine, where a step of "
            f"{batch} tokens takes {few_ms:.1f} ms, of {2 * batch} tokens {many_ms:.1f} ms, and "
            f"drafting one level {1e3 * costs.draft_s(batch, 1, 1):.1f} ms"
        )
    return f"{bench.method.kind} found nothing to propose"
