"""Memory that torch and the C library keep on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_slospec.model import host_memory as memory
from hf_slospec.model.host_memory import ALLOCATOR_VARIABLES, KERNELS, VARIABLES

SCRIPT = "import os, hf_slospec; print(*(os.environ[name] for name in {names!r}))"
# Threads take turns in needing 40 MiB, and stay; prints the MiB by which the process has grown
# since the first.
THREADS = """
import ctypes, threading
import psutil
from hf_slospec.model import host_memory as memory

library, block, number = memory._gnu_library(), 8 * 2**20, 6
library.free(library.malloc(31 * 2**20))  # from now on blocks of this size are kept
resident, may_end = [], threading.Event()

def work():
    blocks = [library.malloc(block) for _ in range(5)]
    for address in blocks:
        ctypes.memset(address, 1, block)
    for address in blocks:
        library.free(address)
    memory.{name}()
    resident.append(psutil.Process().memory_info().rss)
    is_done.set()
    may_end.wait()

for _ in range(number):
    is_done = threading.Event()
    threading.Thread(target=work).start()
    is_done.wait()
may_end.set()
print((resident[-1] - resident[0]) // 2**20)
"""


@pytest.mark.parametrize("given", [{}, {VARIABLES[0]: "32"}])
def test_importing_the_package_limits_the_kernels_unless_a_variable_is_set(given):
    environment = {
        name: value for name, value in os.environ.items() if name not in VARIABLES
    } | given
    script = SCRIPT.format(names=VARIABLES)
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert found.stdout.split() == [given.get(name, str(KERNELS)) for name in VARIABLES]


@pytest.mark.skipif(memory._gnu_library() is None, reason="needs GNU's C library")
@pytest.mark.parametrize(
    ("name", "is_flat"), [("return_freed_memory", True), ("_gnu_library", False)]
)
def test_memory_that_threads_needed_is_returned(name, is_flat):
    environment = {
        name: value for name, value in os.environ.items() if name not in ALLOCATOR_VARIABLES
    }
    command = [sys.executable, "-c", THREADS.format(name=name)]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert (int(found.stdout) < 40) == is_flat  # 200 MiB if every thread keeps what it needed
