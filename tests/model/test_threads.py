"""OpenMP threads: idle threads are released, and more threads than cores cause a warning."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from hf_slospec.model import machine as threads
from hf_slospec.model.machine import (
    available_cores,
    warn_if_contended,
    warn_if_oversubscribed,
)

SCRIPT = """
import json, os, time
import torch
import hf_slospec
from hf_slospec.generate.speculator import MEASURE_S
from hf_slospec.model.machine import release_openmp_threads

MEASURE_S.update(target=0.1, draft=0.1)

def count():
    return len(os.listdir("/proc/self/task"))

def settled(most):
    until = time.monotonic() + 30.0
    while count() > most and time.monotonic() < until:  # a thread that was let go takes a moment to end
        time.sleep(0.01)
    return count()

def compute():
    return torch.ones(1_000_000).sum().item()

def generate():
    gen.generate(**tokenizer("def f(", return_tensors="pt"), max_new_tokens=4)

torch.set_num_threads(2)
target, draft, tokenizer = hf_slospec.load_tiny_pair()
gen = hf_slospec.SLOSpecGenerator(target, draft, tokenizer, hf_slospec.SLOSpecConfig(max_depth=2))
generate()  # other libraries start threads of their own, once
first, with_team = compute(), count()
release_openmp_threads()
released, again = settled(with_team - 1), compute()
generate()
after_generate = settled(released)
compute()
with gen:
    gen.submit("def f(", max_new_tokens=4).result(60)
    at_rest = settled(released + 1)  # the batcher's own thread
print(json.dumps(dict(with_team=with_team, released=released, same=first == again,
                      after_generate=after_generate, at_rest=at_rest)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_teams_are_let_go_by_those_who_rest():
    environment = os.environ | {
        "GOMP_SPINCOUNT": "0"
    }  # two threads that wait for each other leave the cores to others
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=300, env=environment
    )
    assert run.returncode == 0, run.stderr
    seen = json.loads(run.stdout.splitlines()[-1])
    if seen["with_team"] == seen["released"]:
        pytest.skip("torch does not compute with OpenMP here")
    assert seen["same"]
    assert seen["after_generate"] == seen["released"]
    assert seen["at_rest"] == seen["released"] + 1


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "20000 100000\n"}, 1),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "6400000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({}, 8),
    ],
)
def test_a_containers_quota_counts(files, expected, tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == expected


def test_a_crowd_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 10_000)
    warn_if_oversubscribed.cache_clear()
    warn_if_oversubscribed()
    warn_if_oversubscribed()
    assert caplog.text.count("10000 threads") == 1
    warn_if_oversubscribed.cache_clear()


@pytest.mark.parametrize(
    ("slower", "variables", "has_runtime", "expected"),
    [
        (5.0, {}, True, 1),
        (3.0, {}, True, 0),
        (5.0, {"GOMP_SPINCOUNT": "1000"}, True, 0),
        (5.0, {"OMP_WAIT_POLICY": "passive"}, True, 0),
        (5.0, {}, False, 0),
    ],
)
def test_threads_that_spin_beside_other_processes_are_warned_of_once(
    slower, variables, has_runtime, expected, monkeypatch, caplog
):
    for name in threads.WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(threads, "_pause", lambda: print if has_runtime else None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads._warn_of_contention.cache_clear()
    for _ in range(2):
        warn_if_contended(slower)
    assert caplog.text.count("GOMP_SPINCOUNT=1000") == expected
    threads._warn_of_contention.cache_clear()
