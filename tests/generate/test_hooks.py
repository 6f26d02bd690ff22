"""Code of the user's that computes tokens: it computes each alone, as its code or a declaration
says, or is refused.
"""

from __future__ import annotations

import copy
import functools
import types

import accelerate.hooks
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_slospec
from hf_slospec import FallbackWarning, SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from hf_slospec.model.whose_code import check_code
from tests.support.served_pair import written
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy, tiny_model

CONFIG = SLOSpecConfig(compile=False)
REFUSED = r"cannot be packed: .*set per_token = True on it, or on the model"
HIDDEN = 32
VECTOR = torch.linspace(-1.0, 1.0, HIDDEN)


def model_with(change):
    model = tiny_copy("llama")
    change(model)
    return model


def hidden_of(output):
    return output[0] if isinstance(output, tuple) else output


def steered(output, where):
    hidden = hidden_of(output).clone()
    hidden[:, where] += VECTOR
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def decode_only(module, inputs, output):
    return steered(output, slice(None)) if hidden_of(output).shape[1] == 1 else output


def prompt_only(module, inputs, output):
    return steered(output, slice(None)) if hidden_of(output).shape[1] > 1 else output


def from_index(first, module, inputs, output):
    return steered(output, slice(first, None))


def longer_than(length, module, inputs, output):
    return steered(output, slice(None)) if hidden_of(output).shape[1] > length else output


def centred(module, inputs, output):
    return hidden_of(output) - hidden_of(output).mean(dim=(0, 1))


def last_only(module, inputs, output):
    return steered(output, -1)


# What a trial sees when it is declared to compute each token alone.
SEEN = {
    "decode only": decode_only,
    "prompt only": prompt_only,
    "by index": functools.partial(from_index, 1),
    "longer than 16": functools.partial(longer_than, 16),
    "longer than 100": functools.partial(longer_than, 100),
    "statistics": centred,
    "last token": last_only,
}


class Counting:
    """Steers from its tenth call on."""

    def __init__(self):
        self.calls = 0

    def __call__(self, module, inputs, output):
        self.calls += 1
        return steered(output, slice(None)) if self.calls > 10 else output

    def method(self, module, inputs, output):
        return self(module, inputs, output)


def counted():
    calls = 0

    def hook(module, inputs, output):
        nonlocal calls
        calls += 1
        return output * (1.0 + calls)

    return hook


def logits_of_decoding(module, inputs, output):
    if output.logits.shape[1] == 1:
        output.logits = output.logits.flip(-1)
    return output


def on_layer(hook, **options):
    return lambda model: model.model.layers[1].register_forward_hook(hook, **options)


def before_layer(module, inputs):
    return (inputs[0] + 1.0, *inputs[1:]) if inputs[0].shape[1] == 1 else None


def before_model(module, inputs, kwargs):
    kwargs["inputs_embeds"] = None
    return inputs, kwargs


def replaced_forward(model):
    mlp = model.model.layers[0].mlp
    plain = mlp.forward

    @functools.wraps(plain)  # which copies the module's name, too
    def forward(hidden):
        return plain(hidden) * hidden.shape[1]

    mlp.forward = forward


class Gated(nn.Module):
    """A module of the user's in a model of transformers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) * (2.0 if hidden.shape[1] == 1 else 1.0)


def custom_module(model):
    model.model.layers[0].mlp = Gated(model.model.layers[0].mlp)


class DecodingMLP(LlamaMLP):
    def forward(self, x):
        return super().forward(x) * len(x[0])


def derived_module(model):
    model.model.layers[0].mlp.__class__ = DecodingMLP


class Halved(LlamaMLP):
    def __call__(self, *inputs, **options):
        return super().__call__(*inputs, **options) / 2 ** len(inputs[0][0])


def other_call(model):
    model.model.layers[0].mlp.__class__ = Halved


class Noted(accelerate.hooks.ModelHook):
    def post_forward(self, module, output):
        return decode_only(module, (), output)


def with_accelerate(model):
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, Noted())


def with_two_of_accelerate(model):
    with_accelerate(model)
    accelerate.hooks.add_hook_to_module(
        model.model.layers[0].mlp, accelerate.hooks.ModelHook(), append=True
    )


def wrapped_by_accelerate(model):
    replaced_forward(model)
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp, accelerate.hooks.ModelHook())


RECORDS = []
CHANGES = {
    **{name: on_layer(hook) for name, hook in SEEN.items()},
    "longer than any trial": on_layer(functools.partial(longer_than, 5000)),
    "counter in an object": on_layer(Counting()),
    "counter in a bound method": on_layer(Counting().method),
    "counter in a closure": on_layer(counted()),
    "record": on_layer(lambda module, inputs, output: RECORDS.append(hidden_of(output))),
    "random": on_layer(lambda module, inputs, output: output + torch.rand(HIDDEN)),
    "called always": on_layer(decode_only, always_call=True),
    "before a layer": lambda model: model.model.layers[1].register_forward_pre_hook(before_layer),
    "before the model": lambda model: model.register_forward_pre_hook(
        before_model, with_kwargs=True
    ),
    "logits": lambda model: model.register_forward_hook(logits_of_decoding),
    "forward of an instance": replaced_forward,
    "custom module": custom_module,
    "derived class": derived_module,
    "derived class with its own call": other_call,
    "hook of accelerate": with_accelerate,
    "hooks of accelerate": with_two_of_accelerate,
    "forward within accelerate's": wrapped_by_accelerate,
}


@pytest.mark.parametrize("name", CHANGES)
def test_code_that_may_mix_tokens_is_refused_by_name(name):
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        check_code(model_with(CHANGES[name]))


def test_refused_code_falls_back():
    model = model_with(replaced_forward)
    for make in (hf_slospec.enable, SLOSpecGenerator):
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            make(model, config=CONFIG)
    hf_slospec.enable(model, config=CONFIG, fallback=True)
    with pytest.warns(FallbackWarning, match="per_token"):
        model.generate(**ragged_prompts(1), max_new_tokens=3, slo_tpot=0.1)


@pytest.mark.parametrize("name", ["counter in an object", "custom module"])
def test_other_code_after_enable_is_refused_until_it_is_taken_back(name):
    model = tiny_copy("llama")
    call = dict(ragged_prompts(2), max_new_tokens=6)
    hf_slospec.enable(model, config=CONFIG)
    before = copy.deepcopy(model.model.layers)
    CHANGES[name](model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            model.generate(**call, slo_tpot=0.1)
    with pytest.warns(FallbackWarning, match="per_token"):
        model.generate(**call, slo_tpot=0.1, fallback=True)
    model.model.layers = before
    assert torch.equal(model.generate(**call, slo_tpot=0.1), model.generate(**call))


def test_submit_refuses_other_code():
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        generator.submit([3, 4, 5], max_new_tokens=3).result(60)
        handle = model.model.layers[0].register_forward_hook(decode_only)
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            generator.submit([3, 4, 5], max_new_tokens=3)
        handle.remove()
        generator.submit([3, 4, 5], max_new_tokens=3).result(60)


def test_hooks_of_all_modules_are_refused():
    model = tiny_copy("llama")
    call = dict(ragged_prompts(1), max_new_tokens=3)
    hf_slospec.enable(model, config=CONFIG)
    handle = nn.modules.module.register_module_forward_hook(counted())
    with handle, pytest.raises(UnsupportedModelError, match="a global forward hook"):
        model.generate(**call, slo_tpot=0.1)
    assert torch.equal(model.generate(**call, slo_tpot=0.1), model.generate(**call))


def test_a_forward_that_is_replaced_in_its_class_is_refused(monkeypatch):
    plain = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: plain(self, x) * len(x))
    with pytest.raises(UnsupportedModelError, match=REFUSED):
        hf_slospec.enable(tiny_copy("llama"), config=CONFIG)


FUSED = """
def add_head(model):
    original_forward = model.forward
    @functools.wraps(type(model).forward)
    def fused(self, *args, fused_lm_head=False, **kwargs):
        return original_forward(*args, **kwargs)
    model.forward = types.MethodType(fused, model)
"""


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_forward_of_trl_is_as_good_as_the_one_that_it_calls(is_plain):
    model = tiny_copy("llama")
    if not is_plain:
        plain = model.forward
        model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    trl = {"__name__": "trl.trainer.utils", "functools": functools, "types": types}
    exec(FUSED, trl)
    trl["add_head"](model)
    if is_plain:
        hf_slospec.enable(model, config=CONFIG)
        call = dict(ragged_prompts(2), max_new_tokens=5)
        assert torch.equal(model.generate(**call, slo_tpot=0.1), model.generate(**call))
    else:
        with pytest.raises(UnsupportedModelError, match=REFUSED):
            hf_slospec.enable(model, config=CONFIG)


@pytest.mark.parametrize("name", SEEN)
def test_the_trial_refuses_what_was_declared_and_sees_other_tokens(name):
    model = model_with(on_layer(SEEN[name]))
    model.per_token = True
    with pytest.raises(UnsupportedModelError, match="its logits differed"):
        hf_slospec.enable(model, config=CONFIG)


def scaled_by(vector, scale):
    def hook(module, inputs, output):
        if isinstance(output, tuple):
            return (output[0] + scale * vector.to(output[0].device, output[0].dtype), *output[1:])
        return output + scale * vector

    return hook


def in_place(module, inputs, output):
    hidden = output[0] if isinstance(output, tuple) else output
    hidden += VECTOR
    return output


class Scaled(nn.Module):
    """A module whose code shows that it computes each token alone."""

    def __init__(self, inner):
        super().__init__()
        self.plain = inner
        self.scale = 1.5

    def forward(self, hidden):
        return self.plain(hidden) * self.scale


def scaled_module(model):
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp)


PLAIN = {
    "added": on_layer(scaled_by(VECTOR, 0.7)),
    "in place": on_layer(in_place),
    "projected": on_layer(
        lambda module, inputs, output: output - (output @ VECTOR).unsqueeze(-1) * VECTOR
    ),
    "before": lambda model: model.model.layers[1].register_forward_pre_hook(
        lambda module, inputs: (inputs[0] + VECTOR, *inputs[1:])
    ),
    "read from the module": lambda model: (
        setattr(model.model.layers[0], "offset", VECTOR),
        model.model.layers[0].register_forward_hook(
            lambda module, inputs, output: output + module.offset
        ),
    ),
    "module": scaled_module,
}


@pytest.mark.parametrize("name", PLAIN)
def test_code_that_adds_and_multiplies_is_speculated(name):
    model = model_with(PLAIN[name])
    call = dict(ragged_prompts(3), max_new_tokens=8)
    assert not torch.equal(model.generate(**call), tiny_model("llama").generate(**call)), (
        "it changes nothing"
    )
    expected = model.generate(**call)
    generator = SLOSpecGenerator(model, model, config=CONFIG)
    assert torch.equal(generator.generate(**call), expected)
    prompt = call["input_ids"][0].tolist()
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=8)[0, len(prompt) :].tolist()
    with generator:
        assert written(generator, prompt, max_new_tokens=8) == expected


def whole(module, inputs, output):
    return steered(output, slice(None))  # a helper's code is not read


class Adapter(nn.Module):
    """A module that has to be declared, as its code is not read far enough."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden) + hidden.pow(2) * 0.1


@pytest.mark.parametrize("where", ["hook", "partial", "module", "class", "model"])
def test_declared_code_is_speculated(monkeypatch, where):
    model = tiny_copy("llama")
    call = dict(ragged_prompts(2), max_new_tokens=8)
    layer = model.model.layers[0]
    if where in ("module", "class", "model"):
        layer.mlp = Adapter(layer.mlp)
        if where == "class":
            monkeypatch.setattr(Adapter, "per_token", True, raising=False)
        else:
            (layer.mlp if where == "module" else model).per_token = True
    else:
        hook = functools.partial(whole) if where == "partial" else scaled_by(VECTOR, 1.0)
        hook.per_token = True
        layer.register_forward_hook(hook)
    expected = model.generate(**call)
    hf_slospec.enable(model, config=CONFIG)
    assert torch.equal(model.generate(**call, slo_tpot=0.1), expected)


def test_drafts_may_have_any_hooks():
    model = tiny_model("llama")
    draft = model_with(on_layer(Counting()))
    call = dict(ragged_prompts(2), max_new_tokens=6)
    assert torch.equal(
        SLOSpecGenerator(model, draft, config=CONFIG).generate(**call), model.generate(**call)
    )


class Symmetric(nn.Module):
    """A parametrization, which computes a weight and no tokens."""

    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class EveryOther(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def with_hooks_of_libraries(model):
    attention = model.model.layers[0].self_attn
    parametrize.register_parametrization(attention.q_proj, "weight", Symmetric())
    EveryOther.apply(model.model.layers[0].mlp.up_proj, "weight")
    accelerate.hooks.add_hook_to_module(model.model.layers[1].mlp, accelerate.hooks.ModelHook())


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_changes_of_weights_and_hooks_of_libraries_are_speculated():
    model = model_with(with_hooks_of_libraries)
    call = dict(ragged_prompts(2), max_new_tokens=6)
    adapted = get_peft_model(model, LoraConfig(target_modules=["v_proj"], init_lora_weights=False))
    expected = adapted.generate(**call)
    hf_slospec.enable(adapted, config=CONFIG)
    assert torch.equal(adapted.generate(**call, slo_tpot=0.1), expected)
