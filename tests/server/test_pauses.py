"""Clients that run a tool and come back with the whole conversation: the K/V of what they sent
before is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hf_slospec import SLOSpecGenerator, tiny_prompts
from hf_slospec.server.app import ServerSettings, make_app
from hf_slospec.server.engine import LocalEngine
from hf_slospec.server.options import SLOLimits
from tests.server.conftest import Served, listening

ONE = "key-of-one"
OTHER = "key-of-another"
TASK = "\n".join(tiny_prompts()[:2])
RESULT = "42\n" * 4


@pytest.fixture
def url(generator: SLOSpecGenerator) -> Iterator[str]:
    generator.stop()
    generator.start()  # nothing is kept of other tests
    settings = ServerSettings(model_name="tiny", api_keys={ONE: SLOLimits(), OTHER: SLOLimits()})
    with listening(make_app(LocalEngine(generator), settings)) as found:
        yield found


def post(url: str, path: str, key: str = ONE, **body: Any) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(
        f"{url}{path}", json={"temperature": 0} | body, headers=headers, timeout=120.0
    )
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def in_pause(url: str) -> None:
    """Another client has its conversation meanwhile."""
    post(url, "/v1/completions", OTHER, prompt=TASK[::-1], max_tokens=8)


def test_a_chat_that_comes_back_with_the_result_of_a_tool_prefills_no_more_than_that(
    url: str,
) -> None:
    chat = [{"role": "user", "content": TASK}]
    call = post(url, "/v1/chat/completions", messages=chat, max_tokens=24)
    in_pause(url)
    chat += [
        call["choices"][0]["message"] | {"role": "assistant"},
        {"role": "tool", "content": RESULT},
    ]
    messages = [{name: message[name] for name in ("role", "content")} for message in chat]
    usages = {
        key: post(url, "/v1/chat/completions", key, messages=messages, max_tokens=4, slo_ttft=30.0)[
            "usage"
        ]
        for key in (OTHER, ONE)
    }
    cached = {key: usage["prompt_tokens_details"]["cached_tokens"] for key, usage in usages.items()}
    before = call["usage"]
    assert cached[OTHER] == 0
    assert (
        before["prompt_tokens"] + before["completion_tokens"] - 3
        <= cached[ONE]
        < usages[ONE]["prompt_tokens"]
    )
    assert usages[ONE]["metrics"]["attained"]  # the pause is in no SLO


def test_items_of_a_response_that_are_sent_back_are_found(url: str) -> None:
    items: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    first = post(url, "/v1/responses", input=items, max_output_tokens=24)
    in_pause(url)
    items += [*first["output"], {"role": "user", "content": RESULT}]
    second, other = (
        post(url, "/v1/responses", key, input=items, max_output_tokens=4) for key in (ONE, OTHER)
    )
    assert other["usage"]["input_tokens_details"]["cached_tokens"] == 0
    assert (
        second["usage"]["input_tokens_details"]["cached_tokens"]
        >= first["usage"]["total_tokens"] - 3
    )


def test_responses_are_not_stored(served: Served) -> None:
    """The items are sent again: their K/V is found as well, and there is no text to look after."""
    answer = served.client.post(
        "/v1/responses", json={"input": "x", "previous_response_id": "resp_1"}
    )
    assert (
        answer.status_code == 400
        and "send the earlier items as input" in answer.json()["error"]["message"]
    )
