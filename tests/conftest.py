"""Fixtures shared by the tests of real models."""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["HF_ASSETS_CACHE"] = tempfile.mkdtemp(prefix="hf_slospec-tests-")  # no profiles in the user's own cache

import pytest
import torch
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
