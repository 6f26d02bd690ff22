"""Null in a request's body means the same as leaving the field out, for every optional field of
every endpoint.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import BaseModel

from hf_slospec.server import anthropic, bodies, chats, responses
from hf_slospec.server.bodies import CompletionBody, DetokenizeBody
from hf_slospec.server.chats import ChatBody, TokenizeBody
from tests.server.conftest import serving
from tests.server.protocols import USER
from tests.server.scripted import Scripted

# The body of each endpoint, and its required fields.
ENDPOINTS = {
    "/v1/chat/completions": (ChatBody, {"messages": [USER]}),
    "/v1/completions": (CompletionBody, {"prompt": "def main():"}),
    "/v1/responses": (responses.ResponsesBody, {"input": "pass"}),
    "/v1/messages": (anthropic.MessagesBody, {"messages": [USER], "max_tokens": 9}),
    "/v1/messages/count_tokens": (anthropic.CountTokensBody, {"messages": [USER]}),
    "/tokenize": (TokenizeBody, {"prompt": "pass"}),
    "/detokenize": (DetokenizeBody, {"tokens": [5]}),
}
VARYING = ("id", "item_id", "created", "created_at", "metrics")


class Recorded:
    def __init__(self, client, orders):
        self.client = client
        self.orders = orders

    def outcome(self, path, body):
        """What the engine was asked for, and the answer without what differs from request to request."""
        self.orders.clear()
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, (body, answer.text)
        return [replace(order, request_id="", client="") for order in self.orders], stable(
            answer.json()
        )


def stable(value):
    if isinstance(value, dict):
        return {name: stable(each) for name, each in value.items() if name not in VARYING}
    return [stable(each) for each in value] if isinstance(value, list) else value


@pytest.fixture(scope="module")
def recorded(generator):
    engine = Scripted(generator, "return\n")
    engine.response_template = None
    with serving(engine) as served:
        yield Recorded(served.client, engine.orders)


@pytest.mark.parametrize("path", ENDPOINTS)
def test_null_is_the_default_of_every_optional_field(recorded, path):
    kind, body = ENDPOINTS[path]
    expected = recorded.outcome(path, body)
    optional = [name for name, field in kind.model_fields.items() if name not in body]
    assert not any(kind.model_fields[name].is_required() for name in optional)
    for name in optional:
        assert recorded.outcome(path, body | {name: None}) == expected, name
    assert (
        recorded.outcome(path, body | dict.fromkeys([*optional, "a_field_of_later_versions"]))
        == expected
    )


def test_no_model_of_bodies_takes_nulls_in_another_way():
    for module in (bodies, chats, anthropic, responses):
        for name, kind in vars(module).items():
            if (
                isinstance(kind, type)
                and issubclass(kind, BaseModel)
                and kind.__module__ == module.__name__
            ):
                assert issubclass(kind, bodies.ClosedModel) or name == "Message"
