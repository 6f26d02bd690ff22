"""The cache that layers of a packed forward get."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model.attention.forward import PackedForward
from hf_slospec.model.batch import AttentionLayer, LayerShape
from tests.support.toys.tiny_models import tiny_model
from tests.support.toys.trees import stored


def test_k_and_v_go_with_their_layer(monkeypatch):
    cached = list[Any]()
    num_alive = list[int]()
    update = PackedForward.update

    def counted(self, key, value, *others, **named):
        num_alive.append(sum(earlier() is not None for earlier in cached))
        cached.extend((ref(key), ref(value)))
        return update(self, key, value, *others, **named)

    model = tiny_model("llama")
    generator = SLOSpecGenerator(model, config=SLOSpecConfig(policy="none", compile=False))
    inputs = torch.tensor([[3, 4, 5, 6]])
    generator.generate(inputs, max_new_tokens=1)  # with the trial
    monkeypatch.setattr(PackedForward, "update", counted)
    generator.generate(inputs, max_new_tokens=3)
    assert len(num_alive) == 3 * model.config.num_hidden_layers and not any(num_alive)


def test_an_id_that_was_used_before_is_not_taken_for_its_tensor():
    key, value, gone = (torch.empty(1) for _ in range(3))
    forward = PackedForward(*[None] * 3, [], torch.zeros(1, 1))  # type: ignore[arg-type]
    layer = AttentionLayer(LayerShape(stored(1, 1), stored(1, 1))), key, value
    forward._cached[id(key), id(value)] = ref(key), ref(value), layer
    assert forward.cached(key, value) is layer
    forward._cached[id(key), id(value)] = ref(gone), ref(value), layer
    assert forward.cached(key, value) is None
