"""Memory that torch and the C library keep on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_slospec.models.cpu.memory import KERNELS, VARIABLES

SCRIPT = "import os, hf_slospec; print(*(os.environ[name] for name in {names!r}))"


@pytest.mark.parametrize("given", [{}, {VARIABLES[0]: "32"}])
def test_importing_the_package_limits_the_kernels_unless_a_variable_is_set(given: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | given
    script = SCRIPT.format(names=VARIABLES)
    found = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout.split() == [given.get(name, str(KERNELS)) for name in VARIABLES]
