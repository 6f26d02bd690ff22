"""Calls that are planned by counted costs and computed by fixed kernels: the same steps every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.errors import UnsupportedOptionError
from hf_slospec.models.inspection.ranks import Ranks
from hf_slospec.models.linear import cpu_kernel_choice
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

CONFIG = SLOSpecConfig(deterministic=True, compile=False)


def steps(inputs: dict[str, torch.Tensor], drafter: Any) -> list[tuple[int, int, int]]:
    generator = SLOSpecGenerator(tiny_model("llama"), drafter=drafter, config=CONFIG)
    out = generator.generate(**inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    again = generator.generate(**inputs, max_new_tokens=40, do_sample=False, return_dict_in_generate=True)
    shapes = [[(step.depth, step.width, step.num_tokens) for step in run.steps] for run in (out, again)]
    assert shapes[0] == shapes[1]  # nothing that the first call taught, and no time, changes the second
    return shapes[0]


def test_steps_do_not_depend_on_times(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, drafter = ragged_prompts(3, seed=1), tiny_model("llama", noise=0.03)
    first = steps(inputs, drafter)
    clock = iter(range(10**6))
    monkeypatch.setattr(Ranks, "clock", lambda _: float(next(clock)) ** 1.5)
    assert steps(inputs, drafter) == first
    assert any(depth for depth, _, _ in first)


def test_kernels_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(*_: object) -> None:
        raise AssertionError("a kernel was timed")

    monkeypatch.setattr(cpu_kernel_choice, "_measured", timed)
    weight = torch.randn(1024, 512)
    assert cpu_kernel_choice.choose([weight], measures=False) == cpu_kernel_choice.choose([weight], measures=False)


def test_what_the_clock_steers_is_refused() -> None:
    generator = SLOSpecGenerator(tiny_model("llama"), config=CONFIG)
    inputs = ragged_prompts(1)
    with pytest.raises(UnsupportedOptionError, match="deterministic=True cannot be combined with slo_tpot"):
        generator.generate(**inputs, max_new_tokens=4, slo_tpot=0.1)
    with pytest.raises(UnsupportedOptionError, match="deterministic=True is for calls of generate"):
        generator.start()
