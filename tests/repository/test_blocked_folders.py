"""The core without the other folders of the package: its tests pass as if they had been deleted."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.repository import test_layers
from tests.support.paths import ROOT

CORE = [name for name in test_layers.CORE if (ROOT / "tests" / name).is_dir()]
FOLDERS = (*test_layers.PLUGINS, "server", "replicas", "lab")
# Files of the core's tests that take seconds.
FAST = ("engine/test_step.py", "generate/test_enable.py", "generate/test_without_plugins.py")


def run_without(folders, tests):
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-qx", "--tb=short", "-p", "no:cacheprovider"]
        + [f"tests/{name}" for name in tests],
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
