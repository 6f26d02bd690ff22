"""Fixtures shared by the tests of real models.

torch and the package are imported in fixtures, as pytest's process that only distributes tests
reads this file, too."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")  # compiled sooner
if (
    "PYTEST_XDIST_WORKER" not in os.environ
):  # workers share what was compiled; none uses the user's own cache
    os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="hf_slospec-tests-")
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault(
        "TRITON_INTERPRET", "1"
    )  # before kernels are defined; on a GPU, they are compiled

import pytest
from hypothesis import settings

# How long an example takes says nothing on a shared machine. Every run draws others.
settings.register_profile(
    "untimed", deadline=None, max_examples=100 if "EXHAUSTIVE" in os.environ else 40
)
settings.register_profile(
    "fuzz", deadline=None, print_blob=True, max_examples=int(os.environ.get("FUZZ_EXAMPLES", 1))
)
settings.load_profile("untimed")
pytest.register_assert_rewrite("tests.support")  # before any test imports it

from tests.support.blocked import BLOCKED, pytest_ignore_collect  # noqa: E402, F401  a hook


def pytest_configure(config):
    """Build the operators' library beside the first tests, as all workers would wait for it."""
    is_distributing = getattr(config.option, "numprocesses", None) and "cpu" not in BLOCKED
    if is_distributing and "PYTEST_XDIST_WORKER" not in os.environ:
        code = "from hf_slospec.cpu import operators; operators.build()"
        config.library = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)


# Files that take longest: one that begins last would leave the other workers idle.
LONGEST = ("test_equals_stock.py", "test_docs.py", "test_training.py", "test_cuda_stand_in.py")


def pytest_collection_modifyitems(items):
    """Begin with the longest files, as a worker runs a file as a whole."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session", autouse=True)
def _settings():
    from transformers.utils import logging

    from hf_slospec.generate.speculator import MEASURE_S

    if "lab" not in BLOCKED:
        from tests.support import policy_names  # noqa: F401  registers the policies of the lab

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    MEASURE_S.update(
        target=0.06, draft=0.03
    )  # step times decide the shapes of draft trees, never the text
    if "cpu" not in BLOCKED:
        from hf_slospec.cpu import compiled
        from hf_slospec.cpu import kernels as kernel_choice

        # neither do the kernels
        kernel_choice.REPEATS = 1
        kernel_choice.MEASURED_BYTES = 2**20
        compiled.START_S = float("inf")  # nor is anything compiled beside the tests
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tests.support.stand_ins.interpreter import multiply_by_rows

        multiply_by_rows()
    gc.freeze()  # the garbage collector shall not search all that was imported, again and again
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed():
    import torch

    torch.manual_seed(0)
