"""Texts of outputs behind their prompts: stop strings, first spaces, parts of characters, log
probabilities.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import openai
import pytest

from hf_slospec import InvalidInputError, SLOSpecGenerator, tiny_prompts
from hf_slospec.model.sampling import TokenLogprobs
from hf_slospec.request.request import Request, RequestParams
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import Decoding, LocalEngine, Order
from tests.server.conftest import Served, listening
from tests.support.toys.tiny_tokenizers import byte_level, sentencepiece_like

PROMPT = tiny_prompts()[0][:120]
BODY: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": PROMPT}],
    "max_tokens": 16,
    "temperature": 0,
}
MESSAGES: dict[str, Any] = CHAT | {"model": "tiny"}
PREFILL: dict[str, Any] = CHAT | {
    "messages": [*CHAT["messages"], {"role": "assistant", "content": "def f(x):"}], "continue_final_message": True,
}  # fmt: skip
PREFILL["add_generation_prompt"] = False


def text_of(choice: dict[str, Any]) -> str:
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, str, str | None]:
    """Text, reason and stop sequence of a stream."""
    text = ""
    reason = ""
    stop = None
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            text += event.get("delta", {}).get("text", "")
            if event.get("type") == "message_delta":
                reason = event["delta"]["stop_reason"]
                stop = event["delta"]["stop_sequence"]
    return text, reason, stop


CASES = [
    ("/v1/completions", BODY, PROMPT),
    ("/v1/completions", BODY | {"echo": True}, PROMPT),
    ("/v1/chat/completions", CHAT, "# assistant\n"),
    ("/v1/chat/completions", PREFILL, "def f(x):"),
]


@pytest.mark.parametrize(
    ("path", "body", "before"), CASES, ids=["completion", "echo", "chat", "prefill"]
)
def test_stop_strings_that_begin_in_the_prompt_are_none(
    served: Served, path: str, body: dict[str, Any], before: str
) -> None:
    (choice,) = served.client.post(path, json=body).json()["choices"]
    whole = text_of(choice)
    output = whole.removeprefix(PROMPT) if body.get("echo") else whole
    assert len(output) > 6
    spanning = [before[-size:] + output[:more] for size in (1, 4) for more in (1, 3)]
    stops = [stop for stop in spanning if stop not in output]
    assert stops
    answer = served.client.post(path, json=body | {"stop": stops}).json()
    assert (text_of(answer["choices"][0]), answer["choices"][0]["finish_reason"]) == (
        whole,
        choice["finish_reason"],
    )
    assert streamed(served.client, path, body | {"stop": stops})[:2] == (
        whole,
        choice["finish_reason"],
    )


def test_stop_sequences_of_messages_are_those_of_the_output(served: Served) -> None:
    whole = served.client.post("/v1/messages", json=MESSAGES).json()
    text = whole["content"][0]["text"]
    stop = "\n" + text[:2]
    if stop not in text:
        found = served.client.post(
            "/v1/messages", json=MESSAGES | {"stop_sequences": [stop]}
        ).json()
        assert found["content"][0]["text"] == text and found["stop_reason"] == whole["stop_reason"]
        assert found["stop_sequence"] is None
    body = MESSAGES | {"stop_sequences": [stop + "never", text[4:8]]}
    found = served.client.post("/v1/messages", json=body).json()
    expected = (text[: text.index(text[4:8])], "stop_sequence", text[4:8])
    assert (found["content"][0]["text"], found["stop_reason"], found["stop_sequence"]) == expected
    assert streamed(served.client, "/v1/messages", body) == expected


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_min_tokens_hold_back_stop_strings(served: Served, path: str) -> None:
    body = (BODY if path == "/v1/completions" else CHAT) | {"ignore_eos": True}
    whole = text_of(served.client.post(path, json=body).json()["choices"][0])
    body |= {"min_tokens": 12, "stop": [whole[2:4]]}
    answer = served.client.post(path, json=body).json()
    assert answer["usage"]["completion_tokens"] >= 12
    assert (
        whole.startswith(text_of(answer["choices"][0])) and len(text_of(answer["choices"][0])) > 4
    )
    assert streamed(served.client, path, body)[0] == text_of(answer["choices"][0])
    at_once = served.client.post(path, json=body | {"min_tokens": 0}).json()
    assert text_of(at_once["choices"][0]) == whole[: whole.index(whole[2:4])]


def test_submit_finds_stop_strings_in_the_output_and_generate_also_in_the_prompt(
    generator: SLOSpecGenerator,
) -> None:
    tokenizer = generator.tokenizer
    whole = generator.submit(PROMPT, max_new_tokens=16, do_sample=False).result()
    text = str(whole.text)
    stop = PROMPT[-3:] + text[:2]
    assert stop not in text
    for stops in (stop, [stop]):
        result = generator.submit(
            PROMPT, max_new_tokens=16, do_sample=False, stop_strings=stops
        ).result()
        assert (result.token_ids, result.finish_reason) == (whole.token_ids, whole.finish_reason)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    out = generator.generate(**inputs, max_new_tokens=16, do_sample=False, stop_strings=stop)
    assert out.shape[1] - inputs["input_ids"].shape[1] < len(whole.token_ids)
    handle = generator.submit(
        PROMPT, max_new_tokens=16, min_new_tokens=9, do_sample=False, stop_strings=text[1:3]
    )
    assert len(handle.result().token_ids) > 9


class Scripted(LocalEngine):
    """Engine with another tokenizer, whose model always writes the same tokens, some at a time."""

    def __init__(
        self, generator: SLOSpecGenerator, tokenizer: Any, tokens: list[int], size: int = 2
    ):
        super().__init__(generator)
        self.tokenizer, self.tokens, self.size, self.vocab_size = (
            tokenizer,
            tokens,
            size,
            len(tokenizer),
        )
        self.top: list[tuple[int, float]] = []

    async def submit(self, order: Order) -> Decoding:
        return ScriptedDecoding(order.prompt, self.tokens, self.size, self.top)


class ScriptedDecoding:
    finish_reason = "length"
    replica = None

    def __init__(
        self, prompt: list[int], tokens: list[int], size: int, top: list[tuple[int, float]]
    ):
        self.metrics, self.tokens, self.size = (
            Request(0, RequestParams(prompt, 1)).metrics(),
            tokens,
            size,
        )
        self.logprobs = [TokenLogprobs(-3.0, top)] * len(tokens)
        self.prompt_logprobs = [None, *[TokenLogprobs(-1.0, [])] * (len(prompt) - 1)]

    async def asteps(self) -> AsyncIterator[tuple[list[int], bool]]:
        for begin in range(0, len(self.tokens), self.size):
            yield self.tokens[begin : begin + self.size], begin + self.size >= len(self.tokens)

    def cancel(self) -> None:
        pass


def client_of(engine: LocalEngine) -> Iterator[openai.OpenAI]:
    app = make_app(engine, ServerSettings(model_name="tiny"))
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        yield client


@pytest.mark.parametrize("size", [1, 2, 50])
def test_first_spaces_of_outputs_are_kept(generator: SLOSpecGenerator, size: int) -> None:
    tokenizer = copy.deepcopy(sentencepiece_like(500))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    tokens = tokenizer("return the")["input_ids"][1:]
    assert tokenizer.decode(tokens) == "return the"
    for client in client_of(Scripted(generator, tokenizer, tokens, size)):
        for prompt in ("The keys", tokenizer("The keys")["input_ids"]):
            (choice,) = client.completions.create(model="tiny", prompt=prompt).choices
            assert choice.text == " return the"
            (choice,) = client.completions.create(
                model="tiny", prompt=prompt, echo=True, logprobs=1
            ).choices
            assert choice.text == "The keys return the" and choice.logprobs is not None
            offsets = choice.logprobs.text_offset
            names = choice.logprobs.tokens
            assert offsets is not None and names is not None
            for offset, name in list(zip(offsets, names, strict=True))[2:]:
                assert choice.text[offset:].startswith(name)
        stream = client.completions.create(model="tiny", prompt="The keys", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == " return the"
        (stopped,) = client.completions.create(model="tiny", prompt="The keys", stop=" the").choices
        assert stopped.text == " return"
        messages: Any = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "The keys"},
        ]
        options = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.chat.completions.create(model="tiny", messages=messages, extra_body=options)
        assert answer.choices[0].message.content == " return the"
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, extra_body=options, stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == " return the"


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_invalid_characters_do_not_change_what_is_beside_them(
    generator: SLOSpecGenerator, size: int
) -> None:
    tokenizer = sentencepiece_like(500)
    names = ["<0x0A>", "<0xE4>", "▁the", "<0xE4>", "<0xBD>", "<0xA0>", "<0x0A>", "▁the", "<0xF0>"]
    tokens = [tokenizer.convert_tokens_to_ids(name) for name in names]
    text = tokenizer.decode([*tokenizer("x")["input_ids"], *tokens], skip_special_tokens=True)[1:]
    for client in client_of(Scripted(generator, tokenizer, tokens, size)):
        assert client.completions.create(model="tiny", prompt="x").choices[0].text == text
        stream = client.completions.create(model="tiny", prompt="x", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text


def test_log_probabilities_have_the_bytes_of_their_tokens(generator: SLOSpecGenerator) -> None:
    for tokenizer in (copy.deepcopy(byte_level(400)), copy.deepcopy(sentencepiece_like(500))):
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        tokens = tokenizer("the 🙂\n", add_special_tokens=False)["input_ids"]
        for client in client_of(Scripted(generator, tokenizer, tokens)):
            messages: Any = [{"role": "user", "content": "x"}]
            (choice,) = client.chat.completions.create(
                model="tiny", messages=messages, logprobs=True
            ).choices
            assert choice.logprobs is not None and choice.logprobs.content is not None
            data = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
            assert data.decode() == choice.message.content or data.decode() == " " + (
                choice.message.content or ""
            )
            assert all("\ufffd" not in token.token for token in choice.logprobs.content)
            assert any(token.token.startswith("\\x") for token in choice.logprobs.content)
            legacy = (
                client.completions.create(model="tiny", prompt="x", logprobs=0).choices[0].logprobs
            )
            assert (
                legacy is not None and legacy.tokens is not None and legacy.top_logprobs is not None
            )
            assert any(name.startswith("bytes:\\x") for name in legacy.tokens)
            for name, top in zip(legacy.tokens, legacy.top_logprobs, strict=True):
                assert top == {name: -3.0}, "with the sampled token, whatever the number of others"


def test_log_probabilities_of_tokens_with_one_text_are_told_apart(
    generator: SLOSpecGenerator,
) -> None:
    tokenizer = sentencepiece_like(500)
    word = next(
        name
        for name in tokenizer.get_vocab()
        if len(name) > 1 and "▁" + name in tokenizer.get_vocab()
    )
    names = ("x", "<0x78>", "▁" + word, word)
    plain, byte, spaced, unspaced = (tokenizer.convert_tokens_to_ids(name) for name in names)
    assert (
        tokenizer.decode([spaced]) == tokenizer.decode([unspaced])
        and tokenizer.decode([byte]) == "x"
    )
    engine = Scripted(generator, tokenizer, [byte])
    engine.top = [(plain, -0.5), (spaced, -1.0), (unspaced, -1.5)]
    for client in client_of(engine):
        logprobs = (
            client.completions.create(model="tiny", prompt="x", logprobs=3).choices[0].logprobs
        )
        assert logprobs is not None and logprobs.tokens == ["x"]
        expected = {f"token_id:{plain}": -0.5, f" {word}": -1.0, word: -1.5, "x": -3.0}
        assert logprobs.top_logprobs == [expected]
        engine.top = [(byte, -3.0), (plain, -math.inf)]
        logprobs = (
            client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
        )
        assert logprobs is not None and logprobs.top_logprobs == [
            {"x": -3.0, f"token_id:{plain}": -9999.0}
        ]


LISTED = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPPING = "{% for m in messages %}{{ m.role }}\n{% endfor %}"


def test_texts_reach_templates_of_parts_and_are_never_lost(generator: SLOSpecGenerator) -> None:
    tokenizer = generator.tokenizer
    kept = generator.tokenizer.chat_template
    try:
        for client in client_of(LocalEngine(generator)):
            tokenizer.chat_template = LISTED
            prompts = []
            for content in (
                "What is it?",
                [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}],
            ):
                body = {"messages": [{"role": "user", "content": content}]}
                found = httpx.post(
                    f"{client.base_url}".removesuffix("v1/") + "tokenize", json=body
                ).json()
                prompts.append(tokenizer.decode(found["tokens"]))
            messages: Any = [{"role": "user", "content": "What is it?"}]
            handle = generator.submit(messages, max_new_tokens=1)
            prompts.append(tokenizer.decode(handle.request.params.prompt))
            assert prompts == ["user: What is it?assistant: "] * 3
            tokenizer.chat_template = DROPPING
            with pytest.raises(InvalidInputError, match=r"does not show the text of messages\[0\]"):
                generator.submit(messages, max_new_tokens=1)
            with pytest.raises(
                openai.BadRequestError, match=r"does not show the text of messages\[0\]"
            ):
                client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": "What is it?"}]
                )
            with pytest.raises(
                openai.BadRequestError, match=r"does not show the text of messages\[0\]"
            ):
                client.responses.create(model="tiny", input="What is it?")
    finally:
        tokenizer.chat_template = kept
