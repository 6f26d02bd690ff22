"""Latency of a policy's planning and selection by number of requests, without models.

    python benchmarks/selection.py [--policies NAME ...] [--json benchmarks/results/selection.json]

Every request has a candidate tree of 24 nodes (beam width 3, depth 8), so 64 requests have about
1,500 candidates. For policies that verify chains it has a chain of 8. CPU time of the thread counts,
and the quietest run of successive steps, so that other processes add little; such a run contains
what is done only every few steps.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import fmean

import numpy as np

from hf_slospec.cli.benchmark import provenance
from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.engine.interfaces import Policy
from hf_slospec.engine.latency_curves import ForwardCost, LatencyCurve
from hf_slospec.policies import new_policy
from hf_slospec.policies.auto import SpeculationHistory
from hf_slospec.policies.registry import all_policies
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.tree.tree import TokenTree

DEPTH = 8
WIDTH = 3
REPEATS = 240
WARMUP = 48  # steps
RUN = 32  # successive steps
COUNTS = (1, 8, 64, 256, 1024)
CHAINS = ("smartspec", "smartspec-requests", "smartspec-confidence", "turbospec", "slos-serve")
VERIFY = ForwardCost(LatencyCurve((1, 64, 512, 2048), (0.02, 0.024, 0.06, 0.2)), 1e-5, 1e-8)
DRAFT = ForwardCost(LatencyCurve((1, 64, 512, 3072), (0.001, 0.0012, 0.002, 0.01)))


def candidate_tree(rng: np.random.Generator) -> TokenTree:
    """Return a random candidate tree with decreasing path probabilities."""
    parents = [-1]
    probs = [1.0]
    layer = [0]
    for _ in range(DEPTH):
        children = [
            (parent, probs[parent] * float(rng.beta(4, 2))) for parent in rng.choice(layer, WIDTH)
        ]
        layer = []
        for parent, prob in sorted(children, key=lambda child: -child[1]):
            layer.append(len(parents))
            parents.append(int(parent))
            probs.append(prob)
    depths = [0, *np.repeat(np.arange(1, DEPTH + 1), WIDTH)]
    return TokenTree(
        rng.integers(0, 1000, len(parents)), np.array(parents), np.array(depths), np.array(probs)
    )


def times_ms(policy: Policy, num_requests: int, is_chain: bool) -> dict[str, float]:
    """Return the milliseconds of each method of a policy, in the mean over the quietest steps."""
    rng = np.random.default_rng(0)
    requests = [
        Request(i, RequestParams([1] * 300, 500, (Stage(0.02 if i % 2 else None),)))
        for i in range(num_requests)
    ]
    for request in requests:
        request.emit(1)
        request.record_step(0, 0, 1.0, PhaseTimes(), 0.0)
        request.kv.num_draft_seen = len(request.tokens)
    trees = [
        TokenTree.chain(1, [2] * DEPTH, 0.7) if is_chain else candidate_tree(rng) for _ in requests
    ]
    spent: dict[str, list[float]] = {"plan": [], "select": [], "observe": []}
    for repeat in range(WARMUP + REPEATS):
        laps = [time.thread_time()]
        plan = policy.plan(requests, 0.01 * repeat)
        laps.append(time.thread_time())
        selection = policy.select(requests, trees, plan)
        laps.append(time.thread_time())
        accepted = [[1] if tree.num_nodes > 1 else [] for tree in selection.trees]
        between_s = time.thread_time() - laps[-1]
        policy.observe(requests, accepted, PhaseTimes(0.01, 0.0, 0.02), plan)
        laps.append(time.thread_time() - between_s)
        for name, begun_s, ended_s in zip(spent, laps, laps[1:], strict=False):
            spent[name].append(1e3 * (ended_s - begun_s))
    totals = [sum(laps) for laps in zip(*spent.values(), strict=True)]
    first = min(range(WARMUP, WARMUP + REPEATS - RUN), key=lambda i: sum(totals[i : i + RUN]))
    return {name: round(fmean(values[first : first + RUN]), 4) for name, values in spent.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--policies", nargs="+", choices=list(all_policies()), default=["auto", "adaserve"]
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {}
    for count in COUNTS:
        config = SLOSpecConfig(
            token_budget=max(4 * count, 64), draft_budget=WIDTH * count, max_depth=DEPTH
        )
        for name in arguments.policies:
            policy = new_policy(
                config.model_copy(update={"policy": name}),
                StepCosts(VERIFY, DRAFT),
                SpeculationHistory(config),
            )
            spent = times_ms(policy, count, name in CHAINS)
            results[f"{name}, {count} requests"] = spent
            print(
                f"{name:>20} {count:>5} requests  "
                + "  ".join(f"{k} {v:7.3f} ms" for k, v in spent.items())
            )
    if arguments.json:
        record = {
            "provenance": provenance(),
            "candidates_per_request": DEPTH * WIDTH,
            "ms": results,
        }
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
