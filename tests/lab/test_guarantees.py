"""Guarantees in simulated overload: every part of the promise is kept."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.lab import HARDWARE, Load, Simulation, TextModel, jobs_of, poisson
from hf_slospec.lab.outcomes import slos_serve_attained
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.workload import Kind, Length

KIND = Kind(
    "coding", 1.0, Length(150, 60, 1000), Length(100, 40, 256, 11), tpot_slo_s=0.08, ttft_slo_s=1.0
)


@pytest.mark.parametrize("seed", [0, 1])
def test_guaranteed_requests_keep_ttft_and_windows_in_overload(seed):
    rng = np.random.default_rng(seed)
    hardware = HARDWARE["llama-70b-4xa100"]
    jobs = jobs_of(
        (KIND,),
        poisson(rng, 20.0, 200),
        rng,
        lambda tokens: float(hardware.target(tokens, 1, tokens)),
    )
    load = Load.of("overload", jobs, TextModel(0.84, 12.0), rng)
    config = config_of("auto").model_copy(update={"max_batch": 256})
    outcomes = Simulation(load.jobs, load.library, hardware, config, seed=seed).run().outcomes
    guaranteed = [outcome for outcome in outcomes if outcome.guaranteed]
    assert 50 <= len(guaranteed) < len(outcomes)
    assert sum(bool(slos_serve_attained(outcome)) for outcome in guaranteed) >= 0.95 * len(
        guaranteed
    )
    assert all(outcome.window_guarantee == 0.95 for outcome in guaranteed)
