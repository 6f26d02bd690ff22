"""Gain over stock ``generate`` in two factors."""

from __future__ import annotations

import fcntl
import importlib.util
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from hf_slospec import SLOSpecConfig, load_tiny_pair
from hf_slospec.cli.benchmark import OURS, PLAIN, WITHOUT_DRAFTS, Bench, Sample
from hf_slospec.cli.gain import gain_of, measure_gain
from hf_slospec.cpu import compile_job
from hf_slospec.cpu.compile_job import LOCK, no_compiler
from hf_slospec.model.machine import kept_file

PROMPTS = ["def copy_file(src, dst):", "def walk(path):"]
IDS = torch.zeros(1, 4, dtype=torch.int64)


def bench(**config):
    models = load_tiny_pair()
    return Bench(*models, PROMPTS, 32, 12, SLOSpecConfig(compile=False, **config))


def samples(drafted, *, stock=(4.0, 4.0, 4.4), without=(2.0, 2.0, 2.2), ours=(1.6, 1.6, 1.6)):
    row = SimpleNamespace(tokens=13, steps=6, drafted=drafted)  # of RequestMetrics
    return {
        (PLAIN, 1): [Sample(seconds, IDS, None, None) for seconds in stock],
        (WITHOUT_DRAFTS, 1): [Sample(seconds, IDS, [row], []) for seconds in without],
        (OURS, 1): [Sample(seconds, IDS, [row], []) for seconds in ours],
    }


def test_factors_multiply_to_the_total():
    gain = gain_of(bench(), samples(drafted=12), 1)
    assert (gain.steps, gain.total, gain.drafts) == (2.0, 2.5, 1.25)
    assert (gain.tokens_per_step, gain.drafted_per_step) == (2.0, 2.0)
    assert gain.range == (2.5, 2.75) and gain.is_equal and not gain.is_disturbed
    assert str(gain) == (
        "batch 1: 2.50x the speed of stock generate (2.50x to 2.75x in single runs) = "
        "2.00x by faster steps x 1.25x by drafts; 2.00 tokens per step, "
        "2.0 nodes drafted per step"
    )


def test_no_gain_is_credited_to_drafts_where_none_were_made():
    """Whatever the runs with a drafter took."""
    gain = gain_of(bench(), samples(drafted=0, ours=(0.5, 0.5, 0.5)), 1)
    assert gain.drafts == 1.0 and gain.total == gain.steps
    assert "by drafts" not in str(gain)
    assert "nothing was drafted: the policy auto predicts that drafts do not pay" in str(gain)
    gain = gain_of(bench(policy="none"), samples(drafted=0), 1)
    assert str(gain).endswith("nothing was drafted: the policy is none")


def test_other_load_is_named_by_stocks_times():
    gain = gain_of(bench(), samples(drafted=1, stock=(4.0, 9.0, 4.0)), 1)
    assert gain.is_disturbed and "other processes disturbed them" in str(gain)
    assert gain.total == 2.5


@pytest.mark.parametrize("policy", ["fixed", "none"])
def test_a_measured_gain(policy):
    shown = []
    gain = measure_gain(bench(policy=policy), 2, repeats=1, show=shown.append)
    assert gain.is_equal and gain.batch == 2 and gain.tpot_s > 0.0
    assert (gain.drafted_per_step > 0) == (policy == "fixed") == (gain.why_no_drafts is None)
    assert "run 1 of 1: hf_slospec at batch 2" in shown


def test_measurements_wait_for_a_compiler_and_keep_others_from_starting():
    path = kept_file("compiled", "", "").parent / LOCK
    waiting = threading.Event()
    entered = threading.Event()
    leave = threading.Event()

    def measure():
        waiting.set()
        with no_compiler():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=measure)
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread.start()
        waiting.wait()
        assert not entered.wait(0.1)
    assert entered.wait(60)
    with open(path, "w") as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    leave.set()
    thread.join()


def test_measurements_do_without_the_lock_on_windows(monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    spec = importlib.util.spec_from_file_location("compile_job_of_windows", compile_job.__file__)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    with module.no_compiler():
        assert module.fcntl is None
