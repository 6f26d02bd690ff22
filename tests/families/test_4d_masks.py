"""``attention="4d_mask"``, and models that build masks of their own: both get a literal mask of the
packed batch, [1, 1, num_tokens, num_keys].
"""

from __future__ import annotations

import pytest
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedModelError
from tests.support.stock_matrix import model_of
from tests.support.toys.own_attention import OwnAttention, own_attention_model
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts

DRAFTS = dict(policy="fixed", max_depth=3, max_width=2, compile=False, prepack=False)
NEW = dict(max_new_tokens=12)


class Masks(TorchFunctionMode):
    """Records the shapes of queries, keys and masks of all calls of torch's attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is scaled_dot_product_attention and (mask := kwargs.get("attn_mask")) is not None:
            self.calls.append((args[0].shape, args[1].shape, mask.shape))
        return func(*args, **kwargs)


def test_the_models_own_attention_gets_one_mask_of_four_dimensions():
    model = model_of("llama")
    ours = SLOSpecGenerator(model, config=SLOSpecConfig(attention="4d_mask", **DRAFTS))
    # Trials of the model, whose plain forwards have masks of other shapes.
    ours.generate(**ragged_prompts(3), do_sample=False, **NEW)
    with Masks() as masks:
        ours.generate(**ragged_prompts(3), do_sample=False, **NEW)
    trees = [call for call in masks.calls if call[0][2] not in (1, 3)]
    assert trees  # steps of three requests with drafts
    for query, key, mask in masks.calls:
        assert query[0] == key[0] == 1  # one packed row
        assert mask == (1, 1, query[2], key[2])


# Attention by sdpa and by eager code, with windows, softcap and sinks.
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gemma2", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_outputs_are_those_of_stock(name, do_sample):
    model = model_of(name)
    ours = SLOSpecGenerator(model, config=SLOSpecConfig(attention="4d_mask", **DRAFTS))
    assert_same_as_stock(model, ours.generate, ragged_prompts(3), do_sample=do_sample, **NEW)


# Latent K and V, chunks of positions, recurrent layers, and attention in the layers' own code.
@pytest.mark.parametrize(
    "name", ["DeepseekV3ForCausalLM", "Llama4ForCausalLM", "Qwen3NextForCausalLM", "MptForCausalLM"]
)
def test_single_texts_of_other_classes(name):
    model = model_of(name)
    ours = SLOSpecGenerator(model, config=SLOSpecConfig(attention="4d_mask", **DRAFTS))
    assert_same_as_stock(model, ours.generate, ragged_prompts(1), do_sample=False, **NEW)


@pytest.mark.parametrize("attention", ["auto", "4d_mask"])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_model_with_attention_and_masks_of_its_own(attention, do_sample):
    model = own_attention_model()
    ours = SLOSpecGenerator(model, config=SLOSpecConfig(attention=attention, **DRAFTS))
    assert_same_as_stock(model, ours.generate, ragged_prompts(3), do_sample=do_sample, **NEW)
    assert ours.stats().forwards["target"].startswith("eager")


class Ignoring(OwnAttention):
    reads_whole_masks = False


@pytest.mark.parametrize(
    ("model_class", "settings", "match"),
    [
        (Ignoring, {}, "Ignoring cannot be packed: on a trial tree its logits differed"),
        (OwnAttention, dict(sliding_window=4), "may have a sliding window"),
    ],
)
def test_what_a_mask_cannot_say_is_refused(model_class, settings, match):
    model = own_attention_model(model_class)
    for name, value in settings.items():
        setattr(model.config, name, value)
    with pytest.raises(UnsupportedModelError, match=match):
        SLOSpecGenerator(model)
