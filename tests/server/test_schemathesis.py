"""Requests that schemathesis makes up from the server's own description: none is answered by a fault of the server."""

from __future__ import annotations

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings

from tests.server.conftest import Served


@pytest.fixture(scope="session")
def api(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


schema = schemathesis.pytest.from_fixture("api")


@schema.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_by_a_fault_of_the_server(case: Any) -> None:
    if isinstance(case.body, dict) and case.path.startswith("/v1/"):
        case.body["max_tokens"] = 4  # the default of chats is long
        case.body.pop("max_completion_tokens", None)
    answer = case.call(timeout=120.0)
    assert answer.status_code < 500
    if answer.status_code >= 400 and answer.status_code != 405:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
