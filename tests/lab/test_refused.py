"""Table of simulations, loads, texts and systems that are refused: the call, and words of the error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hf_slospec.errors import InvalidInputError
from hf_slospec.lab.comparison import at_rate
from hf_slospec.lab.policies.smartspec import SmartSpecPolicy
from hf_slospec.lab.simulation import Simulation
from hf_slospec.lab.systems import config_of
from hf_slospec.lab.texts import TextModel
from hf_slospec.lab.workload import Job, arrivals, mix_of
from tests.lab.test_simulation import HARDWARE, library_of

JOB = Job(0.0, 100, 50)
FOLLOWER = Job(0.0, 210, 5, after=0, continues=True)


def simulated(*jobs, system="vllm", texts=None, **options):
    library = library_of([JOB] * (max(len(jobs), 1) if texts is None else texts))
    return lambda: Simulation(jobs, library, HARDWARE, config_of(system), **options)


def arriving(*options):
    kind, *rest = options
    return lambda: arrivals(kind, np.random.default_rng(0), *rest)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (simulated(), "no requests"),
    *((simulated(JOB, replicas=number), "replicas") for number in (0, 10**9)),
    (simulated(JOB, replace(JOB, after=1)), "request 1 follows request 1"),
    (simulated(JOB, replace(JOB, after=-1)), "request 1 follows request -1"),
    (simulated(JOB, JOB, system='vllm {"kv_tokens": 149}'), "request 0 needs 150 tokens .* has 149"),
    (simulated(JOB, replace(JOB, output_tokens=10**4)), "request 1 needs 10100 .* has 5000"),
    (simulated(replace(JOB, max_new_tokens=10**4)), "request 0 needs 10100 .* has 5000"),
    (simulated(replace(JOB, input_tokens=10**15)), "request 0 needs 10+50 "),
    (simulated(JOB, system='adaserve {"max_width": 5}'), "max_width is 5, but the texts have only 4"),
    *((simulated(replace(JOB, arrival_s=time_s)), "arrive within") for time_s in (1e300, math.nan)),
    (simulated(JOB, oracle=True, make_policy=SmartSpecPolicy), "exclude each other"),
    (simulated(JOB, JOB, texts=1), "2 requests, 1 texts"),
    *((simulated(Job(0.0, 200, 10), job), "continues another")
      for job in (FOLLOWER, Job(0.0, 400, 5, continues=True))),
    *((arriving("poisson", rate, 1), "rate") for rate in (0.0, math.nan, math.inf)),
    (arriving("on-off", 1e-300, 1), "1e-300"),  # or it would never end
    *((arriving("poisson", 1.0, number), "number of requests") for number in (0, 10**12)),
    *((arriving("gamma", 1.0, 1, value), "variation") for value in (0.0, 1e-300, 1e200, math.nan)),
    (arriving("weekly", 1.0, 1), "known are: poisson, gamma, on-off"),
    (lambda: mix_of("chat"), "chatbot"),
    (lambda: at_rate([JOB, JOB], 2.0), "at the same time"),
    *((lambda rate=rate: at_rate([JOB, replace(JOB, arrival_s=1.0)], rate), "rate")
      for rate in (0.0, math.nan, -1.0)),
    *((lambda fields={name: value}: TextModel(**fields), name)
      for name in ("acceptance", "spread", "evenness", "sharpness", "sibling")
      for value in (-1.0, math.nan)),
    (lambda: TextModel(num_children=0), "num_children"),
    *((lambda system=system: config_of(system), words) for system, words in {
        "vlm": "unknown system 'vlm'; known are: auto, oracle, vllm",
        "": "known are",
        "auto x": "unknown system 'auto x'",
        "x {}": "unknown system 'x'",
        "auto {": "column 7",
        'auto {"max_depth" 4}': "column 19: Expecting ':'",
        "auto {} {}": "column 9",
        'auto {"max_depht": 4}': "max_depht: Extra inputs",
        'auto {"max_depth": -1}': "max_depth: Input should be greater",
        'auto {"max_depth": NaN}': "max_depth: ",
        '{"policy": "best"}': "policy: there is no policy 'best'; choose among 'auto'",
    }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), REFUSED)
def test_refused_calls_say_what_is_wrong(call, words):
    with pytest.raises(InvalidInputError, match=words) as error:
        call()
    assert "pydantic" not in str(error.value)
