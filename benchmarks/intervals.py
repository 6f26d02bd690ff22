"""Means of repeated runs with 95 % intervals, their plot, and the share of a gap that a system
closes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.comparison import COLOURS, MARKERS

Interval = dict[str, float]  # mean, low and high

Z = 1.959964  # two-sided 95 % quantile of the normal distribution
T = (
    12.706205,
    4.302653,
    3.182446,
    2.776445,
    2.570582,
    2.446912,
    2.364624,
    2.306004,
    2.262157,
)  # by degrees of freedom


def t_quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t distribution, within 0.2 % of the exact
    value.

    Beyond the table, the expansion around the normal quantile is used (Abramowitz and Stegun,
    26.7.5)."""
    if degrees <= len(T):
        return T[degrees - 1]
    second = (5.0 * Z**5 + 16.0 * Z**3 + 3.0 * Z) / 96.0
    return Z + (Z**3 + Z) / (4.0 * degrees) + second / degrees**2


def interval_of(values: Sequence[float]) -> Interval:
    """Return the mean of runs with different seeds and its t interval, as ``mean``, ``low`` and
    ``high``.

    One run has no interval: ``low`` and ``high`` are left out.
    """
    middle = mean(values)
    if len(values) < 2:
        return {"mean": middle}
    half = t_quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return {"mean": middle, "low": middle - half, "high": middle + half}


def wilson(num_attained: int, number: int) -> Interval:
    """Return the share of requests that attained their SLOs, over all runs, and its Wilson
    interval.

    Requests are taken to be independent. Requests in the same burst are not, so the interval is
    rather too narrow."""
    if not 0 <= num_attained <= number or not number:
        raise InvalidInputError(
            f"num_attained must be within 0..number, and number at least 1, got {num_attained} of {number}"
        )
    share = num_attained / number
    weight = Z**2 / number
    middle = (share + weight / 2.0) / (1.0 + weight)
    half = Z * math.sqrt(share * (1.0 - share) / number + weight / (4.0 * number)) / (1.0 + weight)
    return {"mean": share, "low": max(middle - half, 0.0), "high": min(middle + half, 1.0)}


def share_closed(base: float, value: float, best: float) -> float | None:
    """Return the share of the gap from ``base`` to ``best`` that ``value`` closes; None if there is
    no gap.

    It is negative if the value is worse than ``base``, and above 1 if it is better than ``best``.
    """
    return (
        None
        if math.isclose(base, best, rel_tol=1e-9, abs_tol=1e-12)
        else (value - base) / (best - base)
    )


def scaled(interval: Interval, factor: float) -> Interval:
    """Return an interval in other units."""
    return {end: factor * value for end, value in interval.items()}


def draw(
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]],
    x_label: str,
    path: Path,
    title: str,
) -> None:
    """Plot figures with their intervals by rate, on axes that begin at 0.

    Args:
        panels: intervals by label of the axis, then by system, then by rate.
        title: model, machine and what the vertical lines are.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 5), layout="constrained", squeeze=False
    )
    for panel, (label, systems) in zip(axes.flat, panels.items(), strict=True):
        rates = [float(rate) for rate in next(iter(systems.values()))]
        spacing = 0.007 * (max(rates) - min(rates))  # so that intervals do not hide each other
        for index, (name, by_rate) in enumerate(systems.items()):
            is_bound, means = (
                name.endswith("bound"),
                np.array([interval["mean"] for interval in by_rate.values()]),
            )
            x = np.array(rates) + (0.0 if is_bound else spacing * (index - len(systems) / 2.0))
            ends = [
                [interval.get(end, interval["mean"]) for interval in by_rate.values()]
                for end in ("low", "high")
            ]
            panel.errorbar(
                x, means, None if is_bound else np.abs(np.array(ends) - means), label=name, capsize=2, markersize=4,
                elinewidth=1.0, color="grey" if is_bound else COLOURS[index % len(COLOURS)],
                marker="" if is_bound else MARKERS[index % len(MARKERS)], linestyle="--" if is_bound else "-",
            )  # fmt: skip
        panel.set(xlabel=x_label, ylabel=label, ylim=(0, None))
        panel.set_xticks(rates)
        panel.grid(alpha=0.3)
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
