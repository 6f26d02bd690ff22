"""Arguments of any kind for ``submit``, and settings of any size; ``scripts/fuzz.py`` tries more of
them.
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_slospec import InvalidInputError, SLOSpecConfig, SLOSpecError, SLOSpecGenerator
from hf_slospec.policies.registry import policy_named
from hf_slospec.request.state import Progress
from tests.support.fuzzing import HUGE, fuzzed, mostly, some_of
from tests.support.generate_arguments import SEED, SLO, VALID, called, check_like_stock, seconds
from tests.support.policy_names import POLICIES
from tests.support.served_pair import WAIT_S
from tests.support.toys.tiny_models import GROUPED, ragged_prompts, sharpened, tiny_model
from tests.support.toys.tiny_tokenizers import byte_level

VOCAB = 300
TOKENIZER = copy.deepcopy(byte_level(VOCAB))
TOKENIZER.chat_template = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"


def model(noise=0.0):
    config = LlamaConfig(**GROUPED | dict(vocab_size=VOCAB))
    return sharpened(lambda: AutoModelForCausalLM.from_config(config), 0, noise)


@pytest.fixture(scope="module")
def served():
    config = SLOSpecConfig(check_invariants=True, kv_tokens=3000)
    with SLOSpecGenerator(model(), model(0.03), TOKENIZER, config) as generator:
        yield generator


ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30)
messages = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", 3]),
        "content": st.sampled_from(["a", None, [{"type": "image"}]]),
    }
)
PROMPTS = st.one_of(
    ids,
    ids.map(torch.tensor),
    ids.map(lambda own: torch.tensor([own])),
    ids.map(np.array),
    st.text(min_size=1, max_size=10),
    st.sampled_from(["\ud800", "x\udcff", "\0"]),
    st.lists(messages, max_size=2),
    st.lists(st.integers(-2, VOCAB) | st.booleans(), max_size=3),
)
OWN: dict[str, st.SearchStrategy[Any]] = dict(
    slo_ttft=seconds,
    priority=st.integers(),
    best_effort=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
    block=st.booleans(),
    timeout=st.floats(0, 1e9),
    logprobs=st.one_of(st.integers(0, VOCAB + 1), st.sampled_from(HUGE)),
    cache_salt=st.text(max_size=3),
    must_guarantee=st.booleans(),
    images=st.sampled_from([[], ["x"]]),
)
RESUME = st.builds(
    Progress, ids | st.lists(st.integers(-1, VOCAB)), st.floats(-1, 1), st.floats(-1, 2)
)


@fuzzed(25)
@given(prompt=mostly(PROMPTS), own=some_of(OWN, 2), options=some_of(VALID, 3), slo=mostly(SLO))
def test_submit_gives_what_stock_gives_or_says_what_is_wrong(
    served: SLOSpecGenerator, prompt: Any, own: dict[str, Any], options: dict[str, Any], slo: Any
) -> None:
    def submitted(**kwargs):
        return (
            served.submit(prompt, slo_tpot=slo, **own | {"seed": seed}, **kwargs)
            .result(WAIT_S)
            .token_ids
        )

    seed = SEED if own.get("seed") is None else own["seed"]
    options = {"max_new_tokens": 6} | options
    ours = called(submitted, options)
    if not isinstance(ours, SLOSpecError):
        is_chat = isinstance(prompt, list) and isinstance(prompt[0], dict)
        text = TOKENIZER.apply_chat_template(prompt, tokenize=False) if is_chat else prompt
        tokens = TOKENIZER(text)["input_ids"] if isinstance(text, str) else prompt
        rows = torch.as_tensor(tokens).reshape(1, -1)
        alone = {
            "input_ids": rows,
            "attention_mask": torch.ones_like(rows),
            "tokenizer": TOKENIZER,
        } | options
        whole = torch.cat((rows, torch.tensor([ours])), dim=1) if isinstance(ours, list) else ours
        check_like_stock(whole, served.model, alone, seed)
    assert served.submit([5, 6, 7], max_new_tokens=2).result(WAIT_S).metrics.tokens == 2


@fuzzed(20)
@given(resume=mostly(RESUME), prompt=mostly(PROMPTS), num_top=mostly(st.integers(0, VOCAB + 1)))
def test_resumed_outputs_and_log_probabilities_of_prompts(
    served: SLOSpecGenerator, resume: Any, prompt: Any, num_top: Any
) -> None:
    with contextlib.suppress(SLOSpecError):
        served.submit([5, 6, 7], resume=resume, max_new_tokens=12).result(WAIT_S)
    with contextlib.suppress(SLOSpecError):
        served.prompt_logprobs(prompt, num_top)
    assert served.submit([5, 6, 7], max_new_tokens=2).result(WAIT_S).metrics.tokens == 2


counts = st.integers(1, 9)
sizes = counts | st.sampled_from((64, 1000, 1024, 10**6, 10**9, 10**12))
strengths = st.floats(0, 3) | st.sampled_from((1e300, float("inf")))
shares = st.floats(0, 1)
OPTION_VALUES: dict[str, st.SearchStrategy[Any]] = dict(
    max_tree_nodes=sizes,
    depth_offset=sizes,
    width_offset=st.integers(-(10**9), 10**9),
    min_depth=sizes,
    slo_order=st.sampled_from(["ascending", "descending"]),
    max_slo_share=strengths,
    slack=strengths,
    prefill_disabling=shares,
    min_confidence=shares,
)
FIELDS: dict[str, st.SearchStrategy[Any]] = dict(
    max_depth=sizes,
    max_width=st.integers(1, 64),
    token_budget=sizes,
    draft_budget=sizes,
    urgency=strengths,
    attention=st.sampled_from(["auto", "sdpa", "4d_mask", "flash", "triton"]),
    coupling=st.booleans(),
    prepack=st.sampled_from([None, True, False]),
    cuda_graphs=st.booleans(),
    fused_layers=st.booleans(),
    admission=st.sampled_from(["slo", "edf", "fcfs", "priority"]),
    prefill=st.sampled_from(["beside", "first", "chunked"]),
    guarantee=st.none() | st.floats(0, 1),
    max_batch=sizes,
    max_queue=sizes,
    kv_tokens=sizes | st.integers(100, 3000),
    kept_tokens=sizes,
    prefill_chunk=sizes,
    starvation_s=strengths,
    check_invariants=st.booleans(),
    max_dept=counts,
)


@st.composite
def settings(draw):
    """Draw fields of a config, nearly all of them valid, and some of its policy's own."""
    policy = draw(st.sampled_from(POLICIES))
    own = policy_named(policy).options.model_fields
    options = {name: values for name, values in OPTION_VALUES.items() if name in own}
    return {
        "policy": policy,
        **draw(some_of(FIELDS, 5, odd_of=30)),
        **(draw(some_of(options, odd_of=30)) if own else {}),
    }


@fuzzed(15)
@given(fields=settings(), has_assistant=st.booleans())
def test_any_valid_config_gives_what_stock_gives(
    fields: dict[str, Any], has_assistant: bool
) -> None:
    try:
        config = SLOSpecConfig(**fields)
    except InvalidInputError:
        return
    target = tiny_model("llama")
    draft = tiny_model("llama", noise=0.03)
    inputs = ragged_prompts(2)
    expected = type(target).generate(target, **inputs, max_new_tokens=6)
    (prompt,) = (
        row[mask.bool()]
        for row, mask in zip(inputs["input_ids"][:1], inputs["attention_mask"], strict=False)
    )
    try:
        generator = SLOSpecGenerator(target, draft if has_assistant else None, config=config)
        assert torch.equal(generator.generate(**inputs, max_new_tokens=6, slo_tpot=0.01), expected)
        with generator:
            tokens = (
                generator.submit(prompt, max_new_tokens=6, slo_tpot=0.01).result(WAIT_S).token_ids
            )
        assert tokens == expected[0, -6:].tolist()
    except SLOSpecError:
        pass
    assert torch.equal(type(target).generate(target, **inputs, max_new_tokens=6), expected)
