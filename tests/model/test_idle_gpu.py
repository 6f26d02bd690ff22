"""The notice about a GPU that is not used."""

from __future__ import annotations

import logging
import warnings

import torch

from hf_slospec import enable
from hf_slospec.model import checked_model
from hf_slospec.model.machine import log_idle_gpu
from tests.support.toys.tiny_models import tiny_model


def test_it_is_logged_once_and_is_no_warning_that_could_be_an_error(monkeypatch, caplog):
    def is_available():
        warnings.warn("the driver is old", stacklevel=1)
        return True

    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    log_idle_gpu.cache_clear()
    with caplog.at_level(logging.WARNING):
        log_idle_gpu()
        log_idle_gpu()
    assert caplog.text.count("the model is on the CPU, and there is a GPU (Some GPU)") == 1
    log_idle_gpu.cache_clear()


def test_models_on_the_cpu_are_noticed(monkeypatch):
    noticed = []
    monkeypatch.setattr(checked_model, "log_idle_gpu", lambda: noticed.append(True))
    enable(tiny_model("llama"))
    assert noticed
