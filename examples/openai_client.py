"""OpenAI's client and the server: a stream with a TPOT SLO, two users at once, and an answer in a
JSON schema.

    python examples/openai_client.py                                  # starts a server and stops it
    python examples/openai_client.py --url http://127.0.0.1:8000/v1   # uses one that runs

A model without a chat template, such as the one that ``serve`` serves by default, continues prompts
instead of answering questions, and the last part is left out. The server's own fields are passed in
``extra_body``. What came of the SLO is in the field ``metrics`` that the server adds to ``usage``.
Without ``--url``, the server runs the embedded pair, its target inflated to about 0.1 B parameters,
and nothing is downloaded. This pair writes Python-like text, so only the form of its JSON makes
sense. Needs ``pip install -e ".[serve]"`` in the clone."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import openai
from openai.types import CompletionUsage
from pydantic import BaseModel, ConfigDict, Field
from rich.console import Console
from rich.table import Table

PROMPT = 'def fibonacci(n):\n    """Return the first n Fibonacci numbers."""\n'
QUESTION = "Write a Python function that merges two sorted lists."
USERS = {"copilot": 1.0, "summary": 4.0}  # TPOT SLOs as multiples of --slo-tpot
CHAT_TEMPLATE = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}# assistant: "
START_S = 300.0  # the first start of a model on a machine measures it


class Function(BaseModel):
    """Description of a function, which the model is asked for."""

    # Otherwise the model may add fields, and fill the answer with them.
    model_config = ConfigDict(extra="forbid")

    name: Literal["fibonacci", "factorial", "merge"]
    num_arguments: int = Field(ge=0, le=9)
    is_recursive: bool


def stream_completion(
    client: openai.OpenAI, model: str, slo_tpot: float, new_tokens: int
) -> CompletionUsage | None:
    """Stream one completion, and print its text as it comes."""
    usage = None
    stream = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=new_tokens, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"slo_tpot": slo_tpot},
    )  # fmt: skip
    print(PROMPT, end="")
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].text, end="", flush=True)
        usage = chunk.usage or usage  # in the last chunk, which has no choices
    print()
    return usage


def has_chat_template(client: openai.OpenAI, model: str) -> bool:
    """Return whether the model takes chat messages; the server refuses them if it has no chat
    template.
    """
    try:
        client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": QUESTION}], max_tokens=1
        )
    except openai.BadRequestError as error:
        if "chat template" not in error.message:
            raise
        return False
    return True


async def stream_to(
    client: openai.AsyncOpenAI,
    model: str,
    user: str,
    slo_tpot: float,
    new_tokens: int,
    is_chat: bool,
) -> CompletionUsage | None:
    """Stream the answer to one user, and print each piece of it on a line."""
    usage = None
    create = client.completions.create
    prompt = {"prompt": PROMPT}
    if is_chat:
        create, prompt = (
            client.chat.completions.create,
            {"messages": [{"role": "user", "content": QUESTION}]},
        )
    stream = await create(
        model=model, **prompt, max_tokens=new_tokens, temperature=0,
        stream=True, stream_options={"include_usage": True}, extra_body={"slo_tpot": slo_tpot},
    )  # fmt: skip
    async for chunk in stream:
        if chunk.choices and (
            piece := chunk.choices[0].delta.content if is_chat else chunk.choices[0].text
        ):
            print(f"{user} | {piece!r}", flush=True)
        usage = chunk.usage or usage
    return usage


async def stream_to_users(
    url: str, api_key: str, model: str, slos: dict[str, float], new_tokens: int, is_chat: bool
) -> dict[str, CompletionUsage | None]:
    """Stream to all users at once."""
    async with openai.AsyncOpenAI(base_url=url, api_key=api_key) as client:
        streams = (
            stream_to(client, model, user, slo, new_tokens, is_chat) for user, slo in slos.items()
        )
        return dict(zip(slos, await asyncio.gather(*streams), strict=True))


def ask_for_json(client: openai.OpenAI, model: str) -> CompletionUsage | None:
    """Print an answer that follows the JSON schema of ``Function``."""
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": f"Describe this function as JSON:\n{PROMPT}"}],
        max_tokens=512, temperature=0,
        response_format={
            "type": "json_schema", "json_schema": {"name": "function", "schema": Function.model_json_schema()},
        },
    )  # fmt: skip
    print(Function.model_validate_json(answer.choices[0].message.content or ""))
    return answer.usage


def ms(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.1f}"


def table(usages: dict[str, CompletionUsage | None]) -> Table:
    """Return what came of the requests; a server of another kind measures nothing."""
    result = Table(title="milliseconds; accepted of drafted tokens")
    for heading in (
        "request",
        "SLO",
        "TPOT",
        "TTFT",
        "guaranteed",
        "attained",
        "accepted",
        "tok/step",
    ):
        result.add_column(heading, no_wrap=True)
    for name, usage in usages.items():
        own: dict[str, Any] = ((usage and usage.model_extra) or {}).get("metrics") or {}
        draft = own.get("speculative_decoding") or {}
        rate = draft.get("draft_acceptance_rate")
        length = draft.get("mean_acceptance_length")
        slo_s = own.get("slo_tpot")
        result.add_row(
            name,
            ms(None if slo_s is None else 1e3 * slo_s),
            ms(own.get("mean_itl_ms")),
            ms(own.get("time_to_first_token_ms")),
            "yes" if own.get("guaranteed") else "no",
            {True: "yes", False: "no", None: ""}[own.get("attained")],
            "" if rate is None else f"{rate:.0%}",
            "" if length is None else f"{length:.2f}",
        )
    return result


@contextlib.contextmanager
def own_server(size: str, api_key: str) -> Iterator[str]:
    """Start a server on the embedded pair, yield its URL once it answers, and stop it at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1"
    with tempfile.TemporaryDirectory() as folder:
        template = Path(folder) / "chat_template.jinja"  # the embedded tokenizer has none
        template.write_text(CHAT_TEMPLATE, encoding="utf-8")
        command = [sys.executable, "-m", "hf_slospec", "serve", "--port", str(port), "--size", size]
        process = subprocess.Popen(
            [*command, "--chat-template", str(template)],
            env=os.environ | {"HF_SLOSPEC_API_KEY": api_key},
        )
        try:
            wait_for(url, api_key, process)
            yield url
        finally:
            process.terminate()  # requests in progress would be finished
            process.wait()


def wait_for(url: str, api_key: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server that has been started answers."""
    deadline_s = time.monotonic() + START_S
    with openai.OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        while True:
            try:
                client.models.list()
                return
            except openai.APIConnectionError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise SystemExit("the server did not start") from None
                time.sleep(0.2)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a server that runs, with /v1; default: start one")
    parser.add_argument("--api-key", default="none", help="its API key")
    parser.add_argument(
        "--size", default="0.1B", help="size of the target, if the server is started"
    )
    parser.add_argument("--slo-tpot", type=float, default=0.1, help="TPOT SLO in seconds")
    parser.add_argument("--new-tokens", type=int, default=64)
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    key = options.api_key
    slo_tpot = options.slo_tpot
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(own_server(options.size, key))
        client = stack.enter_context(openai.OpenAI(base_url=url, api_key=key))
        model = client.models.list().data[0].id

        print(f"--- a completion of {model}, streamed")
        usages = {"completion": stream_completion(client, model, slo_tpot, options.new_tokens)}
        print("--- two users at once, a line for each piece")
        slos = {user: times * slo_tpot for user, times in USERS.items()}
        is_chat = has_chat_template(client, model)
        usages |= asyncio.run(stream_to_users(url, key, model, slos, options.new_tokens, is_chat))
        if is_chat:
            print("--- an answer that follows a JSON schema")
            usages["JSON"] = ask_for_json(client, model)
    Console(width=120).print(table(usages))  # complete in a narrow terminal, too


if __name__ == "__main__":
    main()
