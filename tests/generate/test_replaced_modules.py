"""Modules that are replaced after ``enable``: outputs equal stock's, or the call is refused by
name.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from transformers import MptConfig, MptForCausalLM

import hf_slospec
from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.model.trial import check_by_trial
from tests.support.served_pair import written
from tests.support.toys.tiny_models import tiny_copy

CONFIG = SLOSpecConfig(compile=False)
CALL = dict(input_ids=torch.arange(3, 15)[None], max_new_tokens=12, eos_token_id=None)


def enabled(family="llama", **options):
    model = tiny_copy(family)
    hf_slospec.enable(model, config=CONFIG, **options)
    return model


def check_like_stock(model, **call):
    call = CALL | call
    assert torch.equal(model.generate(**call, slo_tpot=0.1), model.generate(**call))


@pytest.mark.parametrize("name", ["model", "model.layers.1", "model.layers.0.self_attn"])
def test_copies_of_modules_attend_in_trees(name):
    model = enabled()
    check_like_stock(model)
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, copy.deepcopy(model.get_submodule(name)))
    check_like_stock(model)


def test_modules_and_settings_may_hold_themselves_and_many_others():
    model = enabled()
    layer = model.model.layers[0]
    layer.mlp.owner = model.model
    layer.held = {"itself": {}, "many": [[number] for number in range(2000)]}
    layer.held["itself"]["again"] = layer.held
    shared = nn.Identity()
    for _ in range(30):  # as many ways to the first one as 2**30
        pair = nn.Module()
        pair.left = pair.right = shared
        shared = pair
    model.model.extra = shared
    check_like_stock(model)


def test_further_layers_are_refused(monkeypatch):
    model = enabled()
    layer = copy.deepcopy(model.model.layers[-1])
    layer.self_attn.layer_idx = model.config.num_hidden_layers
    model.model.layers.append(layer)
    model.config.num_hidden_layers += 1
    with pytest.raises(UnsupportedModelError, match="have changed: their number"):
        model.generate(**CALL, slo_tpot=0.1)
    with monkeypatch.context() as patch:  # as in requests that run on while a layer is added
        patch.setattr("hf_slospec.model.packed_model.PackedModel.check_layers", lambda _: None)
        patch.setattr("hf_slospec.model.checked_model.check_by_trial", lambda _: None)
        with pytest.raises(
            UnsupportedModelError, match="attention layers and now has one of index"
        ):
            model.generate(**CALL, slo_tpot=0.1)
    hf_slospec.enable(model, config=CONFIG)
    check_like_stock(model)


def test_layers_that_leave_the_interface_are_refused(monkeypatch):
    """A layer that attends without transformers' interface would see the tokens of its step only."""
    model = enabled()
    attention = model.model.layers[1].self_attn
    monkeypatch.setattr(attention, "config", copy.deepcopy(attention.config))
    with monkeypatch.context() as patch:  # as if nothing had noticed the new config
        patch.setattr("hf_slospec.model.packed_model.forget_attributes", lambda _: None)
        patch.setattr("hf_slospec.model.packed_model.PackedModel.check_layers", lambda _: None)
        patch.setattr("hf_slospec.model.checked_model.check_by_trial", lambda _: None)
        with pytest.raises(UnsupportedModelError, match=r"layers \[1\] no longer attend"):
            model.generate(**CALL, slo_tpot=0.1)


def test_a_batcher_refuses_a_model_that_was_compiled_meanwhile():
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        generator.submit([3, 4, 5], max_new_tokens=4).result(60)
        model.compile(backend="eager")
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="compiled with compile"):
                generator.submit([3, 4, 5], max_new_tokens=4).result(60)


def test_tables_may_have_more_rows_than_the_config_says():
    model = tiny_copy("llama")
    torch.manual_seed(0)
    rows = model.config.vocab_size + 80
    model.set_input_embeddings(nn.Embedding(rows, model.config.hidden_size))
    model.set_output_embeddings(nn.Linear(model.config.hidden_size, rows, bias=False))
    hf_slospec.enable(model, drafter="lookup", config=CONFIG)
    output = model.generate(**CALL)
    assert (output >= model.config.vocab_size).any(), "the further rows are written"
    check_like_stock(model)
    check_like_stock(model, input_ids=output)


def test_alibi_by_place_refuses_gaps():
    torch.manual_seed(0)
    model = MptForCausalLM(
        MptConfig(vocab_size=64, d_model=32, n_layers=2, n_heads=4, initializer_range=0.2)
    )
    model.eval()
    model.generation_config.pad_token_id = 0
    hf_slospec.enable(model, config=CONFIG)
    left, gap = torch.ones(2, 1, 12, dtype=torch.int64)
    left[0, :4] = 0
    gap[0, 4:8] = 0
    check_like_stock(model, attention_mask=left)
    with pytest.raises(UnsupportedOptionError, match="masks tokens inside row 0"):
        model.generate(**CALL, attention_mask=gap, slo_tpot=0.1)


class TokenShift(nn.Module):
    """Adds a part of the token before, which is another one in a packed row, and declares that it
    does not.
    """

    per_token = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden + nn.functional.pad(hidden, (0, 0, 1, -1)))


def test_layers_that_mix_tokens_are_refused_until_they_are_put_back():
    model = enabled()
    check_like_stock(model)
    layer = model.model.layers[0]
    plain = layer.mlp
    layer.mlp = TokenShift(layer.mlp)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="its logits differed"):
            model.generate(**CALL, slo_tpot=0.1)
    layer.mlp = plain
    check_like_stock(model)


def test_drafts_that_mix_tokens_are_refused():
    model = tiny_copy("llama")
    draft = tiny_copy("llama")
    hf_slospec.enable(model, assistant_model=draft, config=CONFIG)
    check_like_stock(model)
    draft.model.layers[0].mlp = TokenShift(draft.model.layers[0].mlp)
    with pytest.raises(UnsupportedModelError, match="its logits differed"):
        model.generate(**CALL, slo_tpot=0.1)


def test_the_trial_is_repeated_for_changes_of_modules_only(monkeypatch):
    model = enabled()
    trials = []
    monkeypatch.setattr("hf_slospec.model.checked_model.check_by_trial", trials.append)
    check_like_stock(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.01)
    check_like_stock(model)
    model.train()
    model.eval()
    check_like_stock(model)
    assert not trials
    model.model.layers[0].mlp.act_fn = nn.GELU()
    check_like_stock(model)
    check_like_stock(model)
    assert len(trials) == 1


@pytest.mark.parametrize(("family", "window"), [("mistral", 9), ("gpt-oss", 40)])
def test_other_windows_are_refused_until_enabled_again(family, window):
    model = enabled(family)
    call = dict(input_ids=torch.arange(3, 73)[None])
    check_like_stock(model, **call)
    before = model.config.sliding_window
    model.config.sliding_window = window
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match="the attention layers of"):
            model.generate(**CALL | call, slo_tpot=0.1)
    hf_slospec.enable(model, config=CONFIG)
    check_like_stock(model, **call)
    model.config.sliding_window = before
    with pytest.raises(UnsupportedModelError, match="the attention layers of"):
        model.generate(**CALL | call, slo_tpot=0.1)
    model.config.sliding_window = window
    check_like_stock(model, **call)


def test_a_part_of_another_dtype_is_refused_and_does_no_harm():
    model = tiny_copy("llama")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        expected = written(generator, [3, 4, 5], max_new_tokens=4)
        model.lm_head.half()
        with pytest.raises(UnsupportedModelError, match="dtype"):
            generator.submit([3, 4, 5], max_new_tokens=4)
        model.float()
        assert written(generator, [3, 4, 5], max_new_tokens=4) == expected


@pytest.mark.parametrize("name", ["generation_config", "use_cache"])
def test_settings_of_trainers_repeat_no_trial(monkeypatch, name):
    model = enabled()
    trials = []
    monkeypatch.setattr("hf_slospec.model.checked_model.check_by_trial", trials.append)
    if name == "use_cache":
        model.config.use_cache = not model.config.use_cache
    else:
        model.generation_config = copy.deepcopy(model.generation_config)
    check_like_stock(model)
    assert not trials


class Counting(nn.Module):
    """Stores a new attribute in every forward."""

    per_token = True

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.seen = 0.0

    def forward(self, hidden):
        self.seen += 0.1
        return self.inner(hidden)


def test_layers_that_set_attributes_are_tried_once(monkeypatch):
    model = enabled()
    trials = []

    def counted(packed):
        trials.append(packed)
        check_by_trial(packed)

    monkeypatch.setattr("hf_slospec.model.checked_model.check_by_trial", counted)
    layer = model.model.layers[0]
    plain = layer.mlp
    layer.mlp = Counting(layer.mlp)
    for _ in range(3):
        check_like_stock(model)
    assert len(trials) == 1
    layer.mlp = TokenShift(plain)
    with pytest.raises(UnsupportedModelError, match="its logits differed"):
        model.generate(**CALL, slo_tpot=0.1)


def test_windows_of_a_running_generator_are_refused_beside_new_hooks():
    model = tiny_copy("mistral")
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        generator.submit(list(range(3, 73)), max_new_tokens=4).result(60)
        model.config.sliding_window = 9
        model.model.layers[0].register_forward_hook(lambda module, inputs, out: out + 1.0)
        for _ in range(2):
            with pytest.raises(UnsupportedModelError, match="the attention layers of"):
                generator.submit(list(range(3, 73)), max_new_tokens=4)


def test_threads_repeat_a_trial_once(monkeypatch):
    model = tiny_copy("llama")
    trials = []
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        monkeypatch.setattr("hf_slospec.model.checked_model.check_by_trial", trials.append)
        model.model.layers[0].mlp.act_fn = nn.GELU()
        with ThreadPoolExecutor(4) as pool:
            handles = pool.map(lambda _: generator.submit([3, 4, 5], max_new_tokens=4), range(8))
            assert len({tuple(handle.result(60).token_ids) for handle in handles}) == 1
    assert len(trials) == 1
