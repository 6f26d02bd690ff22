"""Headers of Gateway API's inference extension: classes of requests, and whose turn it is."""

from __future__ import annotations

import pytest

from hf_slospec.server.options import Objective
from hf_slospec.server.reading import FAIRNESS_ID, OBJECTIVE
from hf_slospec.server.work import Work
from tests.server.conftest import serving
from tests.server.hostile.clients import metrics_of

BODY = {"prompt": "def f(x):", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def behind_a_gateway(generator):
    objectives = {
        "chat": Objective(slo_tpot=3.0, slo_e2e=900.0),
        "batch": Objective(best_effort=True, slo_tpot=3.0),
    }
    with serving(generator, objectives=objectives, trust_gateway=True) as made:
        yield made


def test_an_objective_is_a_class_of_requests(behind_a_gateway):
    def asked(objective, **body):
        headers = {} if objective is None else {OBJECTIVE: objective}
        with behind_a_gateway.openai as client:
            answer = client.completions.create(
                model="tiny", **BODY, extra_headers=headers, extra_body=body
            )
        found = answer.model_dump()["usage"]["metrics"]
        return found["slo_tpot"], found["slo_e2e"], found["guaranteed"]

    assert asked("chat") == (3.0, 900.0, True)
    assert asked("chat", slo_tpot=7.0) == (7.0, 900.0, True)
    assert asked("batch") == (3.0, None, False)
    assert asked("batch", best_effort=False) == (3.0, None, True)
    assert asked("unknown") == asked(None) == (None, None, False)
    counts = metrics_of(behind_a_gateway.client)
    assert [counts[f'requests_by_objective_total{{objective="{name}"}}'] for name in ("chat", "batch", "other")] == [
        2.0, 2.0, 1.0,
    ]  # fmt: skip


def test_a_trusted_gateways_clients_take_turns(served, behind_a_gateway, monkeypatch):
    clients = set()
    run = Work.run

    async def watched(self, client, *arguments, **options):
        clients.add(client)
        return await run(self, client, *arguments, **options)

    monkeypatch.setattr(Work, "run", watched)
    for client, expected in ((served.client, 1), (behind_a_gateway.client, 2)):
        clients.clear()
        for name in ("one", "two"):
            answer = client.post("/v1/completions", json=BODY, headers={FAIRNESS_ID: name})
            assert answer.status_code == 200
        assert len(clients) == expected
