"""Another default device of torch around a call, as for skeletons of models: outputs equal stock's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from tests.support.toys.tiny_encoder_decoders import texts, tiny_text_model
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

CONFIG = SLOSpecConfig(compile=False)
SAMPLED = dict(do_sample=True, top_k=20, temperature=0.8)


@contextlib.contextmanager
def default_of_the_thread() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(
    params=[default_of_the_thread, lambda: torch.device("meta")],
    ids=["set_default_device", "context"],
)
def on_meta(request: pytest.FixtureRequest) -> Callable[[], Any]:
    return request.param


def call_of(family: str) -> tuple[Any, dict[str, Any]]:
    if family == "Bart":
        return tiny_text_model(family), dict(texts(2), max_new_tokens=8)
    return tiny_model(family), dict(ragged_prompts(3), max_new_tokens=8)


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("family", "drafter"),
    [("llama", "self"), ("llama", "lookup+suffix"), ("mixtral", "suffix"), ("Bart", "lookup")],
)
def test_generate(family: str, drafter: str, options: dict[str, Any]) -> None:
    model, call = call_of(family)
    torch.manual_seed(0)
    expected = model.generate(**call, **options)
    draft = dict(assistant_model=model) if drafter == "self" else dict(drafter=drafter)
    with torch.device("meta"):
        generator = SLOSpecGenerator(model, config=CONFIG, **draft)
        torch.manual_seed(0)
        assert torch.equal(generator.generate(**call, **options, slo_tpot=0.1), expected)


def test_enabled_models_and_all_outputs(on_meta: Callable[[], Any]) -> None:
    model = tiny_model("llama")
    inputs = ragged_prompts(2)
    call = dict(
        inputs,
        max_new_tokens=8,
        return_dict_in_generate=True,
        output_scores=True,
        repetition_penalty=1.2,
    )
    with on_meta():
        expected = model.generate(**call)
        hf_slospec.enable(model, config=CONFIG)
        try:
            ours = model.generate(**call, slo_tpot=0.1)
        finally:
            hf_slospec.disable(model)
    assert torch.equal(ours.sequences, expected.sequences)
    torch.testing.assert_close(ours.scores, expected.scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_started_inside", [True, False])
def test_submit(on_meta: Callable[[], Any], is_started_inside: bool) -> None:
    model = tiny_model("llama")
    prompt = list(range(3, 15))
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8)[0, len(prompt) :].tolist()
    generator = SLOSpecGenerator(model, model, config=CONFIG)
    with contextlib.ExitStack() as stack:
        if is_started_inside:
            stack.enter_context(on_meta())
        stack.enter_context(generator)
        with on_meta():
            assert generator.submit(prompt, max_new_tokens=8).result(60).token_ids == expected


def test_compiled_forwards_stay_in_use(on_meta: Callable[[], Any]) -> None:
    model = tiny_model("llama")
    inputs = ragged_prompts(2)
    expected = model.generate(**inputs, max_new_tokens=8)
    generator = SLOSpecGenerator(model, config=SLOSpecConfig(compile="wait"))
    before = generator.stats().forwards
    with on_meta():
        assert torch.equal(generator.generate(**inputs, max_new_tokens=8, slo_tpot=0.1), expected)
    assert generator.stats().forwards == before


def test_callbacks_see_the_default_device_of_the_caller(on_meta: Callable[[], Any]) -> None:
    seen = set()

    def note(token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.add(torch.empty(0).device.type)
        return scores

    with on_meta():
        generator = SLOSpecGenerator(tiny_model("llama"), config=CONFIG)
        generator.generate(
            torch.arange(3, 9, device="cpu")[None], max_new_tokens=4, logits_processor=[note]
        )
    assert seen == {"meta"}
