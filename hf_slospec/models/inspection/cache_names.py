"""Names of the K/V cache: ``cache`` since transformers 5.24, before ``past_key_values``, Mamba's ``cache_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from transformers.cache_utils import DynamicCache
from transformers.generation.utils import ALL_CACHE_NAMES

from hf_slospec.models.inspection.properties import argument_names

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
# The name that this transformers' own functions, layers and outputs have for it.
CACHE_NAME: str = next(name for name in CACHE_NAMES if name in ALL_CACHE_NAMES)


def cache_option(cache: Any, model: Any = None) -> dict[str, Any]:
    """Return a cache as the argument of a model's forward; without a model, of a layer of transformers."""
    names = () if model is None else argument_names(model)
    return {next((name for name in CACHE_NAMES if name in names), CACHE_NAME): cache}


def given_cache(arguments: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the cache among arguments with the name that it has there; None if there is none."""
    given = [(name, arguments[name]) for name in CACHE_NAMES if arguments.get(name) is not None]
    return given[0] if given else (CACHE_NAME, None)


def has_states_only(model: Any) -> bool:
    """Return whether all layers of the model keep a state in place of K and V, so that it takes no mask."""
    if model not in _has_states_only:
        is_linear = DynamicCache(config=model.config.get_text_config(decoder=True)).is_linear
        _has_states_only[model] = "cache_params" in argument_names(model) or (bool(is_linear) and all(is_linear))
    return _has_states_only[model]


_has_states_only = WeakKeyDictionary[Any, bool]()
