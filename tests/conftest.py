"""Fixtures shared by the tests of real models."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="hf_slospec-tests-")  # no profiles in the user's own cache

import pytest
import torch
from hypothesis import settings
from transformers.utils import logging

from hf_slospec.generate.speculator import MEASURE_S
from hf_slospec.models.cpu import kernel_choice

settings.register_profile("untimed", deadline=None)  # how long an example takes says nothing on a shared machine
settings.load_profile("untimed")
logging.set_verbosity_error()
logging.disable_progress_bar()
MEASURE_S.update(target=0.2, draft=0.1)  # step times decide the shapes of draft trees, never the text
kernel_choice.REPEATS, kernel_choice.MEASURED_BYTES = 1, 2**20  # neither do the kernels
pytest.register_assert_rewrite("tests.support")  # before any test imports it


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
