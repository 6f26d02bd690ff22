"""Models that are cast beside a running batcher: requests end or fail by name, and the batcher goes
on.
"""

from __future__ import annotations

import pytest
import torch

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from tests.support.served_pair import WAIT_S, Holds, written
from tests.support.toys.tiny_models import tiny_copy, tiny_model

CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=4_000, prepack=False)
IDS = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def alone(model):
    out = model.generate(
        torch.tensor([IDS]), attention_mask=torch.ones(1, len(IDS)), max_new_tokens=8
    )
    return out[0, len(IDS) :].tolist()


def answer(generator):
    return written(generator, IDS, max_new_tokens=8)


def test_an_idle_batcher_follows_a_cast():
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        expected = answer(generator)
        assert expected == alone(model)
        model.double()
        assert answer(generator) == alone(model)
        model.to(torch.bfloat16)
        assert len(answer(generator)) == 8
        model.float()
        assert len(answer(generator)) == 8
        generator.check_running()


def test_running_requests_fail_by_name_and_later_ones_are_served():
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        with Holds() as holds:
            held = generator.submit(IDS, max_new_tokens=50, stopping_criteria=[holds])
            assert holds.is_reached.wait(WAIT_S)
            model.double()
        with pytest.raises(UnsupportedModelError, match="moved, cast"):
            held.result(WAIT_S)
        assert answer(generator) == alone(model)


def test_a_cast_that_cannot_be_served_fails_requests_and_not_the_batcher(monkeypatch):
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        batcher = generator._service.batcher
        new_engine = generator._service.batcher.new_engine
        refusal = UnsupportedModelError("not in this dtype")

        def refused():
            raise refusal

        batcher.new_engine = refused
        model.double()
        with pytest.raises(UnsupportedModelError, match="not in this dtype"):
            answer(generator)
        batcher.new_engine = new_engine
        assert answer(generator) == alone(model)


def test_submit_under_autocast_is_refused_by_name():
    with SLOSpecGenerator(tiny_model("llama"), config=CONFIG) as generator:
        with torch.autocast("cpu"), pytest.raises(UnsupportedOptionError, match="autocast"):
            generator.submit(IDS, max_new_tokens=4)
        assert len(answer(generator)) == 8
