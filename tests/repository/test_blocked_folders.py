"""The core without the other folders of the package: its tests pass as if they had been deleted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.paths import ROOT

CORE = "tree request engine policies scheduler drafters generate batcher model".split()
FOLDERS = ("cpu", "cuda", "families", "heads", "server", "replicas", "lab")
# Files of the core's tests that take seconds.
FAST = (
    "tree",
    "request",
    "engine",
    "policies",
    "scheduler",
    "generate/test_enable.py",
    "batcher/test_submit.py",
)


def run_without(folders, tests):
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, *(f"tests/{name}" for name in tests)],
        env=os.environ | {"BLOCKED": ",".join(folders)},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]


def test_tests_of_the_core_pass_without_any_other_folder():
    run_without(FOLDERS, FAST)


@pytest.mark.nightly
@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_of_the_core_pass_without(folder):
    run_without([folder], CORE)
