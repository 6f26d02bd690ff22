"""Selection of the candidate nodes to verify: those with the highest value per second, of the step
or in the long run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray

StepTime = Callable[[IntArray], FloatArray]  # number of verified nodes -> predicted seconds


def best_nodes(
    forest: Forest,
    values: FloatArray,
    budget: int,
    worth: Callable[[FloatArray, IntArray], FloatArray],
) -> BoolArray:
    """Select the set of nodes with the highest worth.

    In descending order of value, every prefix is a set of connected trees, so the best set of each
    size is a prefix. Of equally worthy prefixes the smallest is selected.

    Args:
        forest: candidate trees, one per request.
        values: [num_nodes] f64, the request's weight times the path probability; the value of a
            root is the weight.
        budget: maximum number of verified nodes, roots included; roots are always verified.
        worth: maps the summed values and the numbers of nodes of sets, [num_sets] each, to their
            worth, [num_sets] f64.

    Returns:
        [num_nodes] bool, True for selected nodes and roots.
    """
    is_taken: BoolArray = forest.depths == 0
    num_roots = len(forest.trees)
    if num_roots == len(is_taken):  # no drafts, as in about half of the steps of prompt lookup
        return is_taken
    ranked = forest.canonical(values)[: max(budget - num_roots, 0)]
    total = np.concatenate(([values[is_taken].sum()], values[ranked])).cumsum()
    num_nodes = num_roots + np.arange(len(total))
    is_taken[ranked[: int(worth(total, num_nodes).argmax())]] = True
    return is_taken


def best_ratio_nodes(
    forest: Forest, values: FloatArray, budget: int, step_time_s: StepTime
) -> BoolArray:
    """Select the nodes with the highest value per second of this step; see :func:`best_nodes`.

    Args:
        step_time_s: predicted seconds of the whole step by its number of verified nodes.
    """
    return best_nodes(
        forest, values, budget, lambda total, num_nodes: total / step_time_s(num_nodes)
    )


def worthwhile_nodes(
    forest: Forest,
    values: FloatArray,
    budget: int,
    rate: float,
    step_time_s: StepTime,
    mixed_time_s: StepTime | None = None,
) -> BoolArray:
    """Select the nodes that yield at least as much per second as the time yields in the long run;
    see :func:`best_nodes`.

    This maximises the long-run value per second if ``rate`` is that value: whatever a step's
    candidates are, one more second is worth ``rate`` in the steps after it (renewal-reward theorem,
    Dinkelbach). Where no prefix of this step reaches ``rate``, the best ratio of this step takes
    its place. A rate that is overestimated would otherwise leave nothing to verify, and nothing to
    learn from.

    Args:
        rate: value per second in the long run.
        step_time_s: predicted seconds of the step, drafting included and prefill excluded, by its
            number of verified nodes.
        mixed_time_s: the same with the step's prefill tokens, of which only the growth with the
            nodes counts; None: the step has no prefill.
    """

    def worth(total: FloatArray, num_nodes: IntArray) -> FloatArray:
        step_s = step_time_s(num_nodes)
        least = min(rate, float((total / step_s).max()))
        return total - least * (step_s if mixed_time_s is None else mixed_time_s(num_nodes))

    return best_nodes(forest, values, budget, worth)
