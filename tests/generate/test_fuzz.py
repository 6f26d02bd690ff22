"""Arguments of any kind for ``enable``, ``generate`` and drafters; ``scripts/fuzz.py`` tries more
of them.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecError, SLOSpecGenerator
from hf_slospec.policies.fixed import FixedPolicy
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.fuzzing import fuzzed, mostly, odd, some_of
from tests.support.generate_arguments import (
    SLO,
    VALID,
    OwnError,
    called,
    check_like_stock,
    fails,
    prompts,
)
from tests.support.toys.tiny_models import ragged_prompts, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level
from tests.support.user_code import USER_CODE, Nested

PROMPT: dict[str, Any] = ragged_prompts(2) | {"max_new_tokens": 3}


@functools.cache
def plain(model):
    return torch.as_tensor(type(model).generate(model, **PROMPT))


def check_works(model, **slo):
    """A plain call gives what it gave before, as does one with an SLO where the model is enabled."""
    expected = plain(model)
    assert torch.equal(model.generate(**PROMPT), expected)
    if slo:
        assert torch.equal(model.generate(**PROMPT, **slo), expected)


@pytest.fixture(scope="module")
def drafting():
    yield hf_slospec.enable(
        tiny_model("llama"), tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS
    )
    hf_slospec.disable(tiny_model("llama"))
    assert "generate" not in vars(tiny_model("llama"))


@fuzzed(25)
@given(
    inputs=prompts(),
    options=some_of(VALID),
    slo=mostly(SLO),
    fallback=st.sampled_from([None, None, False, True]),
)
def test_generate_returns_what_stock_returns_or_says_what_is_wrong(
    drafting: Any, inputs: dict[str, Any], options: dict[str, Any], slo: Any, fallback: bool | None
) -> None:
    arguments = inputs | {"max_new_tokens": 6} | options
    own = {"slo_tpot": 0.1 if slo is None else slo, "fallback": fallback}
    ours = called(lambda **kwargs: drafting.generate(**kwargs, **own), arguments)
    check_like_stock(ours, drafting, arguments)
    check_works(drafting, slo_tpot=0.1)


class Object:
    """Has the methods of a drafter or a policy, and returns what they should not."""

    def __init__(self, found=None, *_):
        self.found = found

    def draft(self, *_):
        return self.found

    plan = select = observe = release = draft


CONFIGS = [
    SLOSpecConfig(),
    DRAFTS_ALWAYS,
    SLOSpecConfig(policy="none"),
    SLOSpecConfig(prepack=False),
    {},
]
ENABLE: dict[str, st.SearchStrategy[Any]] = dict(
    assistant_model=st.sampled_from(
        [tiny_model("llama", noise=0.03), tiny_model("opt"), tiny_model("llama")]
    ),
    drafter=st.builds(Object, odd())
    | st.builds(lambda: hf_slospec.load_drafter("lookup", tiny_model("llama"))),
    config=st.sampled_from(CONFIGS),
    make_policy=st.sampled_from([Object, FixedPolicy, lambda *_: None, fails]),
    always=st.booleans(),
    fallback=st.booleans(),
)
GENERATOR = {name: values for name, values in ENABLE.items() if name != "always"} | dict(
    tokenizer=st.just(byte_level(300)), processor=odd()
)
MODELS = st.sampled_from([tiny_model("llama"), tiny_model("gpt2")])


@fuzzed(25)
@given(model=mostly(MODELS, 8), arguments=some_of(ENABLE), slo=mostly(SLO))
def test_enable_refuses_or_works_and_disable_restores(
    model: Any, arguments: dict[str, Any], slo: Any
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            hf_slospec.enable(model, **arguments)
            out = model.generate(**PROMPT, slo_tpot=slo)
            assert torch.equal(out, plain(model))
        except (SLOSpecError, OwnError):
            pass
        except TypeError:
            if arguments.get("make_policy") is not int:  # cannot be called with a config and costs
                raise
        finally:
            for own in (tiny_model("llama"), tiny_model("gpt2"), arguments.get("assistant_model")):
                if isinstance(own, torch.nn.Module):
                    hf_slospec.disable(own)
                    assert "generate" not in vars(own)
    check_works(tiny_model("llama"))


@fuzzed(25)
@given(
    model=mostly(MODELS, 8),
    arguments=some_of(GENERATOR),
    inputs=prompts(),
    options=some_of(VALID, 2),
)
def test_generators_refuse_or_return_what_stock_returns(
    model: Any, arguments: dict[str, Any], inputs: dict[str, Any], options: dict[str, Any]
) -> None:
    options = inputs | {"max_new_tokens": 4} | options
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            generator = SLOSpecGenerator(model, **arguments)
        ours = called(generator.generate, options)
        if arguments.get("make_policy") not in (int, fails):  # which raise errors of their own
            check_like_stock(ours, model, {"tokenizer": arguments.get("tokenizer")} | options)
    except SLOSpecError:
        pass
    finally:
        for own in (tiny_model("llama"), tiny_model("gpt2"), arguments.get("assistant_model")):
            if isinstance(own, torch.nn.Module):
                hf_slospec.disable(own)
    check_works(tiny_model("llama"))


@fuzzed(25)
@given(
    source=mostly(
        st.sampled_from(
            [
                "lookup",
                "lookup+lookup",
                "mtp",
                "+",
                "lookup+",
                "no/such",
                tiny_model("opt"),
                ["lookup", 3],
            ]
        )
    ),
    target=mostly(MODELS),
    arguments=some_of(
        dict(
            tokenizer=st.just(byte_level(300)),
            assistant_tokenizer=st.just(byte_level(290)),
            share_texts=st.booleans(),
        )
    ),
)
def test_drafters_are_loaded_or_refused(
    source: Any, target: Any, arguments: dict[str, Any]
) -> None:
    with contextlib.suppress(SLOSpecError):
        hf_slospec.load_drafter(source, target, **arguments)


NESTED = st.builds(
    Nested,
    some_of(
        dict(
            do_sample=st.booleans(),
            prompt_lookup_num_tokens=st.just(3),
            assistant_model=st.sampled_from([tiny_model("llama", noise=0.03)]),
            num_return_sequences=st.integers(1, 2),
            return_dict_in_generate=st.just(False),
        ),
        2,
        odd_of=10**6,
    ),
)


@fuzzed(30)
@given(
    code=st.lists(st.sampled_from(USER_CODE), min_size=1, max_size=2, unique=True),
    nested=NESTED,
    batch=st.integers(1, 3),
    seed=st.integers(0, 3),
    do_sample=st.booleans(),
    always=st.booleans(),
    slo_in_nested=st.booleans(),
    as_generator=st.booleans(),
    fallback=st.booleans(),
)
def test_code_of_the_user_is_called_as_stock_calls_it_or_refused(
    code: list[Any], nested: Nested, batch: int, seed: int, do_sample: bool, always: bool, slo_in_nested: bool,
    as_generator: bool, fallback: bool,
) -> None:  # fmt: skip
    stock = copy.deepcopy(tiny_model("llama"))
    model = copy.deepcopy(tiny_model("llama"))
    prompt = ragged_prompts(batch, seed)
    options = prompt | {"max_new_tokens": 12, "do_sample": do_sample}
    without_slo = dataclasses.replace(nested, slo={})

    def arguments(model, nested):
        added: dict[str, Any] = {}
        for customize in code:
            added |= customize(model, nested)
        return options | added

    stock_arguments = arguments(stock, without_slo)
    expected = called(stock.generate, stock_arguments)
    nested = dataclasses.replace(nested, slo={"slo_tpot": 0.1} if slo_in_nested else {})
    own = arguments(model, nested)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hf_slospec.enable(
                model,
                tiny_model("llama", noise=0.03),
                config=DRAFTS_ALWAYS,
                always=always,
                fallback=fallback,
            )
            generate = functools.partial(model.generate, slo_tpot=0.1)
            if as_generator:
                generate = SLOSpecGenerator(
                    model, tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS
                ).generate
            ours = called(generate, own)
            plain = called(
                functools.partial(model.generate, slo_tpot=0.1), prompt | {"max_new_tokens": 6}
            )
    except SLOSpecError:
        return
    if isinstance(ours, SLOSpecError):
        assert not fallback or as_generator
    elif isinstance(expected, Exception):
        assert type(ours) is type(expected), ours
    else:
        assert isinstance(ours, torch.Tensor), ours
        assert torch.equal(ours, expected)
    if not isinstance(plain, SLOSpecError):
        called_plainly = called(stock.generate, prompt | {"max_new_tokens": 6})
        assert torch.equal(plain, called_plainly)
