"""Enable and disable: changes to a model, and that all of them are undone."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle

import pytest
import torch

import hf_slospec
from hf_slospec import InvalidInputError, TokenTree
from hf_slospec.generate.enable import decoder_of
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_models import ragged_prompts, tiny_model


def test_without_target_generate_is_stock(model):
    inputs = ragged_prompts(2)
    out = model.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
    assert not hasattr(out, "slo")
    assert torch.equal(out.sequences, type(model).generate(model, **inputs, **OPTIONS))


def test_always_speculates_without_target():
    model = hf_slospec.enable(tiny_model("llama"), tiny_model("llama"), always=True)
    try:
        out = model.generate(**ragged_prompts(2), **OPTIONS, return_dict_in_generate=True)
        assert [metrics.tpot_slo_s for metrics in out.slo] == [None, None]
    finally:
        hf_slospec.disable(model)


def test_disable_restores_everything():
    model = tiny_model("qwen2")
    before = dict(model.__dict__), model.config.to_dict(), model.config._attn_implementation
    hf_slospec.enable(model, tiny_model("qwen2"))
    hf_slospec.enable(model, tiny_model("qwen2", seed=1))  # again: replaces the draft
    model.generate(**ragged_prompts(1), **OPTIONS, slo_tpot=0.1)
    hf_slospec.disable(model)
    hf_slospec.disable(model)
    hint = model.__dict__.pop("_validate_model_kwargs")  # see the next test
    assert (
        dict(model.__dict__),
        model.config.to_dict(),
        model.config._attn_implementation,
    ) == before
    model.__dict__["_validate_model_kwargs"] = hint
    hf_slospec.SLOSpecGenerator(model)  # the hint is no code of another library
    with hf_slospec.enabled(model):
        assert "_validate_model_kwargs" not in model.__dict__
    model.__dict__.pop("_validate_model_kwargs")


@pytest.mark.parametrize("of", [lambda model: model, copy.deepcopy])
def test_disabled_models_say_that_enable_comes_first(of):
    model = tiny_model("llama")
    with hf_slospec.enabled(model):
        pass
    model = of(model)
    for given in ({"slo_tpot": 0.1}, {"drafter": "lookup"}, {"fallback": True}):
        with pytest.raises(InvalidInputError, match=r"call hf_slospec\.enable\(model\) first"):
            model.generate(**ragged_prompts(1), **OPTIONS, **given)
    with pytest.raises(ValueError, match=r"not used by the model.*'slo_tpots'"):
        model.generate(**ragged_prompts(1), **OPTIONS, slo_tpots=0.1)
    model.generate(**ragged_prompts(1), **OPTIONS)
    hf_slospec.disable(model)


def drafts(model):
    decoder = decoder_of(model)
    return None if decoder is None else decoder.speculator.method.kind


def test_enabled_lasts_for_a_block_and_gives_the_earlier_settings_back():
    model = tiny_model("llama")
    with hf_slospec.enabled(model, tiny_model("llama", noise=0.03), always=True) as same:
        assert same is model and drafts(model) == "assistant model"
        before = dict(model.__dict__)
        with contextlib.suppress(ZeroDivisionError), hf_slospec.enabled(model, "lookup"):
            assert drafts(model) == "prompt lookup"
            raise ZeroDivisionError
        assert dict(model.__dict__) == before and "generate_batch" in before
        never = hf_slospec.enabled(model, "lokup")
        with pytest.raises(InvalidInputError, match="known by name"):
            never.__enter__()
        assert dict(model.__dict__) == before
    assert drafts(model) is None and "generate_batch" not in model.__dict__


def test_a_call_may_have_a_drafter_of_its_own(model):
    inputs = ragged_prompts(2)
    stock = type(model).generate(model, **inputs, **OPTIONS)
    decoder = decoder_of(model)
    generator = hf_slospec.SLOSpecGenerator(model, "lookup")
    assert generator.assistant_model is None
    for drafter in ("lookup", tiny_model("llama", noise=0.03), WholeTexts(stock)):
        for generate in (model.generate, generator.generate):
            output = generate(**inputs, **OPTIONS, drafter=drafter, return_dict_in_generate=True)
            assert torch.equal(output.sequences, stock) and output.slo is not None
    assert sum(row.accepted for row in output.slo) > len(stock)  # drafted by the last one
    assert drafts(model) == "assistant model"  # calls without one keep theirs
    own = decoder.speculator_of({}, drafter)
    assert decoder.speculator_of({"assistant_model": drafter}) is own
    assert decoder.speculator_of({}, "lookup") is not own
    assert generator.decoder.speculator_of({}, "lookup") is generator.decoder.speculator
    for two in ({"assistant_model": tiny_model("llama")}, {"prompt_lookup_num_tokens": 3}):
        with pytest.raises(InvalidInputError, match="give one of them"):
            model.generate(**inputs, **OPTIONS, drafter="lookup", **two)
    with pytest.raises(InvalidInputError, match="drafter was given to a copy"):
        copy.deepcopy(model).generate(**inputs, **OPTIONS, drafter="lookup")


class WholeTexts:
    """Drafts the known continuations of all rows."""

    def __init__(self, sequences):
        self.texts = sequences.tolist()

    def draft(self, requests, plan):
        trees = []
        for request in requests:
            tokens = request.tokens
            rests = [
                text[at : at + plan.depth]
                for text in self.texts
                for at in range(1, len(text))
                if text[max(at - len(tokens), 0) : at] == tokens
            ]
            trees.append(TokenTree.chain(tokens[-1], rests[0] if rests else [], conditional=0.9))
        return trees

    def release(self, request):
        """Hold nothing of a request."""


def test_plain_forwards_are_untouched_while_enabled(model):
    inputs = ragged_prompts(3)
    hf_slospec.disable(model)
    with torch.no_grad():
        expected = model(**inputs).logits
        hf_slospec.enable(model, tiny_model("llama"))
        model.generate(**inputs, **OPTIONS, slo_tpot=0.1)
        assert torch.equal(model(**inputs).logits, expected)


def test_enabled_model_can_be_copied_and_pickled():
    # One of its own: where hidden states were asked for, transformers leaves hooks that cannot be
    # pickled.
    model = hf_slospec.enable(tiny_model.__wrapped__("llama"), tiny_model("llama", noise=0.03))
    inputs = ragged_prompts(2)
    expected = type(model).generate(model, **inputs, **OPTIONS)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.generate(**inputs, **OPTIONS), expected)
        with pytest.raises(ValueError, match="slo_tpot"):
            other.generate(**inputs, **OPTIONS, slo_tpot=0.1)
