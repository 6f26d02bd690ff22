"""Selection of the candidate nodes whose verification yields the highest value per second of the
step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_slospec.tree.tree import BoolArray, FloatArray, Forest, IntArray

StepTime = Callable[[IntArray], FloatArray]  # number of verified nodes -> predicted seconds


def best_ratio_nodes(
    forest: Forest,
    values: FloatArray,
    budget: int,
    step_time_s: StepTime,
    mixed_time_s: StepTime | None = None,
) -> BoolArray:
    """Select the nodes with the highest value per second of the step (goodput, weighted by
    request).

    In descending order of value, every prefix is a set of connected trees, so the best set of each
    size is a prefix; the prefix with the best ratio of value to step time is selected. In a step
    with prefill, the time of the prefill tokens is spent in any case and would make every node look
    cheap. There, nodes are selected as long as they yield as much per second as the best ratio
    without prefill.

    Args:
        forest: candidate trees, one per request.
        values: [num_nodes] f64, the request's weight times the path probability; the value of a
            root is the weight.
        budget: maximum number of verified nodes, roots included; roots are always verified.
        step_time_s: predicted seconds of a whole step, drafting included and prefill excluded, by
            its number of verified nodes.
        mixed_time_s: the same with the step's prefill tokens; None: the step has no prefill.

    Returns:
        [num_nodes] bool, True for selected nodes and roots.
    """
    is_taken: BoolArray = forest.depths == 0
    num_roots = len(forest.trees)
    if num_roots == len(is_taken):  # no drafts, as in about half of the steps of prompt lookup
        return is_taken
    ranked = forest.canonical(values)[: max(budget - num_roots, 0)]
    total = np.cumsum(np.concatenate(([values[is_taken].sum()], values[ranked])))
    num_nodes = num_roots + np.arange(len(total))
    ratio = total / step_time_s(num_nodes)
    worth = ratio if mixed_time_s is None else total - ratio.max() * mixed_time_s(num_nodes)
    is_taken[ranked[: int(np.argmax(worth))]] = True
    return is_taken
