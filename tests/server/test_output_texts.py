"""Texts of outputs behind their prompts: stop strings, first spaces, parts of characters, log
probabilities.
"""

from __future__ import annotations

import copy
import math
import re

import pytest

from hf_slospec import InvalidInputError, tiny_prompts
from tests.server.conftest import serving
from tests.server.protocols import PROTOCOLS
from tests.server.scripted import Scripted
from tests.server.test_completions import events
from tests.support.toys.tiny_tokenizers import byte_level, sentencepiece_like

PROMPT = tiny_prompts()[0][:120]
BODY = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0}
PREFILL = {
    "messages": [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "def f(x):"}],
    "continue_final_message": True, "add_generation_prompt": False, "max_tokens": 16, "temperature": 0,
}  # fmt: skip


def whole_and_streamed(served, path, body):
    """Return text and reason of an answer, which are those of its stream."""
    (choice,) = served.client.post(path, json=body).json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    parts = [event["choices"][0] for event in events(served, path, **body)]
    assert text == "".join(
        part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts
    )
    assert parts[-1]["finish_reason"] == choice["finish_reason"]
    return text, choice["finish_reason"]


CASES = [
    ("/v1/completions", BODY, PROMPT),
    ("/v1/completions", BODY | {"echo": True}, PROMPT),
    ("/v1/chat/completions", PREFILL, "def f(x):"),
]


@pytest.mark.parametrize(("path", "body", "before"), CASES, ids=["completion", "echo", "prefill"])
def test_stop_strings_that_begin_in_the_prompt_are_none(served, path, body, before):
    whole, reason = whole_and_streamed(served, path, body)
    output = whole.removeprefix(PROMPT) if body.get("echo") else whole
    assert len(output) > 6
    spanning = [before[-size:] + output[:more] for size in (1, 4) for more in (1, 3)]
    stops = [stop for stop in spanning if stop not in output]
    assert stops
    assert whole_and_streamed(served, path, body | {"stop": stops}) == (whole, reason)


def test_min_tokens_hold_back_stop_strings(served):
    path = "/v1/completions"
    body = BODY | {"ignore_eos": True}
    whole, _ = whole_and_streamed(served, path, body)
    body |= {"min_tokens": 12, "stop": [whole[2:4]]}
    assert served.client.post(path, json=body).json()["usage"]["completion_tokens"] >= 12
    held, _ = whole_and_streamed(served, path, body)
    assert whole.startswith(held) and len(held) > 4
    at_once, _ = whole_and_streamed(served, path, body | {"min_tokens": 0})
    assert at_once == whole[: whole.index(whole[2:4])]
    kept, _ = whole_and_streamed(
        served, path, body | {"min_tokens": 0, "include_stop_str_in_output": True}
    )
    assert kept == at_once + whole[2:4]


@pytest.mark.parametrize("size", [1, 2, 50])
def test_first_spaces_of_outputs_are_kept(generator, size):
    tokenizer = copy.deepcopy(sentencepiece_like(500))
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    engine = Scripted(generator, "", tokenizer, size)
    engine.tokens = tokenizer("return the")["input_ids"][1:]
    assert tokenizer.decode(engine.tokens) == "return the"
    with serving(engine) as served, served.openai as client:
        for prompt in ("The keys", tokenizer("The keys")["input_ids"]):
            (choice,) = client.completions.create(model="tiny", prompt=prompt).choices
            assert choice.text == " return the"
            (choice,) = client.completions.create(
                model="tiny", prompt=prompt, echo=True, logprobs=1
            ).choices
            assert choice.text == "The keys return the"
            offsets = choice.logprobs.text_offset
            names = choice.logprobs.tokens
            for offset, name in list(zip(offsets, names, strict=True))[2:]:
                assert choice.text[offset:].startswith(name)
        stream = client.completions.create(model="tiny", prompt="The keys", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == " return the"
        (stopped,) = client.completions.create(model="tiny", prompt="The keys", stop=" the").choices
        assert stopped.text == " return"
        messages = [
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


def test_log_probabilities_have_the_bytes_of_their_tokens(generator):
    for tokenizer in (copy.deepcopy(byte_level(400)), copy.deepcopy(sentencepiece_like(500))):
        tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        with serving(Scripted(generator, "the 🙂\n", tokenizer)) as served, served.openai as client:
            messages = [{"role": "user", "content": "x"}]
            (choice,) = client.chat.completions.create(
                model="tiny", messages=messages, logprobs=True
            ).choices
            data = b"".join(bytes(token.bytes or ()) for token in choice.logprobs.content)
            assert data.decode() == choice.message.content or data.decode() == " " + (
                choice.message.content or ""
            )
            assert all("\ufffd" not in token.token for token in choice.logprobs.content)
            assert any(token.token.startswith("\\x") for token in choice.logprobs.content)
            legacy = (
                client.completions.create(model="tiny", prompt="x", logprobs=0).choices[0].logprobs
            )
            assert any(name.startswith("bytes:\\x") for name in legacy.tokens)
            for name, top in zip(legacy.tokens, legacy.top_logprobs, strict=True):
                assert top == {name: -3.0}, "with the sampled token, whatever the number of others"


def test_log_probabilities_of_tokens_with_one_text_are_told_apart(generator):
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
    engine = Scripted(generator, "", tokenizer)
    engine.tokens = [byte]
    engine.top = [(plain, -0.5), (spaced, -1.0), (unspaced, -1.5)]
    with serving(engine) as served, served.openai as client:
        logprobs = (
            client.completions.create(model="tiny", prompt="x", logprobs=3).choices[0].logprobs
        )
        assert logprobs.tokens == ["x"]
        expected = {f"token_id:{plain}": -0.5, f" {word}": -1.0, word: -1.5, "x": -3.0}
        assert logprobs.top_logprobs == [expected]
        engine.top = [(byte, -3.0), (plain, -math.inf)]
        logprobs = (
            client.completions.create(model="tiny", prompt="x", logprobs=2).choices[0].logprobs
        )
        assert logprobs.top_logprobs == [{"x": -3.0, f"token_id:{plain}": -9999.0}]


LISTED = (
    "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DROPPING = "{% for m in messages %}{{ m.role }}\n{% endfor %}"


def test_texts_reach_templates_of_parts_and_are_never_lost(served, generator):
    tokenizer = generator.tokenizer
    kept = generator.tokenizer.chat_template
    messages = [{"role": "user", "content": "What is it?"}]
    refused = r"does not show the text of messages\[0\]"
    try:
        tokenizer.chat_template = LISTED
        prompts = []
        for content in (
            "What is it?",
            [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}],
        ):
            body = {"messages": [{"role": "user", "content": content}]}
            prompts.append(served.client.post("/tokenize", json=body).json()["tokens"])
        prompts.append(generator.submit(messages, max_new_tokens=1).request.params.prompt)
        assert [tokenizer.decode(prompt) for prompt in prompts] == [
            "user: What is it?assistant: "
        ] * 3
        tokenizer.chat_template = DROPPING
        with pytest.raises(InvalidInputError, match=refused):
            generator.submit(messages, max_new_tokens=1)
        for protocol in PROTOCOLS:
            for _, error in protocol.failures(served.client):
                assert re.search(refused, error["message"])
    finally:
        tokenizer.chat_template = kept
