"""Transformers' continuous batching with an enabled model."""

from __future__ import annotations

import asyncio
import copy
import inspect
import itertools
import threading

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching import ContinuousBatchingManager, RequestStatus

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    SLOSpecConfig,
    UnsupportedOptionError,
)
from hf_slospec.generate.continuous_batching import SpeculatingManager
from tests.support.stock_matrix import random_texts
from tests.support.toys.tiny_models import VOCAB, ragged_texts, tiny_copy

PROMPTS = ragged_texts(5)
GREEDY = GenerationConfig(max_new_tokens=10, do_sample=False, eos_token_id=-1)
SAMPLED = GenerationConfig(
    max_new_tokens=10, do_sample=True, temperature=0.8, top_p=0.9, repetition_penalty=1.2
)
CONFIG = SLOSpecConfig(policy="adaserve", token_budget=64, max_depth=3)
WAIT_S = 30.0


@pytest.fixture(scope="module")
def stock():
    return tiny_copy("llama")


@pytest.fixture(scope="module")
def model(stock):
    return hf_slospec.enable(copy.deepcopy(stock), config=CONFIG)


@pytest.fixture
def manager(model):
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        yield manager


def alone(stock, prompt, config, seed=None, **options):
    """Return stock's new tokens for one prompt and, with the scores, their log probabilities."""
    if seed is not None:
        torch.manual_seed(seed)
    out = stock.generate(
        torch.tensor([prompt]),
        generation_config=config,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    new = out.sequences[0, len(prompt) :].tolist()
    scores = torch.cat(out.scores).log_softmax(-1)
    return new, scores[range(len(new)), new].tolist()


def tokens(outputs):
    return [output.generated_tokens for output in outputs.values()]


@pytest.mark.parametrize(("config", "seed"), [(GREEDY, None), (SAMPLED, 5)])
def test_a_batch_is_what_stock_generates_for_each_prompt(model, stock, config, seed):
    settings = ContinuousBatchingConfig(return_logprobs=True, seed=seed, max_requests_per_batch=2)
    outputs = model.generate_batch(PROMPTS, config, settings, record_timestamps=True)
    assert [output.prompt_ids for output in outputs.values()] == PROMPTS
    for n, (name, output) in enumerate(outputs.items()):
        expected, logprobs = alone(stock, PROMPTS[n], config, None if seed is None else seed + n)
        assert (output.request_id, output.generated_tokens) == (name, expected)
        assert output.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert output.status is RequestStatus.FINISHED and output.error is None
        times = [output.created_time, output.lifespan[0], *output.timestamps, output.lifespan[1]]
        assert times == sorted(times) and len(output.timestamps) == len(expected)


def test_greedy_batches_are_those_of_stock_with_fewer_steps(model, stock):
    done = model.generate.decoder.done
    little = ContinuousBatchingConfig(num_blocks=16, page_size=16, max_batch_tokens=64)
    expected = tokens(stock.generate_batch(PROMPTS, copy.copy(GREEDY), little, warmup=False))
    assert tokens(model.generate_batch(PROMPTS, GREEDY)) == expected
    steps = model.generate.decoder.done.steps - done.steps
    assert 0 < steps < sum(len(row) - 1 for row in expected)


def test_a_seed_of_torch_repeats_a_batch_and_sequences_differ(model):
    config = copy.copy(SAMPLED)
    config.num_return_sequences = 3
    results = []
    for _ in range(2):
        torch.manual_seed(1)
        results.append(model.generate_batch(PROMPTS[:2], config))
    first, again = map(tokens, results)
    assert first == again and len({tuple(row) for row in first}) > 2
    names = ["req_0__child#0", "req_0__child#1", "req_0"]
    assert list(results[0]) == [*names, *(name.replace("0", "1", 1) for name in names)]


def test_settings_of_single_requests(model, stock, manager):
    name = manager.add_request(
        PROMPTS[0], "mine", 7, seed=3, do_sample=True, top_k=4, slo_tpot=0.5, slo_ttft=5.0
    )
    others = manager.add_requests(PROMPTS[:2], slo_tpot=[0.5, None], priority=[1, 0])
    results = {output.request_id: output for output in map(manager.get_result, (name, *others))}
    own = GenerationConfig(max_new_tokens=7, do_sample=True, top_k=4, eos_token_id=-1)
    expected = [alone(stock, PROMPTS[0], own, 3), *(alone(stock, p, GREEDY) for p in PROMPTS[:2])]
    assert tokens(results) == [new for new, _ in expected]
    assert list(results) == ["mine", "req_0", "req_1"]


def test_streams(manager, stock):
    name = manager.add_request(PROMPTS[0], streaming=True)
    outputs = list(manager.request_id_iter(name))
    expected, _ = alone(stock, PROMPTS[0], GREEDY)
    assert outputs[-1].generated_tokens == expected and len(outputs) > 2
    for before, after in itertools.pairwise(outputs):
        assert before.status is RequestStatus.DECODING
        assert after.generated_tokens[: len(before.generated_tokens)] == before.generated_tokens


def test_handlers_get_outputs_in_their_event_loop(manager, stock):
    async def results(is_late):
        finished = asyncio.get_running_loop().create_future()
        got = []

        def take(output):
            got.append(output)
            if output.is_finished():
                finished.set_result(got)

        name = manager.add_request(PROMPTS[1], streaming=True)
        while is_late and not manager._outputs:
            await asyncio.sleep(0.001)
        manager.register_result_handler(name, take)
        return await asyncio.wait_for(finished, WAIT_S)

    for is_late in (False, True):
        outputs = asyncio.run(results(is_late))
        lengths = [len(output.generated_tokens) for output in outputs]
        assert outputs[-1].generated_tokens == alone(stock, PROMPTS[1], GREEDY)[0]
        assert lengths == sorted(set(lengths)) or lengths[:-1] == sorted(set(lengths))
    assert manager.get_result(timeout=0) is None


def test_requests_may_be_added_before_the_start_and_cancelled(model):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    first, second = manager.add_requests(PROMPTS[:2])
    assert not manager.is_running() and manager.get_result(timeout=0) is None
    manager.cancel_request(second)
    manager.cancel_request("unknown")
    output = manager.get_result(second)
    assert output is None or output.status is RequestStatus.FAILED
    manager.start()
    assert manager.get_result(first).status is RequestStatus.FINISHED
    endless = manager.add_request(PROMPTS[0], max_new_tokens=90, streaming=True)
    manager.get_result(endless)
    manager.cancel_request(endless)
    *_, last = manager.request_id_iter(endless)
    assert last.status is RequestStatus.FAILED and "cancelled" in last.error
    assert 0 < len(last.generated_tokens) < 90
    manager.stop()
    with pytest.raises(NotRunningError, match="was stopped"):
        manager.add_request(PROMPTS[0])
    manager.start()
    manager.add_request(PROMPTS[0])
    assert [output.status for output in stopping(manager)] == [RequestStatus.FINISHED]


def stopping(manager):
    """Stop a manager from another thread, and yield the remaining outputs."""
    thread = threading.Thread(target=manager.stop)
    thread.start()
    yield from manager
    thread.join(WAIT_S)


def test_a_hard_stop_ends_requests_as_failed(model):
    manager = model.init_continuous_batching(generation_config=GREEDY)
    manager.start()
    manager.add_request(PROMPTS[0], max_new_tokens=90)
    manager.stop(hard_stop=True)
    assert [output.status for output in manager] == [RequestStatus.FAILED]
    assert not manager.is_running() and manager.get_result() is None
    manager.destroy()


def test_a_pause_lets_the_weights_change_under_a_request(stock):
    model = hf_slospec.enable(copy.deepcopy(stock), config=CONFIG)
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        name = manager.add_request(PROMPTS[0], max_new_tokens=90, streaming=True)
        manager.get_result(name)
        with manager.pause(), manager.pause():
            with pytest.raises(NotRunningError, match="leave the pause"):
                manager.stop()
            while manager.get_result(timeout=0) is not None:
                pass
            with torch.no_grad():
                model.lm_head.weight.zero_()
                model.lm_head.weight[7] = 1.0
            assert manager.get_result(timeout=0.2) is None
        *_, last = manager.request_id_iter(name)
        assert len(last.generated_tokens) == 90 and set(last.generated_tokens[-40:]) <= {0, 7}


def test_settings_may_be_dicts_of_which_stock_makes_objects(model, stock):
    watermark = {"bias": 2.5, "seeding_scheme": "selfhash"}
    outputs = model.generate_batch(PROMPTS, max_new_tokens=10, watermarking_config=watermark)
    config = GenerationConfig(max_new_tokens=10, watermarking_config=watermark)
    assert tokens(outputs) == [alone(stock, prompt, config)[0] for prompt in PROMPTS]


def test_kept_managers_are_used_again_until_the_model_is_disabled(stock):
    model = hf_slospec.enable(copy.deepcopy(stock), config=CONFIG)
    first = model.generate_batch(PROMPTS[:2], GREEDY, persistent_manager=True)
    manager = model.init_continuous_batching()
    assert isinstance(manager, SpeculatingManager) and not manager.is_running()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    model.train()  # a call takes the model out of training mode, with a kept manager, too
    assert tokens(model.generate_batch(PROMPTS[:2], persistent_manager=True)) == tokens(first)
    assert model.init_continuous_batching() is manager
    hf_slospec.disable(model)
    assert not {"generate_batch", "init_continuous_batching"} & set(vars(model))
    assert type(model.init_continuous_batching()) is ContinuousBatchingManager


@pytest.mark.parametrize(
    ("inputs", "options", "error", "match"),
    [
        ("text", {}, InvalidTypeError, "inputs must be a list"),
        (["text"], {}, InvalidTypeError, r"inputs\[0\]: .*tokenize"),
        (
            [[5], [6, -1]],
            {},
            InvalidTypeError,
            r"inputs\[1\]: .*list with -1, which is no token id",
        ),
        (
            [[5]],
            {"generation_config": {"top_k": 5}},
            InvalidTypeError,
            "must be a GenerationConfig",
        ),
        ([[5], []], {}, InvalidInputError, r"inputs\[1\]: prompt is empty"),
        ([[5], [VOCAB]], {}, InvalidInputError, r"inputs\[1\]: .*vocabulary"),
        ([[5], [6]], {"slo_tpot": [1.0]}, InvalidInputError, "1 entries for 2 prompts"),
        ([[5]], {"slo_tpot": -1.0}, InvalidInputError, "slo_tpot"),
        ([[5]], {"num_beams": 3}, UnsupportedOptionError, "beam"),
        ([[5]], {"max_new_token": 3}, ValueError, "max_new_token"),
        ([[5]], {"attention_mask": torch.tensor([[0]])}, InvalidInputError, "without padding"),
    ],
)
def test_bad_input_fails_before_any_work(model, inputs, options, error, match):
    done = model.generate.decoder.done
    with pytest.raises(error, match=match):
        model.generate_batch(inputs, **{"max_new_tokens": 3, **options})
    assert model.generate.decoder.done == done
    assert model.generate_batch([]) == {}


def test_bad_input_disturbs_no_running_request(manager, stock):
    manager.add_request(PROMPTS[0], "mine")
    with pytest.raises(InvalidInputError, match="that of a running request"):
        manager.add_request(PROMPTS[1], "mine")
    with pytest.raises(InvalidInputError, match=r"inputs\[1\]"):
        manager.add_requests([PROMPTS[1], []])
    assert manager.get_result("mine").generated_tokens == alone(stock, PROMPTS[0], GREEDY)[0]
    assert manager.get_result(timeout=0) is None


def test_settings_of_the_batcher(model):
    given = ContinuousBatchingConfig(
        max_requests_per_batch=3, max_batch_tokens=16, num_blocks=3, page_size=64, max_queue_size=9,
        allow_block_sharing=False, scheduler_type="prefill_first", max_memory_percent=0.5,
        use_async_batching=False, max_blocks_per_request=0, use_cuda_graph=False,
    )  # fmt: skip
    config = model.init_continuous_batching(GREEDY, given)._service.config
    names = ("max_batch", "prefill_chunk", "kv_tokens", "max_queue", "kept_tokens", "prefill")
    assert [getattr(config, name) for name in names] == [3, 16, 192, 9, 0, "first"]
    assert config.token_budget == CONFIG.token_budget
    small = ContinuousBatchingConfig(max_memory_percent=0.1)
    most = model.generate.decoder.speculator.affordable_kv_tokens()
    kv_tokens = model.init_continuous_batching(GREEDY, small)._service.config.kv_tokens
    assert kv_tokens == pytest.approx(most / 4, rel=0.2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_async_batching", True),
        ("safety_margin", 0.1),
        ("cpu_offload_space", 1.0),
        ("default_compile_level", 1),
        ("max_blocks_per_request", 4),
        ("scheduler_type", "sjf"),
    ],
)
def test_settings_that_do_not_apply_are_refused_by_name(model, field, value):
    given = ContinuousBatchingConfig(**{field: value})
    with pytest.raises(ValueError, match=field):
        model.generate_batch(PROMPTS[:1], GREEDY, given)


def test_refused_settings_fall_back_where_that_is_wanted(stock):
    model = hf_slospec.enable(copy.deepcopy(stock), config=CONFIG, fallback=True)
    given = ContinuousBatchingConfig(
        safety_margin=0.1, num_blocks=16, page_size=16, max_batch_tokens=64
    )
    with pytest.warns(FallbackWarning, match="safety_margin"):
        outputs = model.generate_batch(PROMPTS[:1], GREEDY, given, warmup=False)
    assert tokens(outputs) == [alone(stock, PROMPTS[0], GREEDY)[0]]


def test_copies_run_stock_and_generate_may_ask_for_pages(model, stock):
    manager = copy.deepcopy(model).init_continuous_batching(GREEDY)
    assert type(manager) is ContinuousBatchingManager
    ids = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    out = model.generate(ids, generation_config=GREEDY, cache_implementation="paged")
    rows = [[*row, *alone(stock, row, GREEDY)[0]] for row in ids.tolist()]
    assert out[0].tolist() == rows


def test_every_public_method_of_transformers_is_replaced():
    theirs = {
        name
        for name, member in vars(ContinuousBatchingManager).items()
        if inspect.isfunction(member) and (name == "__iter__" or not name.startswith("_"))
    }
    # join waits for a thread that stop() has started; the other one is for a constructor.
    inherited = {"join", "switch_to_cb_friendly_attn"}
    assert theirs - inherited <= set(vars(SpeculatingManager))


def steps_of(monkeypatch):
    """Return a list to which every step of a manager is appended."""
    steps = []
    on_step = SpeculatingManager.on_step
    monkeypatch.setattr(
        SpeculatingManager, "on_step", lambda self, step: steps.append(step) or on_step(self, step)
    )
    return steps


def test_equal_prompts_of_a_batch_are_prefilled_once(model, stock, monkeypatch):
    first, second = random_texts(40, 50)
    steps = steps_of(monkeypatch)
    outputs = model.generate_batch([first] * 3 + [second] * 3, GREEDY)
    assert tokens(outputs) == [alone(stock, p, GREEDY)[0] for p in (first, second) for _ in "abc"]
    # All tokens but the last once, and that of every row
    assert sum(step.prefill_tokens for step in steps) == 39 + 49 + 6
    steps.clear()
    apart = ContinuousBatchingConfig(allow_block_sharing=False)
    assert tokens(model.generate_batch([first] * 3, GREEDY, apart)) == tokens(outputs)[:3]
    assert sum(step.prefill_tokens for step in steps) == 3 * 40


def test_rows_that_end_last_count_more_once_none_waits(model, monkeypatch):
    states = []
    on_step = SpeculatingManager.on_step

    def observed(self, step):
        requests = [one.handle.request for one in self._requests.values()]
        states.append({(r.params.ends_with_others, r.params.are_all_running()) for r in requests})
        on_step(self, step)

    monkeypatch.setattr(SpeculatingManager, "on_step", observed)
    model.generate_batch(PROMPTS, GREEDY, ContinuousBatchingConfig(max_requests_per_batch=2))
    assert {(True, False)} in states and {(True, True)} in states[-3:]
    states.clear()
    with model.continuous_batching_context_manager(generation_config=GREEDY) as manager:
        name = manager.add_request(PROMPTS[0])
        manager.get_result(name)
    assert {ends for state in states for ends, _ in state} == {False}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("lora", [False, True], ids=["", "lora"])
def test_batches_use_the_weights_of_the_last_optimizer_step(stock, lora):
    model = copy.deepcopy(stock).train().requires_grad_(True)
    if lora:
        peft = pytest.importorskip("peft")
        targets = peft.LoraConfig(target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(model, targets)
    hf_slospec.enable(model, config=CONFIG)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=3.0)
    settings = ContinuousBatchingConfig(return_logprobs=True)
    earlier = []
    for _ in range(3):
        outputs = model.generate_batch(PROMPTS, GREEDY, settings)
        for prompt, output in zip(PROMPTS, outputs.values(), strict=True):
            expected, logprobs = alone(model, prompt, GREEDY)
            assert output.generated_tokens == expected
            assert output.logprobs == pytest.approx(logprobs, abs=1e-4)
        assert output.logprobs not in earlier
        earlier.append(output.logprobs)
        ids = torch.tensor([PROMPTS[0]])
        model.train()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if len(earlier) == 2:  # a write that torch does not count
            trained[-1].data.mul_(1.5)
