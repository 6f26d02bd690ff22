"""Models whose layers keep states: calls, caches, the batcher, preemption and reuse, all as stock
decodes them.
"""

from __future__ import annotations

import pytest
import transformers

from hf_slospec import SLOSpecConfig, SLOSpecGenerator, UnsupportedOptionError
from tests.support.breadth import quick_or
from tests.support.toys.tiny_configs import tiny_config
from tests.support.toys.tiny_models import ragged_prompts, sharpened

CONFIG = SLOSpecConfig(
    policy="adaserve",
    check_invariants=True,
    max_depth=quick_or(2, 4),
    token_budget=40,
    kv_tokens=2_000,
)


def tiny(family, noise=0.0):
    model_class = getattr(transformers, f"{family}ForCausalLM")
    return sharpened(lambda: model_class(tiny_config(model_class.config_class)), 0, noise)


def test_masked_tokens_inside_a_row_are_refused():
    generator = SLOSpecGenerator(tiny("Lfm2"), config=CONFIG)
    inputs = ragged_prompts(1)
    inputs["attention_mask"][0, 4] = 0
    with pytest.raises(
        UnsupportedOptionError, match=r"a recurrent state .* would count; pad on the left only"
    ):
        generator.generate(**inputs, max_new_tokens=4)
