"""Requests that schemathesis makes up from the server's own description: none is answered by a
fault of the server.
"""

from __future__ import annotations

import schemathesis
from hypothesis import HealthCheck, given, settings

# The field of each path that limits the output.
MAX_TOKENS = {"/v1/responses": "max_output_tokens"} | dict.fromkeys(
    ("/v1/chat/completions", "/v1/completions", "/v1/messages"), "max_tokens"
)


def test_no_request_is_answered_by_a_fault_of_the_server(served):
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) >= 12
    for operation in operations:

        @settings(
            max_examples=6,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            database=None,
        )
        @given(case=operation.as_strategy())
        def check(case):
            if isinstance(case.body, dict) and (name := MAX_TOKENS.get(case.path)):
                case.body[name] = 4  # the default of chats is long
                case.body.pop("max_completion_tokens", None)
            answer = case.call(timeout=120.0)
            assert answer.status_code < 500, answer.text
            if answer.status_code >= 400:
                of_anthropic = case.path.startswith("/v1/messages")
                expected = (
                    {"message", "type"} if of_anthropic else {"message", "type", "param", "code"}
                )
                assert set(answer.json()["error"]) == expected

        check()
