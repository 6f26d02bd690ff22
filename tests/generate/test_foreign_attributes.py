"""Attributes of models and configs whose classes compare, hash, measure or copy in ways that raise."""

from __future__ import annotations

import copy
import datetime
import functools
import threading

import numpy as np
import pandas as pd
import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.model.properties import config_values
from hf_slospec.model.version import ModelVersion
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import (
    assert_same_as_stock,
    ragged_prompts,
    tiny_copy,
    tiny_model,
)


class AskedError(Exception):
    """Raised by methods that nobody should call."""


def fail(*_, **__):
    raise AskedError


def failing(base, *names):
    """Return a class derived from ``base`` whose methods of these names raise."""
    return type(f"Failing{base.__name__}", (base,), dict.fromkeys(names, fail))


COMPARING = ("__bool__", "__eq__", "__hash__", "__len__")
CONTAINING = ("__bool__", "__eq__", "__len__", "__iter__", "__getitem__")


class WithoutTorchFunctions(torch.Tensor):
    """Tensor of which torch's functions may not be called."""

    __torch_function__ = fail


class Key:
    """Key of a dict that cannot be compared with others."""

    __eq__ = fail

    def __hash__(self):
        return 1


KEY = Key()
VALUES = {
    "array": lambda: np.arange(5),
    "series": lambda: pd.Series([1, 2]),
    "frame": lambda: pd.DataFrame({"a": [1, 2]}),
    "several numbers": lambda: torch.arange(5),
    "sparse tensor": lambda: torch.eye(3).to_sparse(),
    "nested tensor": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "oneDNN tensor": lambda: torch.ones(3, 3).to_mkldnn(),
    "tensor subclass": lambda: torch.ones(3).as_subclass(WithoutTorchFunctions),
    "object": lambda: failing(object, *COMPARING, "__getattr__", "__repr__", "__str__")(),
    "callable": lambda: failing(object, *COMPARING, "__getattr__", "__call__")(),
    "dict": lambda: failing(dict, *CONTAINING, "__hash__", "items", "keys", "values")(a=1),
    "list": lambda: failing(list, *CONTAINING, "__hash__")([1, 2]),
    "tuple": lambda: failing(tuple, *CONTAINING, "__hash__")([1, 2]),
    "str": lambda: failing(str, *COMPARING)("a"),
    "int": lambda: failing(int, *COMPARING)(3),
    "in a list": lambda: [np.arange(3), [failing(object, *COMPARING)()]],
    "in a dict": lambda: {"a": np.arange(3), KEY: pd.Series([1, 2])},
    "method": lambda: failing(list, "__eq__", "__hash__")().append,
    "partial": lambda: functools.partial(print, np.arange(3)),
    "uncopied": lambda: failing(object, "__deepcopy__", "__reduce_ex__")(),
    "lock": threading.Lock,
    "time": datetime.datetime.now,
}


def parts_of(model):
    return [model, model.model.layers[0].mlp, model.model.rotary_emb, model.config]


def give(model, value):
    """Set attributes of the model, a layer, a module without weights and the config."""
    for part in parts_of(model):
        part.label_map = value
    model.my_hooks = {"first": value}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, about sparse and nested tensors
@pytest.mark.parametrize("name", VALUES)
def test_no_attribute_stops_a_call_and_its_replacement_counts_as_a_change(name):
    target = tiny_copy("llama")
    draft = tiny_model("llama", noise=0.03)
    give(target, VALUES[name]())
    model = hf_slospec.enable(target, draft)
    version = ModelVersion(model)
    assert not version.renew() and version.modules == version.storage == 0
    generate = functools.partial(model.generate, slo_tpot=0.05)
    for part in parts_of(model):
        before = version.modules, version.storage
        part.label_map = VALUES[name]()
        assert version.renew()
        assert version.modules > before[0] and version.storage > before[1]
    assert_same_as_stock(model, generate, ragged_prompts(1), **OPTIONS)
    hf_slospec.disable(model)


def test_attributes_of_drafts_and_between_submitted_requests():
    target = tiny_copy("llama")
    draft = tiny_copy("llama", noise=0.03)
    prompt = ragged_prompts(1)["input_ids"]
    stock = target.generate(prompt, **OPTIONS)[0, prompt.shape[1] :].tolist()
    give(draft, np.arange(5))
    with SLOSpecGenerator(target, draft) as generator:
        for make in VALUES.values():
            give(target, make())
            handle = generator.submit(prompt[0].tolist(), **OPTIONS)
            assert handle.result(timeout=120).token_ids == stock


def test_rope_that_depends_on_the_length_copies_no_attribute():
    target = tiny_copy("llama")
    config = copy.deepcopy(target.config)
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    config.max_position_embeddings = 20
    model = type(target)(config).eval()
    model.load_state_dict(target.state_dict())
    give(model, failing(object, "__deepcopy__", "__reduce_ex__")())
    generator = SLOSpecGenerator(model)
    assert_same_as_stock(model, generator.generate, ragged_prompts(2), **OPTIONS)


def test_config_that_cannot_be_pickled_leaves_forwards_eager():
    target = tiny_copy("llama")
    target.config.label_map = threading.Lock()
    generator = SLOSpecGenerator(target, config=SLOSpecConfig(compile="wait"))
    assert_same_as_stock(target, generator.generate, ragged_prompts(2), **OPTIONS)
    assert "pickle" in generator.stats().forwards["target"]


def test_config_values_tell_nested_objects_and_a_config_that_holds_itself():
    config = copy.deepcopy(tiny_model("llama").config)
    array = np.arange(3)
    config.label_map = {"a": [array, torch.float16]}
    config.itself = config
    values = config_values(config)
    assert values["label_map"]["a"] == [f"numpy.ndarray at {id(array)}", "torch.float16"]
    assert values == config_values(config)
    assert values["hidden_size"] == config.hidden_size
    assert "use_cache" not in values
    config.label_map = {"a": [np.arange(3), torch.float16]}
    assert values != config_values(config)
