"""Code of someone else in the model, its attention or its caches: run as stock runs it, or refused
by name.
"""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from transformers import (
    Cache,
    DynamicCache,
    GenerationMixin,
    LlamaForCausalLM,
    LlamaModel,
    LogitsProcessorList,
    MaxLengthCriteria,
    StaticCache,
    StoppingCriteriaList,
    SuppressTokensLogitsProcessor,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    create_causal_mask,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

import hf_slospec
from hf_slospec import (
    FallbackWarning,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.arguments import check_cache
from hf_slospec.generate.speculator import MEASURE_S
from hf_slospec.model.ownership import foreign_members, is_of_transformers
from hf_slospec.model.properties import CACHE_NAME, cache_option
from hf_slospec.model.whose_code import library_of
from tests.support.served_pair import written
from tests.support.toys.tiny_models import ragged_prompts, tiny_copy, tiny_model

CONFIG = SLOSpecConfig(compile=False, prepack=False)
OPTIONS = dict(max_new_tokens=16, eos_token_id=None)
PROMPTS = ragged_prompts(2)


@pytest.fixture(autouse=True)
def _measured_quickly(monkeypatch):
    for name in MEASURE_S:
        monkeypatch.setitem(MEASURE_S, name, 0.0)


def model_of(kind=LlamaForCausalLM):
    model = tiny_copy("llama")
    model.__class__ = kind
    return model


def stock(model, **options):
    torch.manual_seed(3)
    return model.generate(**copy.deepcopy(PROMPTS), **OPTIONS | options)


def speculated(model, **options):
    """The same call by ``enable`` and by a generator, which agree."""
    torch.manual_seed(3)
    ours = SLOSpecGenerator(model, config=CONFIG).generate(
        **copy.deepcopy(PROMPTS), **OPTIONS | options, slo_tpot=0.1
    )
    hf_slospec.enable(model, config=CONFIG)
    try:
        enabled = stock(model, **options, slo_tpot=0.1)
    finally:
        hf_slospec.disable(model)
    assert torch.equal(torch.as_tensor(ours), torch.as_tensor(enabled))
    return ours


def check_refused(model, match):
    """A model is refused before any work; with fallback, stock runs."""
    expected = stock(model, do_sample=True)
    with pytest.raises(UnsupportedModelError, match=match):
        SLOSpecGenerator(model, config=CONFIG)
    hf_slospec.enable(model, config=CONFIG, always=True, fallback=True)
    with pytest.warns(FallbackWarning, match=match):
        assert torch.equal(stock(model, do_sample=True), expected)
    hf_slospec.disable(model)


def is_same_as_stock(model):
    return all(
        torch.equal(speculated(model, do_sample=sampled), stock(model, do_sample=sampled))
        for sampled in (False, True)
    )


# ---- caches


def rounding(kind):
    """Return a class of caches or layers that rounds the keys it gets."""
    update = lambda self, keys, *args, **kwargs: kind.update(self, keys.round(), *args, **kwargs)  # noqa: E731
    return type("Rounding", (kind,), {"update": update})


Rounding = rounding(DynamicLayer)
RoundingCache = rounding(DynamicCache)


class CountingCache(DynamicCache):
    def get_seq_length(self, layer_idx=0):
        return super().get_seq_length(layer_idx)


class Storing(DynamicLayer):
    """Rounds keys where they are stored."""

    @property
    def keys(self):
        return self._keys

    @keys.setter
    def keys(self, value):
        self._keys = None if value is None else value.round()


class NotCompilable(DynamicCache):
    is_compileable = False


class NotACache:
    """Has what stock calls of a cache."""

    def __init__(self):
        self.cache = DynamicCache()

    def __getattr__(self, name):
        return getattr(self.__dict__["cache"], name)

    def get_seq_length(self, layer_idx=0):
        return self.cache.get_seq_length(layer_idx)


def patched(name, on_layer=False):
    cache = DynamicCache(config=tiny_model("llama").config)
    owner = cache.layers[1] if on_layer else cache
    plain = getattr(owner, name)
    setattr(owner, name, functools.wraps(plain)(lambda *args, **kwargs: plain(*args, **kwargs)))
    return cache


def with_layer():
    cache = DynamicCache(config=tiny_model("llama").config)
    cache.layers[0] = Rounding()
    return cache


CACHES = {
    "a subclass": RoundingCache,
    "a static subclass": lambda: rounding(StaticCache)(
        config=tiny_model("llama").config, max_cache_len=64
    ),
    "another length": CountingCache,
    "another attribute": NotCompilable,
    "a class of layers": lambda: Cache(layer_class_to_replicate=Rounding),
    "a layer": with_layer,
    "a class of layers that store": lambda: Cache(layer_class_to_replicate=Storing),
    "a patched instance": lambda: patched("update"),
    "a patched layer": lambda: patched("update", on_layer=True),
    "patched mask sizes": lambda: patched("get_mask_sizes"),
    "a partial": lambda: (
        vars(cache := DynamicCache()).update(update=functools.partial(cache.update)) or cache
    ),
    "of another cache": lambda: (
        vars(cache := DynamicCache()).update(update=DynamicCache().update) or cache
    ),
    "no subclass": NotACache,
}


@pytest.mark.parametrize("what", CACHES)
def test_caches_with_code_of_the_user_are_refused(what):
    with pytest.raises(
        UnsupportedOptionError, match=r"^cache, a \w+, has members that are not transformers' own"
    ):
        check_cache("cache", CACHES[what]())


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", [CACHE_NAME, "past_key_values"])
def test_calls_with_caches_of_the_user_fall_back(name):
    model = model_of()
    with pytest.raises(UnsupportedOptionError, match=f"^{name}, a Rounding, has members"):
        speculated(model, **{name: RoundingCache()})
    generator = SLOSpecGenerator(model, config=CONFIG, fallback=True)
    options = dict(do_sample=False, **{name: RoundingCache()})
    with pytest.warns(FallbackWarning, match="has members"):
        out = generator.generate(**PROMPTS, **OPTIONS, **options)
    assert torch.equal(out, stock(model, do_sample=False, **{name: RoundingCache()}))


class Described(DynamicCache):
    """Adds to a cache what stock does not call."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.update = self.update  # the class's own, bound to this cache

    def __repr__(self):
        return "mine"

    def num_bytes(self):
        return sum(layer.keys.nbytes for layer in self.layers)


def test_caches_that_only_add_members_are_used():
    model = model_of()
    caches = [Described(config=model.config) for _ in range(2)]
    expected = stock(model, **cache_option(caches[0]))
    generator = SLOSpecGenerator(model, config=CONFIG)
    torch.manual_seed(3)
    assert torch.equal(
        generator.generate(**PROMPTS, **OPTIONS, **cache_option(caches[1])), expected
    )
    assert caches[0].num_bytes() == caches[1].num_bytes()


def test_patched_classes_of_caches_are_refused(monkeypatch):
    model = model_of()
    plain = DynamicLayer.update
    generator = SLOSpecGenerator(model, config=CONFIG)
    monkeypatch.setattr(DynamicLayer, "update", lambda *args, **kwargs: plain(*args, **kwargs))
    with pytest.raises(UnsupportedModelError, match=r"not transformers' own \(update\)"):
        generator.generate(**PROMPTS, **OPTIONS)
    monkeypatch.undo()
    assert generator.generate(**PROMPTS, **OPTIONS).shape[1] > 20


# ---- methods that decode


class OwnInputs(LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if inputs["input_ids"].shape[1] == 1:
            inputs["input_ids"] = inputs["input_ids"] // 2
        return inputs


def overriding(name, is_partial=False):
    """Return a class that overrides a method, and calls the overridden one."""
    plain = getattr(LlamaForCausalLM, name)
    mine = lambda *args, **kwargs: plain(*args, **kwargs)  # noqa: E731
    method = functools.partialmethod(plain) if is_partial else torch.no_grad()(mine)
    return type("Overriding", (LlamaForCausalLM,), {name: method})


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (OwnInputs, "prepare_inputs_for_generation"),
        (overriding("_update_model_kwargs_for_generation"), "_update_model_kwargs_for_generation"),
        (overriding("_sample"), "_sample"),
        (overriding("_prefill"), "_prefill"),
        (overriding("_sample", is_partial=True), "_sample"),
    ],
)
def test_overridden_decoding_methods_are_refused(kind, name):
    check_refused(model_of(kind), rf"{kind.__name__} decodes by methods .*\({name}\)")


def test_decoding_methods_that_are_replaced_later_are_refused(monkeypatch):
    model = model_of()
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        for owner, name in ((GenerationMixin, "_sample"), (model, "prepare_inputs_for_generation")):
            plain = getattr(owner, name)
            mine = lambda *args, _plain=plain, **kwargs: _plain(*args, **kwargs)  # noqa: E731
            monkeypatch.setattr(owner, name, functools.wraps(plain)(mine))
            for call in (
                lambda: generator.generate(**PROMPTS, **OPTIONS),
                lambda: generator.submit([3, 4, 5]),
            ):
                with pytest.raises(
                    UnsupportedModelError, match=rf"not transformers' own \({name}\)"
                ):
                    call()
            monkeypatch.undo()
        assert written(generator, [3, 4, 5], max_new_tokens=4)


class OwnCache(LlamaForCausalLM):
    def _prepare_cache_for_generation(self, generation_config, model_kwargs, *args):
        model_kwargs.update(cache_option(RoundingCache()))


class OwnProcessors(LlamaForCausalLM):
    def _get_logits_processor(self, *args, **kwargs):
        class Reversed(LogitsProcessorList):
            def __call__(self, input_ids, scores, **_):
                return -scores

        return Reversed(super()._get_logits_processor(*args, **kwargs))


class Endless(LlamaForCausalLM):
    def _get_stopping_criteria(self, *args, **kwargs):
        return StoppingCriteriaList([ShortCriteria(40)])


class ShortCriteria(MaxLengthCriteria):
    """Ends outputs before the length that it tells."""

    def __call__(self, input_ids, scores, **_):
        return torch.full(
            (len(input_ids),), input_ids.shape[1] >= PROMPTS["input_ids"].shape[1] + 9
        )


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (OwnCache, "has members"),
        (OwnProcessors, r"lists of processors .*\(__call__\)"),
        (Endless, "limit no length"),
    ],
)
def test_what_methods_prepare_in_their_own_way_is_refused(kind, match):
    model = model_of(kind)
    generator = SLOSpecGenerator(model, config=CONFIG)
    with pytest.raises((UnsupportedModelError, UnsupportedOptionError), match=match):
        generator.generate(**PROMPTS, **OPTIONS)
    with pytest.warns(FallbackWarning, match=match):
        out = generator.generate(**PROMPTS, **OPTIONS, do_sample=False, fallback=True)
    assert torch.equal(out, stock(model, do_sample=False))


class PreparesMore(LlamaForCausalLM):
    """Overrides what stock calls before it decodes."""

    def _get_logits_processor(self, *args, **kwargs):
        processors = super()._get_logits_processor(*args, **kwargs)
        processors.append(SuppressTokensLogitsProcessor([3, 10, 15]))
        return processors

    def _get_stopping_criteria(self, *args, **kwargs):
        criteria = super()._get_stopping_criteria(*args, **kwargs)
        criteria.append(MaxLengthCriteria(criteria.max_length - 3 * (criteria.max_length > 10)))
        return criteria

    def _prepare_generated_length(self, *args, **kwargs):
        config = super()._prepare_generated_length(*args, **kwargs)
        config.max_length -= 2 * (config.max_length > 10)
        return config

    def _prepare_cache_for_generation(self, *args, **kwargs):
        return super()._prepare_cache_for_generation(*args, **kwargs)


def test_methods_that_stock_calls_before_it_decodes_run():
    model = model_of(PreparesMore)
    assert is_same_as_stock(model)
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        expected = model.generate(torch.tensor([[3, 4, 5]]), **OPTIONS, do_sample=False)[
            0, 3:
        ].tolist()
        assert written(generator, [3, 4, 5], **OPTIONS, do_sample=False) == expected


def test_criteria_that_change_those_of_transformers_are_called():
    model = model_of()
    options = dict(stopping_criteria=StoppingCriteriaList([ShortCriteria(99)]), do_sample=False)
    generator = SLOSpecGenerator(model, config=CONFIG)
    one_row = {name: tensor[:1] for name, tensor in PROMPTS.items()}
    out = generator.generate(**one_row, **OPTIONS, **options)
    assert torch.equal(out, model.generate(**one_row, **OPTIONS, **options))
    assert out.shape[1] == one_row["input_ids"].shape[1] + 9


# ---- attention


def longer_is_sharper(module, query, key, *args, **kwargs):
    return sdpa_attention_forward(module, query * (1 + (key.shape[2] > 20)), key, *args, **kwargs)


def mine_masks(*args, **kwargs):
    return ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, **kwargs)


@pytest.fixture
def interfaces(monkeypatch):
    """The patch that takes back what a test registers."""
    for interface in (AttentionInterface, AttentionMaskInterface):
        monkeypatch.setattr(interface, "_global_mapping", dict(interface._global_mapping))
    monkeypatch.setattr(ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    return monkeypatch


@pytest.mark.parametrize("name", ["mine", "sdpa", "sdpa of one file", "eager"])
def test_attention_of_the_user_is_refused(interfaces, name):
    model = model_of()
    function = longer_is_sharper
    if name.startswith("sdpa"):  # which copies the names of transformers' own
        function = functools.wraps(sdpa_attention_forward)(function)
    if name == "eager":
        interfaces.setattr(modeling_llama, "eager_attention_forward", function)
    elif name == "sdpa of one file":
        ALL_ATTENTION_FUNCTIONS["sdpa"] = function
    else:
        AttentionInterface.register(name, function)
    AttentionMaskInterface.register("mine", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    name = name.split()[0]
    model.set_attn_implementation(name)
    check_refused(model, rf"LlamaForCausalLM attends by '{name}' \(tests.*longer_is_sharper\)")


def test_attention_that_is_registered_later_is_refused(interfaces):
    model = model_of()
    with SLOSpecGenerator(model, config=CONFIG) as generator:
        AttentionInterface.register("sdpa", longer_is_sharper)
        for call in (
            lambda: generator.generate(**PROMPTS, **OPTIONS),
            lambda: generator.submit([3, 4, 5]),
        ):
            with pytest.raises(UnsupportedModelError, match="attends by 'sdpa'"):
                call()


def test_masks_of_the_user_are_refused(interfaces):
    model = model_of()
    AttentionInterface.register("alias", sdpa_attention_forward)
    model.set_attn_implementation("alias")
    check_refused(model, "attends by 'alias', for which no mask function is registered")
    AttentionMaskInterface.register("alias", mine_masks)
    check_refused(model, r"attends by masks for 'alias' \(tests.*mine_masks\)")
    AttentionMaskInterface.register("alias", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    assert is_same_as_stock(model)  # both functions are transformers' own


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (modeling_llama, "create_causal_mask"),
        (modeling_llama, "repeat_kv"),
        (torch.nn.functional, "scaled_dot_product_attention"),
    ],
)
def test_replaced_functions_that_attention_calls_are_refused(monkeypatch, module, name):
    plain = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **kwargs: plain(*args, **kwargs))
    check_refused(model_of(), rf"attends by {module.__name__}\.{name} \(tests")


def test_replaced_functions_that_packed_forwards_call_are_called(monkeypatch):
    plain = modeling_llama.apply_rotary_pos_emb
    larger = lambda query, *args, **kwargs: plain(1.5 * query, *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", larger)
    assert is_same_as_stock(model_of())


class NearKeys(LlamaModel):
    """Masks keys that are far away by a function of its own, beside those of transformers."""

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, inputs_embeds=None, **kwargs
    ):
        (name,) = cache_option(None)
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        mask = create_causal_mask(
            config=self.config, inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids,
            and_mask_function=lambda batch, head, query, key: query - key < 20, **{name: kwargs.get(name)},
        )  # fmt: skip
        return super().forward(
            inputs_embeds=embeds, attention_mask=mask, position_ids=position_ids, **kwargs
        )


def test_masks_with_functions_of_the_user_are_refused():
    model = model_of()
    model.model.__class__ = NearKeys
    model.per_token = True
    check_refused(model, r"builds masks with a function \(tests.*lambda")


# ---- generate


class PassesOn(LlamaForCausalLM):
    def generate(self, *args, **gen_kwargs):
        return super().generate(*args, **gen_kwargs)


class Slices(LlamaForCausalLM):
    def generate(self, input_ids, **gen_kwargs):
        return super().generate(input_ids, **gen_kwargs)[:, input_ids.shape[1] :]


class Twice(LlamaForCausalLM):
    def generate(self, *args, max_new_tokens=4, **kwargs):
        first = super().generate(*args, max_new_tokens=1, **kwargs)
        mask = kwargs.pop("attention_mask")
        mask = torch.nn.functional.pad(mask, (0, first.shape[1] - mask.shape[1]), value=1)
        kwargs.pop("input_ids", None)
        return super().generate(first, attention_mask=mask, max_new_tokens=max_new_tokens, **kwargs)


@pytest.mark.parametrize("kind", [PassesOn, Slices, Twice])
def test_overridden_generates_run(kind):
    model = model_of(kind)
    assert is_same_as_stock(model)
    ids = PROMPTS["input_ids"]
    options = dict(attention_mask=PROMPTS["attention_mask"], max_new_tokens=6, do_sample=False)
    expected = model.generate(ids, **options)
    hf_slospec.enable(model, config=CONFIG, always=True)
    assert torch.equal(model.generate(ids, **options), expected)


def test_submit_takes_a_generate_that_returns_what_stock_does():
    expected = (
        model_of()
        .generate(torch.tensor([[3, 4, 5]]), max_new_tokens=6, do_sample=False)[0, 3:]
        .tolist()
    )
    with SLOSpecGenerator(model_of(PassesOn), config=CONFIG) as generator:
        assert written(generator, [3, 4, 5], max_new_tokens=6, do_sample=False) == expected
    for kind in (Slices, Twice):
        with pytest.raises(
            UnsupportedModelError, match=f"{kind.__name__} decodes by a generate of its own"
        ):
            SLOSpecGenerator(model_of(kind), config=CONFIG).start()


class Alone(LlamaForCausalLM):
    def generate(self, inputs=None, **kwargs):
        kwargs.pop("custom_generate", None)
        return super().generate(inputs, **kwargs).flip(1)


class FewArguments(LlamaForCausalLM):
    def generate(self, input_ids, attention_mask=None, max_new_tokens=4):
        return super().generate(
            input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, do_sample=True
        )


@pytest.mark.parametrize("kind", [Alone, FewArguments])
def test_generates_that_decode_by_themselves_are_refused(kind):
    model = model_of(kind)
    call = PROMPTS | dict(max_new_tokens=6)
    torch.manual_seed(3)
    expected = model.generate(**call)
    hf_slospec.enable(model, config=CONFIG, always=True)
    with pytest.raises(
        UnsupportedModelError, match=f"{kind.__name__} decodes by a generate of its own"
    ):
        model.generate(**call)
    torch.manual_seed(3)
    with pytest.warns(FallbackWarning, match="a generate of its own"):
        assert torch.equal(model.generate(**call, fallback=True), expected)


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_libraries_may_wrap_generate(monkeypatch, is_wrapped):
    plain = GenerationMixin.generate
    lengths = []

    def watched(self, *args, **kwargs):
        out = plain(self, *args, **kwargs)
        lengths.append(out.shape[1])
        return out

    monkeypatch.setattr(
        GenerationMixin, "generate", functools.wraps(plain)(watched) if is_wrapped else watched
    )
    assert is_same_as_stock(model_of())
    assert len(lengths) == 6 and len(set(lengths)) == 1


def test_a_generate_of_the_instance_is_refused():
    model = model_of()
    plain = model.generate
    model.generate = functools.partial(
        lambda *args, model, **kwargs: plain(*args, **kwargs).flip(1), model=model
    )
    replaced = model.generate
    expected = stock(model, do_sample=False)
    hf_slospec.enable(model, config=CONFIG)
    options = dict(do_sample=False, slo_tpot=0.1)
    with pytest.raises(UnsupportedModelError, match="generate was set on this LlamaForCausalLM"):
        stock(model, **options)
    with pytest.warns(FallbackWarning, match="generate was set"):
        assert torch.equal(stock(model, **options, fallback=True), expected)
    assert torch.equal(stock(copy.deepcopy(model), do_sample=False), expected)
    hf_slospec.disable(model)
    assert model.generate is replaced
    with pytest.raises(UnsupportedModelError, match="generate was set"):
        SLOSpecGenerator(model, config=CONFIG).generate(**PROMPTS, **OPTIONS)
    model.generate = types.MethodType(LlamaForCausalLM.generate, model)  # transformers' own
    assert is_same_as_stock(model)


def test_an_enabled_generate_may_be_wrapped():
    model = model_of()
    expected = stock(model, do_sample=False)
    enabled = hf_slospec.enable(model, config=CONFIG).generate
    model.generate = functools.wraps(enabled)(lambda *args, **kwargs: enabled(*args, **kwargs))
    assert torch.equal(stock(model, do_sample=False, slo_tpot=0.1), expected)
    model.generate = lambda *args, **kwargs: enabled(*args, **kwargs)
    assert torch.equal(stock(model, do_sample=False, slo_tpot=0.1), expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_a_generate_of_a_peft_model_is_called_and_restored():
    peft = pytest.importorskip("peft", reason="wraps models")
    model = peft.get_peft_model(
        model_of(), peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    plain = model.generate
    model.generate = replaced = lambda *args, **kwargs: plain(*args, **kwargs).flip(1)
    expected = stock(model)
    for _ in range(2):
        hf_slospec.enable(model, config=CONFIG)
        assert torch.equal(stock(model, slo_tpot=0.1), expected)
    hf_slospec.disable(model)
    assert model.generate is replaced


def test_what_an_enabled_generate_wraps_takes_the_model():
    model = model_of()
    expected = stock(model, do_sample=False)
    for always in (False, True):
        hf_slospec.enable(model, config=CONFIG, always=always)
        assert torch.equal(
            model.generate.__wrapped__(model, **PROMPTS, **OPTIONS, do_sample=False), expected
        )
        ids = PROMPTS["input_ids"][:, -5:]
        assert model.generate.__wrapped__(model, ids, max_new_tokens=2, pad_token_id=0).shape == (
            2,
            7,
        )


# ---- drafts, compilation, adapters


def test_drafts_with_code_of_the_user_draft():
    model = model_of()
    draft = model_of(OwnInputs)
    draft.generate = lambda *_: None
    generator = SLOSpecGenerator(model, draft, config=CONFIG)
    out = generator.generate(**PROMPTS, **OPTIONS, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, stock(model, do_sample=False))


@pytest.mark.parametrize("name", ["", "model", "model.layers.0", "model.layers.1.mlp"])
@pytest.mark.parametrize("is_forward", [False, True])
def test_compiled_forwards_are_named(name, is_forward):
    model = model_of()
    part = model.get_submodule(name)
    if is_forward:
        part.forward = torch.compile(part.forward, backend="eager")
    elif name:
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, torch.compile(part, backend="eager"))
    else:
        model.compile(backend="eager")
    with pytest.raises(
        UnsupportedModelError,
        match=r"LlamaForCausalLM was compiled with compile\(\) or torch.compile",
    ):
        SLOSpecGenerator(model, config=CONFIG)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_activated_loras_are_named_while_they_are_in_use():
    peft = pytest.importorskip("peft", reason="has these adapters")
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[8, 9]
    )
    model = peft.get_peft_model(model_of(), config).eval()
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_()
    with pytest.raises(UnsupportedModelError, match="active aLoRA adapter"):
        hf_slospec.enable(model, config=CONFIG)
    expected = stock(model)
    hf_slospec.enable(model, config=CONFIG, fallback=True)
    with pytest.warns(FallbackWarning, match="aLoRA"):
        assert torch.equal(stock(model, slo_tpot=0.1), expected)
    hf_slospec.disable(model)
    model.base_model.disable_adapter_layers()
    hf_slospec.enable(model, config=CONFIG)
    assert torch.equal(stock(model, slo_tpot=0.1), stock(model))


# ---- whose code


def test_functions_are_told_apart_by_their_code():
    def mine(*args, **kwargs):
        return args, kwargs

    plain = GenerationMixin._sample
    moved = types.FunctionType(mine.__code__, plain.__globals__)
    assert is_of_transformers(plain) and is_of_transformers(model_of().generate)
    assert is_of_transformers(torch.no_grad()(plain))
    for function in (
        mine,
        functools.wraps(plain)(mine),
        torch.no_grad()(mine),
        functools.partial(plain),
        moved,
        print,
    ):
        assert not is_of_transformers(function)
    assert library_of(plain) == library_of(LlamaForCausalLM) == "transformers"
    assert library_of(types.FunctionType) == "builtins"
    assert foreign_members([DynamicCache(), LogitsProcessorList()]) == []
    assert foreign_members([[], Rounding()]) == ["list", "update"]
