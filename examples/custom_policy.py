"""A custom policy, compared with ``auto`` and with plain decoding on the same requests in the
simulator.

    python examples/custom_policy.py

A policy chooses depth and width of the draft trees of a step and the nodes to verify. This one
speculates only for requests that are behind their TPOT SLO. Engine, scheduler and admission are the
real ones; target, draft and clock are simulated (docs/simulator.md) with published latencies of a
large model, so a minute of load takes a second or two and the results are the same in every run.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console

from hf_slospec import Plan, Request, Selection, SLOSpecConfig, TokenTree
from hf_slospec.engine.costs import StepCosts
from hf_slospec.engine.events import PhaseTimes
from hf_slospec.lab import (
    HARDWARE,
    Load,
    Simulation,
    TextModel,
    config_of,
    jobs_of,
    mix_of,
    poisson,
    table,
)


class OnlyLateRequests:
    """Drafts chains for requests that are behind their TPOT SLO; the others decode plainly.

    The engine calls ``plan``, ``select`` and ``observe`` once per step, in this order.
    """

    def __init__(self, config: SLOSpecConfig, costs: StepCosts):
        self.config = config
        self.costs = costs
        self.step_s = float(costs.verify_s(1))  # recent duration of a step

    def plan(
        self, requests: Sequence[Request], begun_s: float, num_prefill_tokens: int = 0
    ) -> Plan:
        late = [request for request in requests if self.is_late(request, begun_s)]
        # More tokens than this cannot be committed.
        longest = max((request.num_left - 1 for request in late), default=0)
        return Plan(depth=min(self.config.max_depth, longest), width=1, drafting=late)

    def select(
        self, requests: Sequence[Request], candidates: Sequence[TokenTree], plan: Plan
    ) -> Selection:
        """Verify everything; the trees of requests that were not drafted for are only a root."""
        trees = [
            tree.up_to(request.num_left - 1)
            for request, tree in zip(requests, candidates, strict=True)
        ]
        return Selection(trees, expected=[float(tree.path_probs.sum()) for tree in trees])

    def observe(
        self, requests: Sequence[Request], accepted: Sequence[Sequence[int]], phases: PhaseTimes
    ) -> None:
        self.step_s += 0.1 * (phases.total_s - self.step_s)

    def is_late(self, request: Request, now_s: float) -> bool:
        """Return whether one more token at the end of this step would be later than the SLO allows."""
        elapsed_s, emitted = request.decoded(now_s)
        return request.pace_s is not None and elapsed_s + self.step_s > request.pace_s * (
            emitted + 1
        )


def main(number: int = 60, rates: Sequence[float] = (1.0, 3.0)) -> None:
    hardware = HARDWARE["llama-70b-4xa100"]
    loads = []
    for rate in rates:
        rng = np.random.default_rng(0)
        times_s = poisson(rng, rate, number)
        jobs = jobs_of(
            mix_of("adaserve"), times_s, rng, lambda tokens: float(hardware.target(tokens))
        )
        loads.append(Load.of(f"{rate:g}/s", jobs, TextModel(), rng))

    def run(name: str, load: Load):
        if name != "only late":
            return Simulation(load.jobs, load.library, hardware, config_of(name)).run(name)
        config = SLOSpecConfig(max_depth=4, max_width=1)  # limits of its plans
        return Simulation(
            load.jobs, load.library, hardware, config, make_policy=OnlyLateRequests
        ).run(name)

    runs = {
        name: [run(name, load) for load in loads]
        for name in ("only late", "auto", "vllm-spec4", "vllm")
    }
    Console(width=120).print(table(runs, loads, "tpot"))  # complete in a narrow terminal, too


if __name__ == "__main__":
    main()
