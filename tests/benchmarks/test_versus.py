"""The comparison of servers, with a stand-in for them."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from benchmarks.clients.run_versus import (
    CONTESTANTS,
    Comparison,
    Contestant,
    Results,
    Setting,
    body_of,
    figures,
    send,
    table,
)
from benchmarks.peers.protocol import Settings
from tests.support import stand_in_server

STAND_IN = Path(stand_in_server.__file__)
SETTINGS = {"rates": [50.0]}


def setting(folder):
    return Setting(Settings(folder, folder, 1, "native", 64, [2]), 4)


def job(number, new=8, salt="", tpot=60.0, ttft=60.0, at_s=0.0, name="chat"):
    slos = dict(slo_tpot=tpot, slo_ttft=ttft)
    return dict(at_s=at_s, name=name, ids=[1] * (3 + number), text="a", new=new, targets=slos,
                options=dict(cache_salt=salt))  # fmt: skip


@pytest.fixture
def url():
    server = ThreadingHTTPServer(("127.0.0.1", 0), stand_in_server.Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def sent(url, jobs, timeout_s=60.0):
    ours = CONTESTANTS[0]
    bodies = [body_of(ours, setting(Path()), one) for one in jobs]
    return asyncio.run(send(url, bodies, jobs, timeout_s))


def test_latencies_of_streams_are_the_clients(url):
    jobs = [job(0), job(1, at_s=0.1), job(2, new=2, name="code"), job(3, tpot=1e-9, name="code")]
    run = sent(url, jobs)
    chat, later, single, hurried = run["requests"]
    assert [one["tokens"] for one in run["requests"]] == [8, 8, 2, 8]
    assert chat["ttft_s"] > 0
    assert chat["tpot_s"] > 0
    assert single["tpot_s"] == 0.0  # both tokens in one event
    assert [one["attained"] for one in run["requests"]] == [True, True, True, False]
    assert run["seconds"] > later["at_s"] == 0.1
    found = figures([run, run])
    assert (found["requests"], found["errors"], found["rounds"]) == (8, 0, 2)
    assert found["attained"]["mean"] == 0.75
    assert found["goodput"]["mean"] == pytest.approx(18 / run["seconds"])
    assert found["tokens_per_s"] == pytest.approx(26 / run["seconds"])
    assert found["classes"]["code"]["attained"]["mean"] == 0.5
    assert found["classes"]["chat"]["tokens"] == 8
    assert found["classes"]["code"]["tpot_s"][0] == pytest.approx(hurried["tpot_s"] / 2, abs=1e-4)


def test_requests_that_fail_are_counted_and_attain_nothing(url):
    run = sent(url, [job(n, salt=salt) for n, salt in enumerate(("refused", "broken", "silent"))])
    errors = [one["error"] for one in run["requests"]]
    assert errors[0] == "status 400: no such field"
    assert "out of memory" in errors[1]
    assert errors[2] == "no text, 8 tokens"
    late = sent(url, [job(4, new=400)], timeout_s=0.2)
    assert late["requests"][0]["error"].startswith("TimeoutError")
    found = figures([run, late])
    assert (found["errors"], found["tokens_per_s"], found["attained"]["mean"]) == (4, 0, 0)
    assert found["classes"]["chat"]["ttft_s"] is None


def test_another_prompt_than_was_sent_is_an_error(url):
    other = job(0)
    body = body_of(CONTESTANTS[0], setting(Path()), other) | {"prompt": [1, 2]}
    run = asyncio.run(send(url, [body], [other], 60.0))
    assert run["requests"][0]["error"] == "3 tokens were sent as prompt, and 2 counted"


def test_a_server_that_is_gone_fails_every_request():
    run = sent("http://127.0.0.1:9", [job(0), job(1)])
    assert all("ConnectError" in one["error"] for one in run["requests"])


def test_only_one_contestant_gets_slos_and_all_get_the_same_prompt():
    one = job(0, salt="7")
    bodies = {c.name: body_of(c, setting(Path()), one) for c in CONTESTANTS}
    assert [name for name, body in bodies.items() if "slo_tpot" in body] == ["hf_slospec, SLOs"]
    prompts = {name: body["prompt"] for name, body in bodies.items()}
    assert prompts.pop("transformers serve") == "a"
    assert all(prompt == one["ids"] for prompt in prompts.values())
    assert all(body["stream"] and body["temperature"] == 0 for body in bodies.values())
    commands = [c.command(setting(Path("folder")), 8000) for c in CONTESTANTS]
    assert all("8000" in command for command in commands)


def test_a_comparison_continues_where_it_was_cut_off(tmp_path):
    python = sys.executable

    def contestant(name, *arguments):
        return Contestant(
            name, "llama", lambda _, port: [python, str(STAND_IN), str(port), *arguments],
            lambda _, own: {"prompt": own["ids"]},
        )  # fmt: skip

    path = tmp_path / "versus.json"
    results = Results.opened(path, SETTINGS)
    results.unit_s = 0.01
    good, bad = contestant("good"), contestant("bad", "exit")
    comparison = Comparison([good, bad], setting(tmp_path), results, path, 60.0, 60.0)
    loads = {0.0: [job(0)], 50.0: [job(1), job(2, at_s=0.02)]}
    for one in (good, bad):
        comparison.run(one, 0, loads)
    written = json.loads(path.read_text())
    assert [(run["server"], len(run.get("requests", []))) for run in written["runs"]] == [
        ("good", 2),
        ("bad", 0),
    ]
    assert "did not start" in written["results"]["50.0"]["bad"]["error"]
    assert "no such model" in (tmp_path / "logs" / "versus-bad-round-0.log").read_text()

    again = Results.opened(path, SETTINGS)
    assert again.unit_s == 0.01
    continued = Comparison([good, bad], setting(tmp_path), again, path, 60.0, 60.0)
    recorded = again.runs[0]
    continued.run(good, 0, loads)  # has its run already
    assert again.runs[0] is recorded
    continued.run(contestant("bad"), 0, loads)  # starts this time
    assert [run["server"] for run in again.runs] == ["good", "bad"]
    assert again.summary()["50.0"]["bad"]["requests"] == 2
    assert "| 50.0 | bad | 100 (34 to 100) |" in table(again.summary())
    with pytest.raises(SystemExit, match="other settings"):
        Results.opened(path, {"rates": [1.0]})
