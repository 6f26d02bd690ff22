"""Guarantees in simulated overload: every part of the promise is kept."""

from __future__ import annotations

import numpy as np
import pytest

from hf_slospec.config import SLOSpecConfig
from hf_slospec.engine.latency_curves import ForwardCost
from hf_slospec.lab import HARDWARE, Load, Simulation, TextModel, jobs_of, poisson
from hf_slospec.lab.hardware import Hardware, curve
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
    config = config_of("auto").model_copy(update={"max_batch": 256, "guarantee": 0.95})
    outcomes = Simulation(load.jobs, load.library, hardware, config, seed=seed).run().outcomes
    guaranteed = [outcome for outcome in outcomes if outcome.guaranteed]
    assert 50 <= len(guaranteed) < len(outcomes)
    assert sum(bool(slos_serve_attained(outcome)) for outcome in guaranteed) >= 0.95 * len(
        guaranteed
    )
    assert all(outcome.window_guarantee == 0.95 for outcome in guaranteed)


def test_requests_with_slos_that_are_tight_for_plain_decoding_are_guaranteed_too():
    """AdaServe's classes on a small model, whose steps take a request's time for each request: by
    default, admission attains more SLOs than service in order of arrival.
    """
    step = curve({1: 11.0, 4: 13.5, 16: 22.0, 64: 48.0, 512: 280.0, 1024: 560.0})
    target = ForwardCost(step.curve, per_request_s=1.2e-3, per_key_s=3e-6)
    hardware = Hardware(target, curve({1: 0.05, 64: 0.1}), kv_tokens=64_000)
    kinds = tuple(
        Kind(name, share, Length(prompt, 30, 1000), Length(110, 12, 128), tpot_slo_s, ttft_slo_s)
        for name, share, prompt, tpot_slo_s, ttft_slo_s in (
            ("code", 0.6, 130, 0.015, 0.6),
            ("chat", 0.2, 90, 0.021, 1.25),
            ("summary", 0.2, 750, 0.062, 3.75),
        )
    )
    attained = dict.fromkeys(("slo", "fcfs"), 0)
    for seed in range(2):
        rng = np.random.default_rng(seed)
        jobs = jobs_of(kinds, poisson(rng, 2.0, 100), rng, lambda tokens: 0.0)
        load = Load.of("", jobs, TextModel(0.55, 12.0, matched=0.45), rng)
        for admission in attained:
            config = SLOSpecConfig(admission=admission)
            outcomes = (
                Simulation(load.jobs, load.library, hardware, config, seed=seed).run().outcomes
            )
            attained[admission] += sum(bool(outcome.attained) for outcome in outcomes)
            if admission == "slo":
                guaranteed = [o for o in outcomes if o.guaranteed]
                assert sum(bool(o.attained) for o in guaranteed) >= 0.7 * len(guaranteed)
    assert attained["slo"] >= 1.25 * attained["fcfs"]
