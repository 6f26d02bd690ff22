"""Which device a command uses."""

from __future__ import annotations

import logging

import pytest
import torch

from hf_slospec import InvalidInputError
from hf_slospec.model.machine import device_name
from hf_slospec.server import loading as devices
from hf_slospec.server.loading import chosen_device, decodes_as_stock


def has(monkeypatch, *kinds):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in kinds)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in kinds)


@pytest.mark.parametrize(
    ("kinds", "works", "expected"),
    [
        ((), True, "cpu"),
        (("cuda", "mps"), True, "cuda"),
        (("mps",), True, "mps"),
        (("mps",), False, "cpu"),
    ],
)
def test_auto_is_the_best_device_that_works(kinds, works, expected, monkeypatch, caplog):
    has(monkeypatch, *kinds)
    monkeypatch.setattr(devices, "decodes_as_stock", lambda device: works)
    with caplog.at_level(logging.WARNING):
        assert chosen_device("auto").type == expected
    assert ("is not used" in caplog.text) is (not works)


def test_a_device_that_is_named_is_used_or_refused():
    assert chosen_device("cpu") == torch.device("cpu")
    assert device_name(torch.device("cpu")).startswith("cpu")
    for name in ("abacus", "meta", "cuda" if not torch.cuda.is_available() else "cuda:99"):
        with pytest.raises(InvalidInputError, match=f"--device {name}"):
            chosen_device(name)


def test_the_trial_of_a_device(monkeypatch):
    assert decodes_as_stock(torch.device("cpu"))
    assert not decodes_as_stock(torch.device("meta"))  # raises
    monkeypatch.setattr(
        devices.SLOSpecGenerator, "generate", lambda self, ids, **options: ids
    )  # wrong output
    assert not decodes_as_stock(torch.device("cpu"))
