"""Output of ``generate`` beside tokens: metrics of rows and events of steps."""

from __future__ import annotations

import copy
import itertools
import json
import pickle

import pytest
from torch.utils import _pytree

import hf_slospec
from hf_slospec.generate.call import SLOSpecEncoderDecoderOutput
from hf_slospec.model.properties import CACHE_NAME
from tests.support.enabled_model import OPTIONS
from tests.support.toys.tiny_encoder_decoders import texts, tiny_text_model
from tests.support.toys.tiny_models import ragged_prompts


def test_output_has_hf_fields_and_per_row_metrics(model):
    out = model.generate(
        **ragged_prompts(3), **OPTIONS, slo_tpot=[1e-6, None, 100.0], return_dict_in_generate=True
    )
    assert out.sequences.shape[0] == 3
    assert out.scores is None
    assert [metrics.tpot_slo_s for metrics in out.slo] == [1e-6, None, 100.0]
    assert [metrics.attained for metrics in out.slo] == [False, None, True]
    for metrics in out.slo:
        assert metrics.tokens == 1 + metrics.steps + metrics.accepted
        assert metrics.tpot_s > 0
        assert metrics.ttft_s > 0
        assert metrics.acceptance_length == pytest.approx((metrics.tokens - 1) / metrics.steps)
        assert metrics.expected_tokens >= metrics.steps  # one token comes in any case
        assert metrics.phases.total_s > 0.0
        assert metrics.worst_tpot_s is None or metrics.worst_tpot_s > 0.0
    assert [metrics.slack_s is None for metrics in out.slo] == [False, True, False]
    assert out.slo[0].slack_s < 0.0 < out.slo[2].slack_s


def test_output_tells_what_happened_in_every_step(model, tmp_path):
    inputs = ragged_prompts(3)
    out = model.generate(
        **inputs, **OPTIONS, slo_tpot=[0.5, None, 0.1], return_dict_in_generate=True
    )
    assert [step.is_prefill for step in out.steps] == [True] + [False] * (len(out.steps) - 1)
    for row, metrics in enumerate(out.slo):
        parts = [part for step in out.steps for part in step.requests if part.index == row]
        assert {part.tpot_slo_s for part in parts} == {metrics.tpot_slo_s}
        assert sum(part.committed for part in parts) == metrics.tokens
        assert sum(part.nodes - 1 for part in parts) == metrics.drafted
        assert len(parts) == metrics.steps + 1
    for step, later in itertools.pairwise(out.steps):
        assert step.begun_s + step.phases.total_s <= later.begun_s + 1e-6
    hf_slospec.write_chrome_trace(out.steps, tmp_path / "trace.json")
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 4 * len(
        out.steps
    )


@pytest.mark.parametrize("extra", [{}, {"output_scores": True, "output_logits": True}])
@pytest.mark.parametrize("kind", [hf_slospec.SLOSpecOutput, SLOSpecEncoderDecoderOutput])
def test_items_and_indices_are_those_of_stocks_output(model, kind, extra):
    inputs = ragged_prompts(2)
    if kind is SLOSpecEncoderDecoderOutput:
        model = hf_slospec.enable(copy.deepcopy(tiny_text_model("Bart")))
        inputs = texts(2)
    options = OPTIONS | extra | {"return_dict_in_generate": True}
    stock = model.generate(**inputs, **options)
    ours = model.generate(**inputs, **options, slo_tpot=0.05)
    assert type(ours) is kind
    assert isinstance(ours, type(stock))
    assert list(ours) == list(ours.keys()) == list(stock)
    assert len(ours) == len(stock)
    assert [type(part) for part in ours.to_tuple()] == [type(part) for part in stock.to_tuple()]
    assert ours[-1] is ours.to_tuple()[-1] is ours[:][-1] is ours[CACHE_NAME]
    assert "slo" not in ours
    leaves, spec = _pytree.tree_flatten(ours)
    assert [type(leaf) for leaf in leaves] == [type(leaf) for leaf in _pytree.tree_leaves(stock)]
    rebuilt = _pytree.tree_unflatten(leaves, spec)
    assert type(rebuilt) is kind
    assert list(rebuilt) == list(stock)
    assert (rebuilt.slo, rebuilt.steps) == (None, None)
    for same in (copy.copy(ours), copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(same) is kind
        assert list(same) == list(stock)
        assert [row.tokens for row in same.slo] == [row.tokens for row in ours.slo]
        assert len(same.steps) == len(ours.steps)
