"""Generators that draft in every step."""

from __future__ import annotations

from hf_slospec import (
    SLOSpecConfig,
    SLOSpecGenerator,
)
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import tiny_model

DRAFTS_ALWAYS = SLOSpecConfig(
    policy="adaserve", check_invariants=True, token_budget=40, max_depth=quick_or(2, 4)
)
NEW = dict(max_new_tokens=quick_or(14, 24), output_scores=True, output_logits=True)
GREEDY = NEW | dict(do_sample=False)
SAMPLED = NEW | dict(do_sample=True)


def generator(family="llama", **options):
    return SLOSpecGenerator(
        tiny_model(family), tiny_model(family, noise=0.03), config=DRAFTS_ALWAYS, **options
    )
