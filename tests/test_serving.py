"""``submit`` on real models: what ``generate`` gives for the request alone, whatever else runs."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TextStreamer

from hf_slospec import (
    InvalidInputError,
    InvalidTypeError,
    NotRunningError,
    QueueFull,
    RequestHandle,
    SLOSpecConfig,
    SLOSpecGenerator,
    SLOStage,
    TokenTree,
    UnsupportedOptionError,
    load_tiny_pair,
    tiny_prompts,
)
from hf_slospec.models.target import PackedTarget

WAIT_S = 120.0
CONFIG = SLOSpecConfig(check_invariants=True, kv_tokens=20_000)
PROMPTS = tiny_prompts()[:10]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    return load_tiny_pair()


@pytest.fixture(scope="module")
def served(pair: tuple[Any, Any, Any]) -> Iterator[SLOSpecGenerator]:
    target, draft, tokenizer = pair
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        yield generator


def alone(pair: tuple[Any, Any, Any], prompt: str, seed: int | None = None, **options: Any) -> list[int]:
    """What stock ``generate`` gives."""
    target, _, tokenizer = pair
    inputs = tokenizer(prompt, return_tensors="pt")
    if seed is not None:
        torch.manual_seed(seed)
    out = target.generate(
        input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], tokenizer=tokenizer, **options
    )
    return out[0, inputs["input_ids"].shape[1] :].tolist()


class Ban:
    """A processor of the user's own that reads the text."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, input_ids[0, -1]] = -torch.inf
        return scores


class Fails:
    def __init__(self, after: int):
        self.after, self.calls = after, 0

    def __call__(self, *_: Any, **__: Any) -> Any:
        self.calls += 1
        if self.calls > self.after:
            raise ZeroDivisionError("of the user's own")
        return _[1] if isinstance(_[1], torch.Tensor) else torch.zeros(len(_[0]), dtype=torch.bool)


MIXED: list[dict[str, Any]] = [
    dict(max_new_tokens=30),
    dict(max_new_tokens=25, do_sample=True, seed=11),
    dict(max_new_tokens=40, do_sample=True, seed=5, temperature=0.7, top_k=20, top_p=0.9),
    dict(max_new_tokens=30, repetition_penalty=1.3),
    dict(max_new_tokens=60, stop_strings=["return"]),
    dict(max_new_tokens=20, do_sample=True, seed=11, repetition_penalty=1.2, no_repeat_ngram_size=3),
    dict(max_new_tokens=1),
    dict(max_new_tokens=50, eos_token_id=[5, 17, 200, 300, 301, 302]),
    dict(max_new_tokens=20, logits_processor=LogitsProcessorList([Ban()])),
    dict(max_new_tokens=33, min_new_tokens=20),
]


def test_mixed_requests_give_what_generate_gives_for_each_alone(
    served: SLOSpecGenerator, pair: tuple[Any, Any, Any]
) -> None:
    expected = []
    for prompt, options in zip(PROMPTS, MIXED, strict=True):
        expected.append(alone(pair, prompt, **copy.deepcopy(options)))
    tight, hopeless = dict(slo_tpot=0.05, slo_ttft=5.0), dict(slo_tpot=1e-9)
    promises: list[dict[str, Any]] = [tight, dict(), dict(best_effort=True), hopeless, dict(priority=3)]
    handles = [
        served.submit(prompt, **options, **promises[index % len(promises)])
        for index, (prompt, options) in enumerate(zip(PROMPTS, MIXED, strict=True))
    ]
    results = [handle.result(WAIT_S) for handle in handles]
    assert [result.token_ids for result in results] == expected
    tokenizer = pair[2]
    for handle, result in zip(handles, results, strict=True):
        assert result.text == tokenizer.decode(result.token_ids, skip_special_tokens=True) == "".join(handle)
    assert results[4].finish_reason == ("stop" if "return" in str(results[4].text) else "length")
    assert [handle.seed for handle in handles] == [options.get("seed") for options in MIXED]


SWITCHED = [
    SLOSpecConfig(policy="none"),
    SLOSpecConfig(policy="fixed", max_depth=4, max_width=1),
    SLOSpecConfig(policy="adaserve"),
    SLOSpecConfig(policy="auto"),
    SLOSpecConfig(policy="auto", max_depth=3),
]


def test_switching_the_policy_loses_and_changes_nothing_that_runs(pair: tuple[Any, Any, Any]) -> None:
    expected = [alone(pair, prompt, max_new_tokens=80) for prompt in PROMPTS[:3]]
    with SLOSpecGenerator(*pair, CONFIG) as generator:
        handles = [generator.submit(prompt, max_new_tokens=80) for prompt in PROMPTS[:3]]
        stream = handles[0].tokens()
        for config in SWITCHED:
            generator.set_policy(config)
            for _ in range(8):
                next(stream)
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected


def test_a_policy_stays_set_over_stop_and_start_and_must_fit(pair: tuple[Any, Any, Any]) -> None:
    generator = SLOSpecGenerator(*pair, CONFIG)
    generator.set_policy(SWITCHED[0])
    for _ in range(2):
        with generator:
            assert generator.submit(PROMPTS[0], max_new_tokens=9).result(WAIT_S).metrics.drafted == 0
    with generator:
        generator.set_policy(SWITCHED[1])
        assert generator.submit(PROMPTS[0], max_new_tokens=9).result(WAIT_S).metrics.drafted > 0
        with pytest.raises(InvalidInputError, match="room"):
            generator.set_policy(SLOSpecConfig(max_depth=100))


def test_a_drawn_seed_can_be_used_again(served: SLOSpecGenerator) -> None:
    first = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20)
    again = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20, seed=first.seed)
    other = served.submit(PROMPTS[0], do_sample=True, max_new_tokens=20)
    assert first.result(WAIT_S).token_ids == again.result(WAIT_S).token_ids != other.result(WAIT_S).token_ids
    state = torch.get_rng_state()
    served.submit(PROMPTS[0], do_sample=True, max_new_tokens=5).result(WAIT_S)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is nobody's


def test_ids_tensors_and_texts_are_the_same_prompt(served: SLOSpecGenerator, pair: tuple[Any, Any, Any]) -> None:
    ids = pair[2](PROMPTS[1])["input_ids"]
    prompts = (PROMPTS[1], ids, tuple(ids), torch.tensor(ids), torch.tensor([ids]))
    results = {tuple(served.submit(prompt, max_new_tokens=9).result(WAIT_S).token_ids) for prompt in prompts}
    assert results == {tuple(alone(pair, PROMPTS[1], max_new_tokens=9))}


def test_chat_messages_go_through_the_template(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    messages = [{"role": "user", "content": "def f(x):"}]
    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        with pytest.raises(InvalidInputError, match="chat template"):
            generator.submit(messages)
        tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}\n{{ m.content }}\n{% endfor %}# answer"
        result = generator.submit(messages, max_new_tokens=8).result(WAIT_S)
        text = generator.submit("# user\ndef f(x):\n# answer", max_new_tokens=8).result(WAIT_S)
    assert result.token_ids == text.token_ids


def test_long_prompts_are_fed_in_chunks_beside_running_streams(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    config = CONFIG.model_copy(update={"prefill_chunk": 64})
    long = "\n".join(tiny_prompts()[:8])
    expected = alone(pair, long, max_new_tokens=12)
    streams = [alone(pair, prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        handles = [generator.submit(prompt, max_new_tokens=60) for prompt in PROMPTS[:3]]
        late = generator.submit(long, max_new_tokens=12)
        assert late.result(WAIT_S).token_ids == expected
        assert [handle.result(WAIT_S).token_ids for handle in handles] == streams


def test_preempted_requests_resume_exactly(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    expected = [alone(pair, prompt, max_new_tokens=40) for prompt in PROMPTS[:4]]
    config = CONFIG.model_copy(update={"max_batch": 2})
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        spare = [generator.submit(prompt, max_new_tokens=40) for prompt in PROMPTS[:2]]
        for handle in spare:
            next(handle.tokens())
        urgent = [generator.submit(p, max_new_tokens=40, slo_tpot=10.0, slo_ttft=100.0) for p in PROMPTS[2:4]]
        assert [handle.result(WAIT_S).token_ids for handle in (*spare, *urgent)] == expected
        assert sum(handle.metrics.preempted for handle in spare) > 0
        assert generator.stats().preempted > 0


def test_generate_runs_beside_the_batcher(served: SLOSpecGenerator, pair: tuple[Any, Any, Any]) -> None:
    tokenizer = pair[2]
    expected = [alone(pair, prompt, max_new_tokens=24) for prompt in PROMPTS[:6]]
    found: dict[int, list[int]] = {}

    def generate(index: int) -> None:
        inputs = tokenizer(PROMPTS[index], return_tensors="pt")
        out = served.generate(input_ids=inputs["input_ids"], max_new_tokens=24)
        found[index] = out[0, inputs["input_ids"].shape[1] :].tolist()

    threads = [threading.Thread(target=generate, args=(index,)) for index in range(3)]
    handles = [served.submit(prompt, max_new_tokens=24) for prompt in PROMPTS[3:6]]
    for thread in threads:
        thread.start()
    results = [handle.result(WAIT_S).token_ids for handle in handles]
    for thread in threads:
        thread.join(WAIT_S)
    assert [found[index] for index in range(3)] + results == expected


def test_faults_of_processors_criteria_and_streamers_stay_in_their_request(
    served: SLOSpecGenerator, pair: tuple[Any, Any, Any]
) -> None:
    class Broken(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            raise ZeroDivisionError("of the user's own")

    failing = [
        served.submit(PROMPTS[0], max_new_tokens=500, logits_processor=LogitsProcessorList([Fails(5)])),
        served.submit(PROMPTS[0], max_new_tokens=500, stopping_criteria=StoppingCriteriaList([Fails(5)])),
        served.submit(PROMPTS[0], max_new_tokens=500, streamer=Broken(pair[2])),
    ]
    other = served.submit(PROMPTS[1], max_new_tokens=40)
    for handle in failing:
        with pytest.raises(ZeroDivisionError, match="of the user's own"):
            handle.result(WAIT_S)
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], max_new_tokens=40)


def test_streamers_hear_prompt_tokens_and_end(served: SLOSpecGenerator) -> None:
    class Heard:
        def __init__(self) -> None:
            self.values, self.ended = list[torch.Tensor](), threading.Event()

        def put(self, value: torch.Tensor) -> None:
            self.values.append(value)

        def end(self) -> None:
            self.ended.set()

    heard = Heard()
    result = served.submit([5, 6, 7], max_new_tokens=6, streamer=heard).result(WAIT_S)
    assert heard.ended.wait(WAIT_S)
    assert heard.values[0].tolist() == [[5, 6, 7]]
    assert [int(value) for value in heard.values[1:]] == result.token_ids
    for ending in ("cancelled", "failed"):
        heard = Heard()
        fails = StoppingCriteriaList([Fails(3)]) if ending == "failed" else None
        handle = served.submit([5, 6, 7], max_new_tokens=5000, streamer=heard, stopping_criteria=fails)
        if ending == "cancelled":
            handle.cancel()
        assert heard.ended.wait(WAIT_S), ending


def test_stages_and_metrics(served: SLOSpecGenerator) -> None:
    stages = [SLOStage(slo_tpot=1e-9, tokens=5), SLOStage(slo_tpot=1e3)]
    metrics = served.submit(PROMPTS[2], slo_tpot=stages, slo_ttft=1e3, max_new_tokens=20).result(WAIT_S).metrics
    assert (metrics.tokens, metrics.attained, metrics.ttft_slo_s, metrics.tpot_slo_s) == (20, False, 1e3, 1e3)
    assert metrics.ttft_s > 0


def test_stats_and_prometheus(pair: tuple[Any, Any, Any]) -> None:
    prometheus = pytest.importorskip("prometheus_client")
    target, draft, tokenizer = pair
    generator = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    assert generator.stats().steps == 0
    assert generator.stats().memory is None
    with generator:
        handles = [generator.submit(p, max_new_tokens=15, slo_tpot=1e3, slo_ttft=1e3) for p in PROMPTS[:3]]
        for handle in handles:
            handle.result(WAIT_S)
        doomed = generator.submit(PROMPTS[0], max_new_tokens=2000)
        doomed.cancel()
        with pytest.raises(Exception, match="cancelled"):
            doomed.result(WAIT_S)
        assert generator.stats().memory.draft_kv > 0
    stats = generator.stats()
    assert stats.memory.staging == 0  # nobody runs
    assert (stats.running, stats.waiting, stats.kv_tokens, stats.kv_limit) == (0, 0, 0, 20_000)
    assert stats.finished == {"length": 3, "cancelled": 1}
    assert (stats.attained, stats.missed, stats.promised, stats.broken) == (3, 0, 3, 0)
    assert stats.generated_tokens >= 45
    assert stats.tpot_s is not None
    assert stats.ttft_s is not None
    registry = prometheus.CollectorRegistry()
    registry.register(generator.collector())
    text = prometheus.generate_latest(registry).decode()
    for line in (
        "hf_slospec:slo_attained_total 3.0",
        "hf_slospec:num_requests_running 0.0",
        'hf_slospec:request_success_total{finished_reason="length"} 3.0',
        'hf_slospec:time_to_first_token_seconds_bucket{le="+Inf"}',
    ):
        assert line in text, text


@pytest.mark.parametrize(
    ("prompt", "options", "error", "match"),
    [
        ("", {}, InvalidInputError, "prompt is empty"),
        ([], {}, InvalidInputError, "prompt is empty"),
        (5, {}, InvalidTypeError, "prompt"),
        ([1.5], {}, InvalidTypeError, "prompt"),
        ([True], {}, InvalidTypeError, "prompt"),
        ([[1, 2], [3, 4]], {}, InvalidTypeError, "one request"),
        ([-1], {}, InvalidTypeError, "prompt"),
        ([10**6], {}, InvalidInputError, "outside"),
        ("x", dict(slo_tpot=float("nan")), InvalidInputError, "slo_tpot"),
        ("x", dict(slo_tpot="fast"), InvalidTypeError, "slo_tpot"),
        ("x", dict(slo_tpot=[0.1, 0.2]), InvalidInputError, "slo_tpot"),
        ("x", dict(slo_ttft=-1), InvalidInputError, "slo_ttft"),
        ("x", dict(slo_ttft=True), InvalidTypeError, "slo_ttft"),
        ("x", dict(slo_ttft=float("inf")), InvalidInputError, "slo_ttft"),
        ("x", dict(priority=0.5), InvalidTypeError, "priority"),
        ("x", dict(priority=None), InvalidTypeError, "priority"),
        ("x", dict(best_effort=1), InvalidTypeError, "best_effort"),
        ("x", dict(seed=-1), InvalidInputError, "seed"),
        ("x", dict(seed="a"), InvalidTypeError, "seed"),
        ("x", dict(timeout=-2.0, block=True), InvalidInputError, "timeout"),
        ("x", dict(num_beams=4), UnsupportedOptionError, "beam"),
        ("x", dict(num_return_sequences=2, do_sample=True), UnsupportedOptionError, "num_return_sequences"),
        ("x", dict(return_dict_in_generate=True), UnsupportedOptionError, "return_dict_in_generate"),
        ("x", dict(max_new_tokens=0), ValueError, "max_new_tokens"),
        ("x", dict(max_new_tokens=8.0), InvalidTypeError, "max_new_tokens"),
        ("x", dict(streamer=5), InvalidTypeError, "streamer"),
        ("x", dict(max_new_tokens=10**7), InvalidInputError, "kv_tokens"),
        ("x", dict(max_new_token=5), ValueError, "max_new_token"),
        ("x", dict(temperature=-1.0, do_sample=True), ValueError, "temperature"),
    ],
)
def test_bad_input_is_refused_at_submit_and_disturbs_nothing(
    served: SLOSpecGenerator, prompt: Any, options: dict[str, Any], error: type[Exception], match: str
) -> None:
    running = served.submit(PROMPTS[0], max_new_tokens=12)
    with pytest.raises(error, match=match):
        served.submit(prompt, **dict(max_new_tokens=5) | options)
    assert len(running.result(WAIT_S).token_ids) == 12


def test_before_the_start_and_after_the_end(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    generator = SLOSpecGenerator(target, draft, tokenizer, CONFIG)
    with pytest.raises(NotRunningError, match="start"):
        generator.submit("x")
    generator.stop()  # does nothing
    with generator:
        handle = generator.submit("x", max_new_tokens=3)
    assert handle.done()
    with pytest.raises(NotRunningError, match="stopped"):
        generator.submit("x")
    assert isinstance(generator.start().submit("x", max_new_tokens=3), RequestHandle)
    generator.stop(drain=False)


def test_a_full_queue(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    config = CONFIG.model_copy(update={"max_queue": 1, "max_batch": 1})
    with SLOSpecGenerator(target, draft, tokenizer, config) as generator:
        handles = [generator.submit(PROMPTS[0], max_new_tokens=200)]
        with contextlib.suppress(QueueFull):  # whether the first still waits
            handles.append(generator.submit(PROMPTS[0], max_new_tokens=200))
        with pytest.raises(QueueFull, match="block=True"):
            generator.submit(PROMPTS[0], max_new_tokens=3)
        late = generator.submit(PROMPTS[0], max_new_tokens=3, block=True)
        for handle in handles:
            handle.cancel()
        assert len(late.result(WAIT_S).token_ids) == 3
    assert generator.stats().waiting == 0


def test_without_a_tokenizer_token_ids_stream(pair: tuple[Any, Any, Any]) -> None:
    target, draft, tokenizer = pair
    ids = tokenizer(PROMPTS[0])["input_ids"]
    with SLOSpecGenerator(target, draft, None, CONFIG) as generator:
        with pytest.raises(InvalidInputError, match="tokenizer"):
            generator.submit("x")
        handle = generator.submit(ids, max_new_tokens=7)
        assert list(handle) == handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=7)
        assert handle.result().text is None


def test_running_out_of_memory_between_draft_and_verify_is_made_good(
    pair: tuple[Any, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft, tokenizer = pair
    expected = [alone(pair, prompt, max_new_tokens=30) for prompt in PROMPTS[:4]]
    verify, calls, raised = PackedTarget._verify, itertools.count(), list[int]()

    def fails_at_times(*arguments: Any) -> Any:
        if (call := next(calls)) in (3, 7):
            raised.append(call)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")
        return verify(*arguments)

    with SLOSpecGenerator(target, draft, tokenizer, CONFIG) as generator:
        monkeypatch.setattr(PackedTarget, "_verify", fails_at_times)
        handles = [generator.submit(prompt, max_new_tokens=30, slo_tpot=10.0) for prompt in PROMPTS[:4]]
        assert [handle.result(WAIT_S).token_ids for handle in handles] == expected
    assert raised


def test_processors_run_without_gradients_and_may_raise_anything(
    served: SLOSpecGenerator, pair: tuple[Any, Any, Any]
) -> None:
    modes = list[bool]()

    def looks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return scores

    def leaves(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise SystemExit(3)

    other = served.submit(PROMPTS[1], max_new_tokens=20)
    served.submit(PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([looks])).result(WAIT_S)
    leaving = served.submit(PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([leaves]))
    with pytest.raises(SystemExit):
        leaving.result(WAIT_S)
    assert set(modes) == {False}
    assert other.result(WAIT_S).token_ids == alone(pair, PROMPTS[1], max_new_tokens=20)


def test_waiting_for_a_request_in_the_thread_that_decodes_it_is_refused(served: SLOSpecGenerator) -> None:
    others = list[RequestHandle]()

    def waits(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        others[0].result()
        return scores

    others.append(served.submit(PROMPTS[0], max_new_tokens=2000))
    waiting = served.submit(PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([waits]))
    with pytest.raises(NotRunningError, match="own thread"):
        waiting.result(WAIT_S)
    others[0].cancel()


def test_a_streamer_may_stop_the_batcher(pair: tuple[Any, Any, Any]) -> None:
    generator = SLOSpecGenerator(*pair)

    class Stops(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            generator.stop(drain=True)

    with generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=20, streamer=Stops(pair[2]))
        assert handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=20)
        generator.stop()  # waits for the streamer
        generator.start()
        assert generator.submit(PROMPTS[0], max_new_tokens=3).result(WAIT_S).finish_reason == "length"


def test_starting_again_in_the_thread_that_is_stopping_is_refused(pair: tuple[Any, Any, Any]) -> None:
    generator, was_asked = SLOSpecGenerator(*pair), threading.Event()

    def starts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        generator.start()  # does nothing while the batcher runs
        was_asked.set()
        while generator._serving._batcher._is_taking:
            time.sleep(0.001)
        generator.start()
        return scores

    with generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=5, logits_processor=LogitsProcessorList([starts]))
        assert was_asked.wait(WAIT_S)
        generator.stop(drain=True)
        with pytest.raises(NotRunningError, match="own thread"):
            handle.result(WAIT_S)


def test_requests_are_let_go_when_they_are_over(served: SLOSpecGenerator) -> None:
    fails = StoppingCriteriaList([Fails(3)])
    handles = [
        served.submit(PROMPTS[0], max_new_tokens=9, slo_tpot=1e-9, slo_ttft=1e-9),
        served.submit(PROMPTS[0], max_new_tokens=9, stopping_criteria=fails),
        served.submit(PROMPTS[0], max_new_tokens=9, do_sample=True),
    ]
    for handle in handles:
        with contextlib.suppress(ZeroDivisionError):
            handle.result(WAIT_S)
    gone = [weakref.ref(handle.request) for handle in handles]
    del handles, handle
    served.submit(PROMPTS[0], max_new_tokens=3).result(WAIT_S)  # pushes them out of the engine's last step
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_a_users_drafter_leaves_the_global_generator_to_others(pair: tuple[Any, Any, Any]) -> None:
    class Draws:
        def draft(self, requests: Any, plan: Any) -> Any:
            token = int(torch.randint(2000, ()))
            return [TokenTree.chain(request.tokens[-1], [token], 0.5) for request in requests]

        def release(self, request: Any) -> None:
            pass

    target, _, tokenizer = pair
    drawn = list[float]()
    with SLOSpecGenerator(target, None, tokenizer, CONFIG, drafter=Draws()) as generator:
        handle = generator.submit(PROMPTS[0], max_new_tokens=60)
        while not handle.done():
            drawn.append(float(torch.rand(())))
        assert handle.result(WAIT_S).token_ids == alone(pair, PROMPTS[0], max_new_tokens=60)
    assert len(set(drawn)) > 0.99 * len(drawn)
