"""Completions and chats over HTTP, against ``generate`` of the same model."""

from __future__ import annotations

import json
import re

import pytest
import torch

from hf_slospec import tiny_prompts
from hf_slospec.server.app import ServerSettings
from tests.server.conftest import serving
from tests.support.fixed_policy import always_drafting

PROMPT = tiny_prompts()[0][:120]


def alone(served, prompt, seed=None, **options):
    """New tokens of stock ``generate``."""
    model = served.generator.model
    tokenizer = served.generator.tokenizer
    ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
    inputs = torch.tensor([ids])
    if seed is not None:
        torch.manual_seed(seed)
    with served.generator.decoder.speculator.lock:
        out = type(model).generate(
            model, inputs, attention_mask=torch.ones_like(inputs), tokenizer=tokenizer, **options
        )
    return out[0, len(ids) :].tolist()


def text_of(served, tokens):
    return served.generator.tokenizer.decode(tokens, skip_special_tokens=True)


def complete(served, **body):
    answer = served.client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 12} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(served, path, **body):
    found = []
    with served.client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in answer.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        assert line.startswith("data: ")
        found.append(json.loads(line[6:]))
    return found


GREEDY = dict(temperature=0)


def test_a_greedy_completion_is_that_of_generate(served):
    with always_drafting(served.generator):
        found = complete(served, **GREEDY, max_tokens=20)
    new = alone(served, PROMPT, do_sample=False, max_new_tokens=20)
    assert found["object"] == "text_completion" and found["model"] == "tiny"
    (choice,) = found["choices"]
    assert choice["text"] == text_of(served, new) and choice["finish_reason"] in ("length", "stop")
    for temperature in (5e-324, 1e-8, 9.9e-6):  # below vLLM's least
        other = complete(served, temperature=temperature, max_tokens=20, top_p=0.9, seed=3)
        assert other["choices"][0]["text"] == choice["text"]
    usage = found["usage"]
    assert usage["completion_tokens"] == len(new)
    assert usage["total_tokens"] == usage["prompt_tokens"] + len(new)
    speculation = usage["metrics"]["speculative_decoding"]
    assert speculation["mean_acceptance_length"] >= 1.0 >= speculation["draft_acceptance_rate"] > 0
    histogram = speculation["acceptance_histogram"]
    assert sum(histogram) == speculation["num_spec_steps"]
    assert (
        sum(j * count for j, count in enumerate(histogram))
        == speculation["num_accepted_draft_tokens"]
        > 0
    )
    assert found["metrics"] == usage["metrics"]


SAMPLED = [
    (dict(seed=3), dict(temperature=1.0, top_k=0)),
    (dict(seed=4, temperature=0.7, top_p=0.9), dict(temperature=0.7, top_p=0.9, top_k=0)),
    (dict(seed=5, top_k=9, min_p=0.02), dict(top_k=9, min_p=0.02)),
    (dict(seed=6, repetition_penalty=1.3), dict(repetition_penalty=1.3, top_k=0)),
    (dict(seed=7, min_tokens=12), dict(min_new_tokens=12, top_k=0)),
    (dict(seed=9, temperature=1e-5), dict(temperature=1e-5, top_k=0)),
    (
        dict(seed=8, logit_bias={"40": 3.5, "41": -100}),
        dict(sequence_bias=[[[40], 3.5], [[41], -100.0]], top_k=0),
    ),
]


@pytest.mark.parametrize(("body", "options"), SAMPLED, ids=lambda value: str(value))
def test_a_sampled_completion_is_that_of_its_seed(served, body, options):
    (choice,) = complete(served, **body, max_tokens=24)["choices"]
    new = alone(served, PROMPT, body["seed"], do_sample=True, max_new_tokens=24, **options)
    assert choice["text"] == text_of(served, new)


def test_penalties_are_openais(served):
    class Penalties:
        def __call__(self, ids, scores):
            counts = torch.bincount(ids[0, prompt_len:], minlength=scores.shape[-1])
            return scores - 0.8 * counts - 0.5 * (counts > 0)

    prompt_len = len(served.generator.tokenizer(PROMPT)["input_ids"])
    new = alone(served, PROMPT, do_sample=False, max_new_tokens=30, logits_processor=[Penalties()])
    found = complete(served, **GREEDY, max_tokens=30, frequency_penalty=0.8, presence_penalty=0.5)
    assert found["choices"][0]["text"] == text_of(served, new)
    assert new != alone(served, PROMPT, do_sample=False, max_new_tokens=30)


@pytest.mark.parametrize(
    "body",
    [GREEDY, dict(seed=1), dict(seed=1, n=3), GREEDY | dict(stop=["\n"]), dict(seed=2, echo=True)],
    ids=str,
)
def test_a_stream_is_the_completion_in_pieces(served, body):
    whole = complete(served, **body, max_tokens=20)
    pieces = events(served, "/v1/completions", prompt=PROMPT, max_tokens=20, **body)
    texts = [""] * len(whole["choices"])
    reasons = {}
    for event in pieces:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
        assert "usage" not in event
    assert texts == [choice["text"] for choice in whole["choices"]]
    assert reasons == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


def test_usage_of_streams(served):
    body = dict(prompt=PROMPT, max_tokens=9, **GREEDY)
    *parts, last = events(served, "/v1/completions", **body, stream_options={"include_usage": True})
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 9
    assert last["metrics"] == last["usage"]["metrics"] and not any(
        "metrics" in part for part in parts
    )
    assert all(part["usage"] is None for part in parts)
    *parts, last = events(
        served, "/v1/completions", **body, stream_options={"continuous_usage_stats": True}
    )
    counts = [part["usage"]["completion_tokens"] for part in parts]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 9


def test_choices_have_seeds_of_their_own(served):
    found = complete(served, seed=10, n=3, max_tokens=16)
    for choice in found["choices"]:
        new = alone(
            served, PROMPT, 10 + choice["index"], do_sample=True, top_k=0, max_new_tokens=16
        )
        assert choice["text"] == text_of(served, new)


def test_prompts_as_texts_and_ids(served):
    ids = [served.generator.tokenizer(text)["input_ids"] for text in tiny_prompts()[:2]]
    for prompt in (tiny_prompts()[:2], ids):
        found = complete(served, prompt=prompt, **GREEDY)
        assert [choice["index"] for choice in found["choices"]] == [0, 1]
        for choice, own in zip(found["choices"], ids, strict=True):
            assert choice["text"] == text_of(
                served, alone(served, own, do_sample=False, max_new_tokens=12)
            )
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert (
        complete(served, prompt=ids[0], **GREEDY)["choices"][0]["text"]
        == found["choices"][0]["text"]
    )


def test_stop_tokens_and_ends_that_are_ignored(served):
    new = alone(served, PROMPT, do_sample=False, max_new_tokens=40, eos_token_id=None)
    place = next(i for i, token in enumerate(new) if token not in new[:i] and i > 4)
    found = complete(served, **GREEDY, max_tokens=40, stop_token_ids=[new[place]], ignore_eos=True)
    assert found["choices"][0]["text"] == text_of(served, new[:place])
    assert found["usage"]["completion_tokens"] == place + 1
    found = complete(served, **GREEDY, max_tokens=40, ignore_eos=True)
    assert found["choices"][0]["text"] == text_of(served, new)


def target_logprobs(served, tokens):
    with torch.no_grad(), served.generator.decoder.speculator.lock:
        logits = served.generator.model(torch.tensor([tokens])).logits[0]
    return logits.float().log_softmax(-1)


@pytest.mark.parametrize(
    ("max_tokens", "fields"), [(0, GREEDY), (1, GREEDY), (8, dict(temperature=0.5, seed=2))]
)
def test_log_probabilities_of_prompt_and_output_are_the_targets(served, max_tokens, fields):
    ids = served.generator.tokenizer(PROMPT)[
        "input_ids"
    ]  # without output they are scored, as lm_eval asks
    answer = complete(served, prompt=[ids], logprobs=2, echo=True, max_tokens=max_tokens, **fields)
    found = answer["choices"][0]["logprobs"]
    tokens = list(ids)
    if max_tokens:
        sampled = (
            dict(do_sample=True, temperature=0.5, top_k=0)
            if "seed" in fields
            else dict(do_sample=False)
        )
        tokens += alone(served, PROMPT, fields.get("seed"), max_new_tokens=max_tokens, **sampled)
    expected = target_logprobs(served, tokens)
    assert (
        answer["usage"]["completion_tokens"] == max_tokens
        and len(found["tokens"]) == len(ids) + max_tokens
    )
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    for place, token in enumerate(tokens[1:], 1):
        assert found["token_logprobs"][place] == pytest.approx(
            float(expected[place - 1, token]), abs=1e-4
        )
        best = max(found["top_logprobs"][place].values())
        assert best == pytest.approx(float(expected[place - 1].max()), abs=1e-4)
    assert found["text_offset"][0] == 0 and found["text_offset"] == sorted(found["text_offset"])


def test_slos_of_bodies_and_headers(served):
    found = complete(served, slo_tpot=0.5, slo_ttft=20.0, **GREEDY)["usage"]["metrics"]
    assert (
        (found["slo_tpot"], found["slo_ttft"]) == (0.5, 20.0)
        and found["guaranteed"]
        and found["attained"] is not None
    )
    assert (found["window_guarantee"], type(found["windows_kept"])) == (None, bool)
    headers = {"x-llm-d-slo-tpot-ms": "700", "x-slo-tpot-ms": "1", "x-slo-ttft-ms": "9000"}
    answer = served.client.post(
        "/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, headers=headers
    ).json()
    assert (answer["usage"]["metrics"]["slo_tpot"], answer["usage"]["metrics"]["slo_ttft"]) == (
        0.7,
        9.0,
    )
    stages = [{"slo_tpot": 1e-6, "tokens": 4}, {"slo_tpot": 600.0, "slo_ttft": 600.0}]
    for first, attained in (
        (stages[0], False),
        (stages[0] | {"slo_tpot": 600.0, "slo_ttft": 500.0}, True),
    ):
        found = complete(served, slo_tpot=[first, stages[1]], **GREEDY)["usage"]["metrics"]
        assert (found["slo_tpot"], found["slo_ttft"], found["attained"]) == (
            600.0,
            first.get("slo_ttft"),
            attained,
        )
    found = complete(served, slo_e2e=500.0, **GREEDY)["usage"]["metrics"]
    assert (found["slo_e2e"], found["guaranteed"], found["attained"]) == (500.0, True, True)
    assert 0.0 < found["time_to_first_token_ms"] <= found["e2e_latency_ms"] < 500e3


def test_text_of_tokens_and_back(served):
    client = served.client
    tokenizer = served.generator.tokenizer
    found = client.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True}).json()
    assert found["tokens"] == tokenizer(PROMPT)["input_ids"] and found["count"] == len(
        found["tokens"]
    )
    assert len(found["token_strs"]) == found["count"]
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json()[
        "prompt"
    ] == tokenizer.decode(found["tokens"])
    messages = [{"role": "system", "content": "pass"}]
    tokens = tokenizer("# system\npass\n# assistant\n")["input_ids"]
    assert client.post("/tokenize", json={"messages": messages}).json()["tokens"] == tokens


def test_the_description_for_openapi_is_complete(served):
    described = served.client.get("/openapi.json").json()
    for reference in re.findall(r'"#/([^"]+)"', json.dumps(described)):
        found = described
        for name in reference.split("/"):
            found = found[name]
    body = described["paths"]["/v1/completions"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert {"prompt", "slo_tpot"} <= body["properties"].keys() and "StreamOptions" in described[
        "components"
    ]["schemas"]


def test_small_endpoints(served):
    client = served.client
    assert client.get("/health").status_code == 200
    assert client.get("/version").json()["version"]
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
    assert client.get("/v1/models/tiny").json()["object"] == "model"
    complete(served, **GREEDY)
    metrics = client.get("/metrics").text
    assert 'hf_slospec:generation_tokens_total{engine="0",model_name="tiny"}' in metrics
    assert 'time_to_first_token_seconds_bucket{engine="0",le="0.01",model_name="tiny"}' in metrics


def test_tokenizer_is_described_if_wanted(served):
    with serving(served.generator, tokenizer_info=True) as described:
        found = described.client.get("/tokenizer_info").json()
    tokenizer = served.generator.tokenizer
    assert (
        found["eos_token"] == tokenizer.eos_token
        and found["chat_template"] == tokenizer.chat_template
    )
    assert found["tokenizer_class"] and found["model_max_length"] == tokenizer.model_max_length


def test_what_transformers_chat_sends_is_served(served):
    ready = served.client.post("/load_model", json={"model": "tiny"})
    assert (
        ready.status_code == 200
        and json.loads(ready.text.removeprefix("data: "))["status"] == "ready"
    )
    messages = [{"role": "user", "content": "Write."}]
    plain = {"messages": messages, "max_tokens": 9, "temperature": 0}
    settings = {"do_sample": False, "max_new_tokens": 9, "top_k": None, "_from_model_config": True}
    told = {
        "messages": messages,
        "generation_config": json.dumps(settings | {"transformers_version": "5.23.0"}),
    }
    first, second = (
        served.client.post("/v1/chat/completions", json=body).json() for body in (plain, told)
    )
    assert first["choices"][0]["message"] == second["choices"][0]["message"]


def test_text_offsets_are_places_in_the_text_whole_and_streamed(served):
    body = dict(prompt="日本🙂", echo=True, logprobs=1, max_tokens=6, temperature=0)
    (choice,) = complete(served, **body)["choices"]
    offsets = choice["logprobs"]["text_offset"]
    tokens = choice["logprobs"]["tokens"]
    assert (
        len(offsets) == len(tokens)
        and offsets == sorted(offsets)
        and offsets[-1] <= len(choice["text"])
    )
    for offset, token in zip(offsets, tokens, strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    chunks = [
        event["choices"][0]["logprobs"] for event in events(served, "/v1/completions", **body)
    ]
    assert [offset for each in chunks for offset in each["text_offset"]] == offsets


def test_cached_tokens_of_all_prompts_are_counted(served):
    prompts = [f"# {name}\n{PROMPT}" for name in ("first of two", "the other one")]
    for is_again in (False, True):
        usage = complete(served, prompt=prompts, n=2, max_tokens=2, **GREEDY)["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert cached <= usage["prompt_tokens"]
        assert not is_again or cached >= usage["prompt_tokens"] - 2


def test_metrics_have_the_prefix_that_tools_look_for(served):
    with serving(served.generator, metrics_prefix="vllm:") as prefixed:
        text = prefixed.client.get("/metrics").text
    assert "vllm:num_requests_running" in text and "hf_slospec" not in text
    with pytest.raises(ValueError, match="metrics_prefix"):
        ServerSettings(model_name="tiny", metrics_prefix="no name")


def test_every_choice_has_its_measurements(served):
    body = {
        "prompt": PROMPT,
        "max_tokens": 5,
        "ignore_eos": True,
        "n": 3,
        "slo_tpot": 100.0,
        "seed": 0,
    }
    answer = served.client.post("/v1/completions", json=body)
    metrics = answer.json()["usage"]["metrics"]
    assert len(metrics["choices"]) == 3 and all(own["attained"] for own in metrics["choices"])
    assert metrics["choices"][0] == {
        name: value for name, value in metrics.items() if name != "choices"
    }
    assert answer.headers["x-slo-attained"] == "true"
    assert (
        "choices"
        not in served.client.post("/v1/completions", json=body | {"n": 1}).json()["usage"][
            "metrics"
        ]
    )
