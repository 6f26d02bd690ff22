"""Overrides of layers and functions are in force in one thread, for one forward."""

from __future__ import annotations

import threading

import torch
import torch.nn.functional as F
from torch import nn

from hf_slospec.assembly import load_plugins
from hf_slospec.model import linear_overrides as overrides
from hf_slospec.model.linear_overrides import (
    LinearOverride,
    OverrideOptions,
    Overrides,
    register_override,
)
from tests.support.packed import CHANGED, overridden

ONES = torch.ones(1, 2)


class Scaled(LinearOverride):
    """Multiplies the outputs of layers of one class; stands for quantised weights."""

    def __init__(self, kind=nn.Linear, factor=2.0):
        self.kind = kind
        self.factor = factor
        self.num_renewed = 0

    @property
    def num_bytes(self):
        return 7

    def make(self, linear):
        if type(linear) is not self.kind:
            return None
        return lambda original, layer, *inputs: self.factor * original(layer, *inputs)

    def renew(self, version):
        self.num_renewed += 1


class ScaledGelu(LinearOverride):
    @property
    def functions(self):
        return {(F, "gelu"): lambda original, *inputs: 3 * original(*inputs)}


class Inherited(nn.Linear):
    """Has the forward of its base class."""


def test_the_first_override_that_a_kind_makes_counts():
    model = nn.Sequential(nn.Linear(2, 2), Inherited(2, 2))
    ours = overridden(model, Scaled(), Scaled(factor=5.0), Scaled(Inherited, 3.0))
    plain = [layer(ONES) for layer in model]
    with ours.in_force():
        torch.testing.assert_close(model[0](ONES), 2 * plain[0])
        torch.testing.assert_close(model[1](ONES), 3 * plain[1])
    assert ours.num_bytes == 21 and torch.equal(model[0](ONES), plain[0])


def test_functions_and_layers_of_other_threads_are_their_own():
    model = nn.Linear(2, 2)
    plain = model(ONES), F.gelu(ONES)
    ours = overridden(model, Scaled(), ScaledGelu())
    results: list[torch.Tensor] = []
    with ours.in_force():
        torch.testing.assert_close(F.gelu(ONES), 3 * plain[1])
        thread = threading.Thread(target=lambda: results.extend((model(ONES), F.gelu(ONES))))
        thread.start()
        thread.join()
    assert all(map(torch.equal, results, plain))


def test_overrides_are_made_when_needed_and_after_each_change():
    model = nn.Sequential(nn.Linear(2, 2))
    kind = Scaled()
    ours = Overrides(model, [kind], is_needed=False)
    ours.renew(CHANGED)
    assert not ours.layers and not kind.num_renewed
    ours.need(True)
    assert list(ours.layers) == list(model) and kind.num_renewed == 1
    model.append(nn.Linear(2, 2))
    ours.renew(CHANGED)
    assert list(ours.layers) == list(model)
    ours.need(False)
    assert not ours.layers and not ours.attributes


def scaled(model, options):
    return Scaled() if options.prepack else None


def test_another_package_can_add_an_override(monkeypatch):
    load_plugins()
    monkeypatch.setattr(overrides, "_factories", [])
    register_override(scaled)
    register_override(scaled)
    for prepack in (True, False):
        made = Overrides.of(nn.Linear(2, 2), OverrideOptions(prepack=prepack))
        assert [type(kind) for kind in made.kinds] == [Scaled] * prepack
