"""SmolLM2-135M-Instruct in fp32 writes what stock ``generate`` writes, by every way to call the
package.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from typer.testing import CliRunner

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.app import app
from hf_slospec.demo.generator import DemoGenerator
from hf_slospec.demo.personas import PERSONAS
from hf_slospec.generate.grammars import Grammars
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.loading import load_pair
from tests.server.conftest import listening
from tests.support.breadth import EXHAUSTIVE, nightly_rows_but, quick_or
from tests.support.served_pair import WAIT_S

Stock = Callable[..., torch.Tensor]

GREEDY: dict[str, Any] = dict(do_sample=False)
SAMPLED: dict[str, Any] = dict(do_sample=True, temperature=1.0, top_k=0)
FILTERED: dict[str, Any] = dict(do_sample=True, temperature=0.7, top_p=0.9, repetition_penalty=1.1)
DRAFTERS = ("lookup", "suffix", "lookup+suffix")
ALWAYS = SLOSpecConfig(policy="fixed", max_depth=4, max_width=2, check_invariants=True)
TEMPLATE_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "is_capital": {"type": "boolean"}},
    "required": ["city", "is_capital"],
    "additionalProperties": False,
}


def texts_of(questions, batch):
    kinds = ("translation", "math_reasoning", "coding", "qa")
    return [questions[kind][3] for kind in kinds[:batch]]


@pytest.mark.parametrize(
    ("batch", "options"),
    nightly_rows_but([(1, GREEDY)], [(1, GREEDY), (4, GREEDY), (4, SAMPLED), (1, FILTERED)]),
    ids=["1 greedy", "greedy", "sampled", "1 filtered"],
)
def test_generate(smollm2, questions, stock, options, batch):
    inputs = smollm2.encoded(texts_of(questions, batch))
    expected = stock(smollm2, inputs, max_new_tokens=16, **options)
    for drafter in DRAFTERS if EXHAUSTIVE and options is GREEDY and batch == 1 else DRAFTERS[-1:]:
        ours = SLOSpecGenerator(
            smollm2.model, tokenizer=smollm2.tokenizer, drafter=drafter, config=ALWAYS
        )
        torch.manual_seed(7)
        assert torch.equal(ours.generate(**inputs, max_new_tokens=16, **options), expected), drafter


@pytest.mark.nightly
def test_a_prompt_of_two_thousand_tokens(smollm2, questions, stock):
    text = "Summarize: " + " ".join(questions["summarization"][:4])
    inputs = smollm2.encoded([text], max_tokens=2100)
    assert inputs["input_ids"].shape[1] > 2000
    expected = stock(smollm2, inputs, max_new_tokens=16, do_sample=False)
    ours = SLOSpecGenerator(smollm2.model, tokenizer=smollm2.tokenizer, drafter="suffix")
    assert torch.equal(ours.generate(**inputs, max_new_tokens=16, do_sample=False), expected)


def test_the_batcher_with_stop_strings_and_schemas(smollm2, questions, stock):
    tokenizer = smollm2.tokenizer
    grammars = Grammars(tokenizer, smollm2.model.config.vocab_size, [tokenizer.eos_token_id])
    prompts = [
        smollm2.encoded([text], max_tokens=quick_or(60, 200)) for text in texts_of(questions, 4)
    ]
    num_new = quick_or(8, 14)

    def options_of(index):
        length = prompts[index]["input_ids"].shape[1]
        return [
            dict(do_sample=False, max_new_tokens=num_new),
            dict(do_sample=False, max_new_tokens=num_new, stop_strings=["the", "."]),
            dict(
                do_sample=False,
                max_new_tokens=48,
                logits_processor=[grammars.processor(SCHEMA, length)],
            ),
            dict(max_new_tokens=num_new, **FILTERED),
        ][index]

    with SLOSpecGenerator(smollm2.model, tokenizer=tokenizer, drafter="lookup+suffix") as generator:
        handles = [
            generator.submit(
                inputs["input_ids"],
                seed=7 if index == 3 else None,
                slo_tpot=5.0 if index % 2 else None,
                **options_of(index),
            )
            for index, inputs in enumerate(prompts)
        ]
        results = [handle.result(WAIT_S) for handle in handles]
    for index, (inputs, result) in enumerate(zip(prompts, results, strict=True)):
        extra = {"tokenizer": tokenizer} if index == 1 else {}
        expected = stock(smollm2, inputs, **options_of(index), **extra)[
            0, inputs["input_ids"].shape[1] :
        ]
        assert result.token_ids == expected.tolist()
    assert json.loads(tokenizer.decode(results[2].token_ids, skip_special_tokens=True)).keys() == {
        "city",
        "is_capital",
    }


def test_the_server_answers_chats(smollm2, stock):
    tools: Any = [{"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}]
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    tokenizer = smollm2.tokenizer

    def stock_answer(**given):
        inputs = dict(
            tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt", **given
            )
        )
        expected = stock(smollm2, inputs, max_new_tokens=24, do_sample=False)[
            0, inputs["input_ids"].shape[1] :
        ]
        return tokenizer.decode(expected, skip_special_tokens=True)

    own_template = tokenizer.chat_template
    with SLOSpecGenerator(smollm2.model, tokenizer=tokenizer, drafter="suffix") as generator:

        def answer(**given):
            options: Any = dict(max_tokens=24, temperature=0) | given
            with (
                listening(
                    make_app(LocalEngine(generator), ServerSettings(model_name="smol"))
                ) as url,
                openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
            ):
                answer = client.chat.completions.create(model="smol", messages=messages, **options)
                return answer.choices[0].message.content

        assert (text := answer()) == stock_answer() and text is not None and "Paris" in text
        form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
        found = json.loads(answer(max_tokens=64, response_format=form) or "")
        assert found.keys() == {"city", "is_capital"}
        with pytest.raises(
            openai.BadRequestError, match="tools"
        ):  # the model's own template drops them
            answer(tools=tools)
        try:
            tokenizer.chat_template = TEMPLATE_WITH_TOOLS
            assert answer(tools=tools) == stock_answer(tools=tools)
        finally:
            tokenizer.chat_template = own_template


@pytest.mark.nightly
def test_the_demo_asks_in_the_chat_template_and_answers_end(smollm2):
    with SLOSpecGenerator(
        smollm2.model, tokenizer=smollm2.tokenizer, drafter="suffix"
    ) as generator:
        demo = DemoGenerator(generator)
        request = (
            PERSONAS[0].request(1.0, 1.0, demo.is_chat).model_copy(update={"temperature": 0.0})
        )
        handle = demo.submit(request.prompt, **request.options)
        handle.result()
        assert handle.finish_reason == "stop"
        text = "".join(piece.text for piece in handle.pieces)
        assert text.startswith("```python\nclass Stack:") and "<|im_" not in text


@pytest.mark.nightly
def test_a_gguf_file_has_the_tokenizer_of_its_folder(smollm2):
    tokenizer = load_pair(
        str(smollm2.folder / "model.gguf"), None, "tiny", "bfloat16", "cpu"
    ).tokenizer
    assert tokenizer.chat_template == smollm2.tokenizer.chat_template
    assert tokenizer.eos_token == smollm2.tokenizer.eos_token


@pytest.mark.nightly
def test_check_finds_it_exact(smollm2, tmp_path):
    (tmp_path / "prompts.txt").write_text(
        "The capital of France is\nOnce upon a time\n", encoding="utf-8"
    )
    options = [
        "--dtype",
        "float32",
        "--prompts",
        str(tmp_path / "prompts.txt"),
        "--max-new-tokens",
        "8",
    ]
    result = CliRunner().invoke(
        app, ["check", str(smollm2.folder), *options, "--repeats", "0", "--seconds", "10000"]
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("### hf_slospec check: exact\n")
