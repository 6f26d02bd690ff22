"""Requests that begin like earlier ones: less prefill, the same output."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, tiny_prompts, weights_changed
from hf_slospec.request.params import RequestParams
from hf_slospec.request.request import Request
from hf_slospec.request.slo import Stage
from hf_slospec.scheduler.continuous import ContinuousScheduler, Limits
from tests.support.breadth import quick_or
from tests.support.served_pair import CONFIG, WAIT_S, Holds, alone
from tests.support.toys.models import new_costs
from tests.support.toys.tiny_models import tiny_model

SYSTEM = "\n".join(tiny_prompts()[:3])


def alone_ids(pair: tuple[Any, ...], ids: list[int], **options: Any) -> list[int]:
    out = pair[0].generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), **options)
    return out[0, len(ids) :].tolist()


# With room for hardly more than one turn, and for all of them.
@pytest.mark.parametrize("kv_tokens", [1_400, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_every_turn_of_a_chat_gets_the_answer_it_gets_alone(
    pair: tuple[Any, Any, Any], kv_tokens: int
) -> None:
    config = CONFIG.model_copy(update={"kv_tokens": kv_tokens})
    with SLOSpecGenerator(*pair, config) as generator:
        ids = pair[2](SYSTEM)["input_ids"]
        reused = list[int]()
        for turn in range(quick_or(3, 4)):
            ids = ids + pair[2](f"\n# turn {turn}\n", add_special_tokens=False)["input_ids"]
            handle = generator.submit(ids, max_new_tokens=24)
            answer = handle.result(WAIT_S).token_ids
            assert answer == alone_ids(pair, ids, max_new_tokens=24)
            reused.append(handle.metrics.reused)
            assert (reused[-1] == 0) == (turn == 0)
            previous = len(ids) + len(answer) - 1
            ids = ids + answer
            assert generator.stats().reused_tokens == sum(reused)
        assert reused[-1] > 0.8 * previous


def test_users_of_one_system_prompt_share_it_while_they_run_and_afterwards(
    pair: tuple[Any, Any, Any],
) -> None:
    prompts = [f"{SYSTEM}\n# {name}\n" for name in ("ada", "bob", "cleo", "dan")]
    expected = [alone(pair, prompt, max_new_tokens=quick_or(16, 30)) for prompt in prompts]
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        first = generator.submit(prompts[0], max_new_tokens=quick_or(16, 30))
        next(first.tokens())
        others = [
            generator.submit(prompt, max_new_tokens=quick_or(16, 30)) for prompt in prompts[1:]
        ]
        assert [handle.result(WAIT_S).token_ids for handle in (first, *others)] == expected
        shared = len(pair[2](SYSTEM)["input_ids"])
        assert first.metrics.reused == 0
        assert all(handle.metrics.reused >= shared - 1 for handle in others)
        assert generator.submit(
            prompts[1], max_new_tokens=quick_or(16, 30), do_sample=True, seed=3
        ).result(WAIT_S).token_ids == alone(
            pair, prompts[1], 3, max_new_tokens=quick_or(16, 30), do_sample=True
        )
        stats = generator.stats()
        assert stats.kept_tokens > shared and stats.kv_tokens == 0
        sample = {
            s.name: s.value for family in generator.collector().collect() for s in family.samples
        }
        assert (
            sample["hf_slospec:prefix_cache_hits_total"] == stats.reused_tokens > 3 * (shared - 1)
        )


def test_salts_and_the_setting_keep_texts_apart(pair: tuple[Any, Any, Any]) -> None:
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        reused = []
        for salt in ("", "a", "b", "a", ""):
            handle = generator.submit(SYSTEM, max_new_tokens=4, cache_salt=salt)
            handle.result(WAIT_S)
            reused.append(handle.metrics.reused > 0)
        assert reused == [False, False, False, True, True]
    with SLOSpecGenerator(*pair, CONFIG.model_copy(update={"kept_tokens": 0})) as generator:
        for _ in range(2):
            handle = generator.submit(SYSTEM, max_new_tokens=4)
            handle.result(WAIT_S)
            assert handle.metrics.reused == 0
        assert generator.stats().kept_tokens == 0


def test_nothing_is_reused_after_the_weights_have_changed(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    target = copy.deepcopy(target)
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        for change in (0.0, 0.05, 0.0):
            with torch.no_grad():
                target.model.layers[0].self_attn.v_proj.weight.add_(change)
            expected = alone((target, draft, tokenizer), SYSTEM, max_new_tokens=quick_or(12, 24))
            for is_first in (True, False):
                handle = generator.submit(SYSTEM, max_new_tokens=quick_or(12, 24))
                assert handle.result(WAIT_S).token_ids == expected
                assert (handle.metrics.reused == 0) == is_first


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, fused=True)
    model(input_ids=torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.backward()
    optimizer.step()


CHANGES: list[Any] = [
    fused_step,
    lambda model: model.model.layers[0].mlp.up_proj.weight.data.mul_(-1.0),
    lambda model: model.model.layers[0].register_forward_hook(
        lambda module, inputs, out: out * -1.0
    ),
    lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 1.0),
    lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.Tanh()),
    lambda model: setattr(model.model.layers[0].self_attn, "scaling", 0.01),
    lambda model: model.model.layers[0].mlp.up_proj.weight.detach().mul_(-1.0),
    lambda model: model.model.layers[0].mlp.offset.fill_(3.0),
]


@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_reused_after_anything_of_the_model_has_changed(change: Any) -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    mlp = model.model.layers[0].mlp
    mlp.offset = torch.tensor(0.0)  # neither a parameter nor a buffer
    mlp.register_forward_hook(lambda module, inputs, out: out + module.offset)
    ids = torch.randint(3, 101, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        generator.submit(ids, max_new_tokens=24).result(WAIT_S)
        assert generator.submit(ids, max_new_tokens=2).result(WAIT_S).metrics.reused > 0
        change(model)
        handle = generator.submit(ids, max_new_tokens=24)
        assert handle.result(WAIT_S).token_ids == alone_ids((model,), ids, max_new_tokens=24)
        assert handle.metrics.reused == 0


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_an_adapter_that_is_switched_off_and_on_again_meanwhile_leaves_nothing_wrong() -> None:
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), lora)
    base = model.get_base_model()
    for seed in range(3):
        ids = torch.randint(3, 101, (80,), generator=torch.Generator().manual_seed(seed)).tolist()
        with SLOSpecGenerator(base, config=CONFIG) as generator:
            with model.disable_adapter():
                handle = generator.submit(ids, max_new_tokens=60, eos_token_id=None)
                next(handle.tokens())
            handle.result(WAIT_S)
            handle = generator.submit(ids, max_new_tokens=24)
            assert handle.result(WAIT_S).token_ids == alone_ids((base,), ids, max_new_tokens=24)


def wrapped(model: Any) -> Any:
    """Replace a layer's MLP, and return what puts it back."""
    layer = model.model.layers[0]
    plain = layer.mlp
    layer.mlp = torch.nn.Sequential(layer.mlp, torch.nn.Tanh())
    return lambda: setattr(layer, "mlp", plain)


TEMPORARY: list[Any] = [
    lambda model: (
        model.model.layers[0].register_forward_hook(lambda module, inputs, out: out + 3.0).remove
    ),
    wrapped,
]


@pytest.mark.parametrize("change", TEMPORARY)
def test_a_change_that_is_undone_while_a_request_runs_leaves_nothing_wrong(change: Any) -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    ids = torch.randint(3, 101, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    plain = alone_ids((model,), ids, max_new_tokens=150, eos_token_id=None)
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
            assert handle.result(WAIT_S).token_ids == alone_ids((model,), ids, max_new_tokens=24)


def test_told_changes_of_what_a_hook_reads_are_noticed_each_time() -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
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
                assert handle.result(WAIT_S).token_ids == alone_ids(
                    (model,), ids, max_new_tokens=24
                )
                assert (handle.metrics.reused == 0) == is_first


def test_resumed_requests_find_their_own_k_v(pair: tuple[Any, Any, Any]) -> None:
    config = SLOSpecConfig(check_invariants=True, kv_tokens=20_000, max_batch=1)
    expected = (
        alone(pair, SYSTEM, max_new_tokens=40),
        alone(pair, tiny_prompts()[5], max_new_tokens=8),
    )
    with SLOSpecGenerator(*pair, config) as generator:
        with Holds() as holds:
            spare = generator.submit(SYSTEM, max_new_tokens=40, stopping_criteria=[holds])
            assert holds.is_reached.wait(WAIT_S)
            urgent = generator.submit(
                tiny_prompts()[5], max_new_tokens=8, slo_tpot=10.0, slo_ttft=100.0
            )
        assert (spare.result(WAIT_S).token_ids, urgent.result(WAIT_S).token_ids) == expected
        assert spare.metrics.preempted == 1 and spare.metrics.reused == 0


@pytest.mark.parametrize("num_known", [0, 900])
def test_a_promise_counts_the_prefill_that_is_saved(num_known: int) -> None:
    limits = Limits(max_batch=4, kv_tokens=10**6, max_nodes=4, prefill_chunk=100, starvation_s=1e9)
    costs = new_costs()
    scheduler = ContinuousScheduler(limits, costs, num_reusable=lambda request: num_known)
    half_s = (
        0.5 * 1000 / (100 / float(costs.step_s(0, 100)))
    )  # half the time that the whole prompt takes
    request = Request(0, RequestParams([1] * 1000, 4, (Stage(100.0),), ttft_slo_s=half_s))
    scheduler.add(request)
    scheduler.enter(0.0)
    assert request.is_guaranteed == (num_known > 0)
