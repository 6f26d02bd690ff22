"""Code of a user's own that changes how tokens are computed, cached or chosen, for fuzz tests
against stock.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    DynamicCache,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from hf_slospec.model.properties import CACHE_NAME

LONG = 20  # tokens of a forward beyond which some of this code acts


@dataclass
class Nested:
    """Options of the calls of ``generate`` that callbacks make; ``slo`` only where the model is
    enabled.
    """

    options: dict[str, Any]
    slo: dict[str, Any] = field(default_factory=dict)

    def call(self, model, input_ids):
        """Return what the model writes after the last tokens.  [1, length] -> [num_rows, num_new]"""
        prompt = input_ids[-1:, -5:].clone()
        options = {"max_new_tokens": 3, "pad_token_id": 0, **self.options, **self.slo}
        return model.generate(prompt, **options)[:, prompt.shape[1] :]


def per_row(function):
    function.per_row = True
    return function


def nested_processor(model, nested):
    @per_row
    def prefer(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row in range(len(input_ids)):
            scores[row, nested.call(model, input_ids[row : row + 1])[0, -1]] += 2.0
        return scores

    return {"logits_processor": LogitsProcessorList([prefer])}


def nested_criterion(model, nested):
    @per_row
    def judge(input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        ends = [bool(nested.call(model, row[None])[0, 0] % 7 == 0) for row in input_ids]
        return torch.tensor(ends)

    return {"stopping_criteria": StoppingCriteriaList([judge])}


def nested_prefix_function(model, nested):
    def allowed(row, tokens):
        return sorted({*range(10, 60), *nested.call(model, tokens[None]).flatten().tolist()})

    return {"prefix_allowed_tokens_fn": allowed}


class _Rounding(DynamicCache):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.round(decimals=0), value_states, *args, **kwargs)


class _RoundingStatic(StaticCache):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.round(decimals=0), value_states, *args, **kwargs)


class _RoundingLayer(DynamicLayer):
    def update(self, key_states, value_states, *args, **kwargs):
        return super().update(key_states.round(decimals=0), value_states, *args, **kwargs)


def cache_of_own_class(model, nested):
    return {CACHE_NAME: _Rounding(config=model.config)}


def static_cache_of_own_class(model, nested):
    return {CACHE_NAME: _RoundingStatic(config=model.config, max_cache_len=80)}


def cache_layers_of_own_class(model, nested):
    cache = DynamicCache(config=model.config)
    cache.layers = [_RoundingLayer() for _ in range(model.config.num_hidden_layers)]
    return {CACHE_NAME: cache}


def patched_cache(model, nested):
    cache = DynamicCache(config=model.config)
    update = cache.update
    cache.update = lambda key, value, *args, **kw: update(key.round(decimals=0), value, *args, **kw)
    return {CACHE_NAME: cache}


def prepared_cache(model, nested):
    def prepare(self, generation_config, model_kwargs, *_, **__):
        model_kwargs[CACHE_NAME] = _Rounding(config=self.config)

    return with_class(model, _prepare_cache_for_generation=prepare)


def with_class(model, **methods):
    """Give the model a class of its own with these methods; no arguments are added to the call."""
    model.__class__ = type(type(model).__name__, (type(model),), methods)
    return {}


def _changed(module, change):
    def hook(_, args, output):
        return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

    module.register_forward_hook(hook)
    return {}


def decode_hook(model, nested):
    return _changed(_layer(model), lambda h: h + 0.5 * h.roll(1, -1) if h.shape[1] == 1 else h)


def prompt_hook(model, nested):
    return _changed(_layer(model), lambda h: h + 0.5 * h.roll(1, -1) if h.shape[1] > 1 else h)


def long_forward_hook(model, nested):
    return _changed(_layer(model), lambda h: h + 0.5 * h.roll(1, -1) if h.shape[1] > LONG else h)


def index_hook(model, nested):
    def change(hidden):
        hidden = hidden.clone()
        hidden[:, -1] += 0.5 * hidden[:, -1].roll(1, -1)
        return hidden

    return _changed(_layer(model), change)


def mean_hook(model, nested):
    return _changed(_layer(model), lambda h: h - 0.5 * h.mean(1, keepdim=True))


def counting_hook(model, nested):
    calls = []

    def change(hidden):
        calls.append(1)
        return hidden + 0.5 * hidden.roll(1, -1) if len(calls) % 5 == 0 else hidden

    return _changed(_layer(model), change)


def steering_hook(model, nested):
    return _changed(_layer(model), lambda h: h + 0.3)


def logits_hook(model, nested):
    def hook(_, args, output):
        if output.logits.shape[1] == 1:
            output.logits = output.logits.roll(1, -1)
        return output

    model.register_forward_hook(hook)
    return {}


def replaced_forward(model, nested):
    mlp = _layer(model).mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) * (2.0 if hidden.shape[1] == 1 else 1.0)
    return {}


def _layer(model):
    return model.model.layers[1]


def prepared_inputs(model, nested):
    prepare = type(model).prepare_inputs_for_generation

    def changed(self, input_ids, *args, **kwargs):
        inputs = prepare(self, input_ids, *args, **kwargs)
        inputs["input_ids"] = (inputs["input_ids"] + input_ids.shape[1]) % 90 + 3
        return inputs

    return with_class(model, prepare_inputs_for_generation=changed)


def prepared_inputs_of_instance(model, nested):
    prepare = model.prepare_inputs_for_generation

    def changed(input_ids, *args, **kwargs):
        inputs = prepare(input_ids, *args, **kwargs)
        inputs["input_ids"] = inputs["input_ids"].clamp(max=60)
        return inputs

    model.prepare_inputs_for_generation = changed
    return {}


def updated_inputs(model, nested):
    update = type(model)._update_model_kwargs_for_generation

    def changed(self, outputs, model_kwargs, *args, **kwargs):
        kwargs_of_next = update(self, outputs, model_kwargs, *args, **kwargs)
        if (mask := kwargs_of_next.get("attention_mask")) is not None:
            mask[:, -2] = 0  # the last token but one is never attended to
        return kwargs_of_next

    return with_class(model, _update_model_kwargs_for_generation=changed)


def sampled_by_own(model, nested):
    sample = type(model)._sample

    def changed(self, input_ids, *args, **kwargs):
        found = sample(self, input_ids, *args, **kwargs)
        if isinstance(found, torch.Tensor):
            return found.clamp(max=50)
        found.sequences = found.sequences.clamp(max=50)
        return found

    return with_class(model, _sample=changed)


def _scaled_by_length(module, query, key, value, *args, **kwargs):
    scale = 3.0 if key.shape[2] > LONG else 1.0
    return sdpa_attention_forward(module, query * scale, key, value, *args, **kwargs)


def registered_attention(model, nested):
    AttentionInterface.register("scaled_by_length", _scaled_by_length)
    AttentionMaskInterface.register("scaled_by_length", sdpa_mask)
    model.set_attn_implementation("scaled_by_length")
    return {}


def generate_of_instance(model, nested):
    def shorter(self, *args, **kwargs):
        kwargs["max_new_tokens"] = 3
        return type(self).generate(self, *args, **kwargs)

    model.generate = types.MethodType(shorter, model)
    return {}


def partial_generate_of_instance(model, nested):
    model.generate = functools.partial(type(model).generate, model, repetition_penalty=3.0)
    return {}


def generate_of_class(model, nested):
    generate = type(model).generate

    def shorter(self, *args, **gen_kwargs):
        gen_kwargs["max_new_tokens"] = 3
        return generate(self, *args, **gen_kwargs)

    return with_class(model, generate=shorter)


USER_CODE = (
    nested_processor, nested_criterion, nested_prefix_function, cache_of_own_class, static_cache_of_own_class,
    cache_layers_of_own_class, patched_cache, prepared_cache, decode_hook, prompt_hook, long_forward_hook, index_hook,
    mean_hook, counting_hook, steering_hook, logits_hook, replaced_forward, prepared_inputs,
    prepared_inputs_of_instance, updated_inputs, sampled_by_own, registered_attention, generate_of_instance,
    partial_generate_of_instance, generate_of_class,
)  # fmt: skip
