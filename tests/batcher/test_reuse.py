"""Requests that begin like earlier ones: less prefill, the same output."""

from __future__ import annotations

import pytest
import torch

from hf_slospec import SLOSpecGenerator, weights_changed
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from tests.support.served_pair import CONFIG, WAIT_S, answer
from tests.support.toys.models import new_costs
from tests.support.toys.tiny_models import tiny_copy


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_an_adapter_that_is_switched_off_and_on_again_meanwhile_leaves_nothing_wrong():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_copy("llama"), lora)
    base = model.get_base_model()
    for seed in range(3):
        ids = torch.randint(3, 101, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
        with SLOSpecGenerator(base, config=CONFIG) as generator:
            with model.disable_adapter():
                handle = generator.submit(ids, max_new_tokens=60, eos_token_id=None)
                next(handle.tokens())
            handle.result(WAIT_S)
            handle = generator.submit(ids, max_new_tokens=24)
            assert handle.result(WAIT_S).token_ids == answer(base, ids, max_new_tokens=24)


def wrapped(model):
    """Replace a layer's MLP, and return what puts it back."""
    layer = model.model.layers[0]
    plain = layer.mlp
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Tanh())
    return lambda: setattr(layer, "mlp", plain)


TEMPORARY = [
    lambda model: (
        model.model.layers[0].register_forward_hook(lambda module, inputs, out: out + 3.0).remove
    ),
    wrapped,
]


@pytest.mark.parametrize("change", TEMPORARY)
def test_a_change_that_is_undone_while_a_request_runs_leaves_nothing_wrong(change):
    model = tiny_copy("llama")
    ids = torch.randint(3, 101, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = answer(model, ids, max_new_tokens=150, eos_token_id=None)
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        handle = generator.submit(ids, max_new_tokens=150, eos_token_id=None)
        tokens = handle.tokens()
        next(tokens)
        undo = change(model)
        for _ in range(60):
            next(tokens)
        undo()
        ids += handle.result(WAIT_S).token_ids
        assert ids[20:] != plain, "the change came too late"
        for _ in range(2):
            handle = generator.submit(ids, max_new_tokens=24)
            assert handle.result(WAIT_S).token_ids == answer(model, ids, max_new_tokens=24)


def test_told_changes_of_what_a_hook_reads_are_noticed_each_time():
    model = tiny_copy("llama")
    model.requires_grad_(False)
    scale = torch.tensor(1.0)
    model.model.layers[0].mlp.register_forward_hook(lambda module, inputs, out: out * scale)
    ids = torch.randint(3, 101, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        for value in (1.0, -4.0, 2.0):
            scale.fill_(value)
            weights_changed()
            for is_first in (True, False):
                handle = generator.submit(ids, max_new_tokens=24)
                assert handle.result(WAIT_S).token_ids == answer(model, ids, max_new_tokens=24)
                assert (handle.metrics.reused == 0) == is_first


@pytest.mark.parametrize("num_known", [0, 900])
def test_a_promise_counts_the_prefill_that_is_saved(num_known):
    limits = Limits(max_batch=4, kv_tokens=10**6, max_nodes=4, prefill_chunk=100, starvation_s=1e9)
    costs = new_costs()
    scheduler = ContinuousScheduler(limits, costs, num_reusable=lambda request: num_known)
    # Half the time that the whole prompt takes.
    half_s = 0.5 * 1000 / (100 / float(costs.step_s(0, 100)))
    request = Request(0, RequestParams([1] * 1000, 4, (Stage(100.0),), ttft_slo_s=half_s))
    scheduler.add(request)
    scheduler.enter(0.0)
    assert request.is_guaranteed == (num_known > 0)
