"""Another default device of torch around a call, as for skeletons of models: outputs equal stock's."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from tests.support.stock_matrix import default_device
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

CONFIG = SLOSpecConfig(compile=False)


@pytest.fixture(
    params=[default_device, lambda: torch.device("meta")], ids=["set_default_device", "context"]
)
def on_meta(request):
    return request.param


def test_compiled_forwards_stay_in_use(on_meta):
    model = tiny_model("llama")
    inputs = ragged_prompts(2)
    expected = model.generate(**inputs, max_new_tokens=8)
    generator = SLOSpecGenerator(model, config=SLOSpecConfig(compile="wait"))
    before = generator.stats().forwards
    with on_meta():
        assert torch.equal(generator.generate(**inputs, max_new_tokens=8, slo_tpot=0.1), expected)
    assert generator.stats().forwards == before


def test_callbacks_see_the_default_device_of_the_caller(on_meta):
    seen = set()

    def note(token_ids, scores):
        seen.add(torch.empty(0).device.type)
        return scores

    with on_meta():
        generator = SLOSpecGenerator(tiny_model("llama"), config=CONFIG)
        generator.generate(
            torch.arange(3, 9, device="cpu")[None], max_new_tokens=4, logits_processor=[note]
        )
    assert seen == {"meta"}
