"""Options of ``generate`` beside what tests/generate/test_equals_stock.py compares: steps, warnings
and errors.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from hf_slospec import (
    FallbackWarning,
    InvalidInputError,
    SLOSpecConfig,
    SLOSpecGenerator,
    UnsupportedModelError,
    UnsupportedOptionError,
)
from hf_slospec.generate.processors import IGNORE_SEQUENCE
from hf_slospec.policies.fixed import FixedPolicy
from tests.support.against_stock import GREEDY, SAMPLED, generator
from tests.support.breadth import quick_or
from tests.support.generate_arguments import Returns
from tests.support.stock_matrix import (
    Countdown,
    CountdownPerRow,
    MultiTokenEOSCriteria,
    model_of,
    with_gap,
    with_positions,
)
from tests.support.streamers import Recorder
from tests.support.toys.tiny_models import assert_same_as_stock, ragged_prompts, tiny_model

CHAIN = SLOSpecConfig(policy="adaserve", max_depth=4, max_width=1, token_budget=64)


def perfectly_drafted(**call):
    model = tiny_model("llama")
    call = (
        dict(do_sample=False, max_new_tokens=21, eos_token_id=None, return_dict_in_generate=True)
        | call
    )
    return SLOSpecGenerator(model, model, config=CHAIN).generate(**call)


@pytest.mark.parametrize("as_embeddings", [False, True])
def test_perfect_drafts_are_accepted_whole(as_embeddings):
    """Embeddings of tokens are recognised as those tokens."""
    inputs = dict(ragged_prompts(1))
    if as_embeddings:
        inputs["inputs_embeds"] = (
            model_of("llama").get_input_embeddings()(inputs.pop("input_ids")).detach()
        )
    (metrics,) = perfectly_drafted(**inputs).slo
    # Four accepted nodes and the bonus token.
    assert (metrics.acceptance_length, metrics.steps) == (5.0, 4)


def test_drafting_for_some_rows_at_a_time(monkeypatch):
    """Rows that were passed over are fed to the draft what they emitted meanwhile."""
    rng = np.random.default_rng(0)
    shape = SLOSpecConfig(max_depth=4, max_width=2)

    class ForSome(FixedPolicy):
        def plan(self, requests, begun_s, num_prefill_tokens=0):
            some = rng.permutation(len(requests))[: rng.integers(len(requests) + 1)]
            return replace(
                super().plan(requests, begun_s), drafting=[requests[index] for index in some]
            )

    monkeypatch.setattr(
        "hf_slospec.generate.speculator.new_policy", lambda _, costs, *others: ForSome(shape, costs)
    )
    ours = generator()
    out = assert_same_as_stock(
        ours.model,
        ours.generate,
        ragged_prompts(5),
        do_sample=True,
        max_new_tokens=quick_or(20, 32),
    )
    assert sum(metrics.accepted for metrics in out.slo) > 0


def test_rows_that_are_done_draft_on_until_all_are():
    inputs = ragged_prompts(3)
    criterion = MultiTokenEOSCriteria("a", inputs["input_ids"].shape[1], 3)
    out = perfectly_drafted(**inputs, stopping_criteria=[criterion])
    assert all(row.acceptance_length > 1.5 for row in out.slo)


def test_criteria_see_a_step_streamed_token_by_token():
    model = tiny_model("llama")
    lengths = []
    for generate in (
        type(model).generate.__get__(model),
        SLOSpecGenerator(model, model, config=CHAIN).generate,
    ):
        streamer = Recorder()

        def streamed(input_ids, scores, streamer=streamer, **_):
            return torch.full((len(input_ids),), len(streamer.puts) >= 6)

        options = dict(eos_token_id=None, streamer=streamer, stopping_criteria=[streamed])
        lengths.append(generate(**ragged_prompts(1), **GREEDY, **options).shape)
    assert lengths[0] == lengths[1]


def test_no_time_left_ends_after_one_token():
    inputs = ragged_prompts(2)
    out = generator().generate(**inputs, do_sample=False, max_new_tokens=30, max_time=1e-9)
    assert out.shape[1] == inputs["input_ids"].shape[1] + 1


def test_batch_level_processors_disable_speculation_with_a_warning():
    ours = generator()
    inputs = ragged_prompts(3)
    with pytest.warns(FallbackWarning, match="Countdown may look at the whole batch"):
        out = ours.generate(
            **inputs, **GREEDY, logits_processor=[Countdown()], return_dict_in_generate=True
        )
    assert [metrics.drafted for metrics in out.slo] == [0, 0, 0]
    assert all(metrics.tpot_s > 0 and metrics.tokens == 1 + metrics.steps for metrics in out.slo)
    out = ours.generate(
        **inputs, **GREEDY, logits_processor=[CountdownPerRow()], return_dict_in_generate=True
    )
    assert all(metrics.drafted for metrics in out.slo)


def test_processors_that_ignore_the_sequence_do_so():
    scores = torch.randn(5, 50)
    ids = torch.empty(5, 0, dtype=torch.int64)
    made = {
        "TopKLogitsWarper": dict(top_k=5), "TopPLogitsWarper": dict(top_p=0.7), "TopHLogitsWarper": dict(top_h=0.4),
        "MinPLogitsWarper": dict(min_p=0.1), "TypicalLogitsWarper": dict(mass=0.7), "EpsilonLogitsWarper": dict(
        epsilon=0.02), "EtaLogitsWarper": dict(epsilon=0.02), "TemperatureLogitsWarper": dict(temperature=0.5),
        "SuppressTokensLogitsProcessor": dict(suppress_tokens=[3, 4]),
    }  # fmt: skip
    for kind in IGNORE_SEQUENCE:
        processor = kind(**made.get(kind.__name__, {}))
        together = processor(ids, scores.clone())
        for row in range(5):
            alone = processor(torch.randint(0, 50, (1, 9)), scores[row : row + 1].clone())
            torch.testing.assert_close(together[row : row + 1], alone)


RETURNS = r"logits_processor .* must return scores of shape"
# Model, what is changed in the arguments of a call, and its error.
REFUSED = {
    "dropout": ("gpt2-training", lambda call: call, UnsupportedModelError, r"model\.eval\(\)"),
    "positions": (
        "llama",
        lambda call: call | dict(position_ids=with_positions(call)["position_ids"] + 1),
        UnsupportedOptionError,
        "position_ids",
    ),
    "gap": ("mistral-window", with_gap, UnsupportedOptionError, "sliding window"),
    "gap before states": ("Lfm2ForCausalLM", with_gap, UnsupportedOptionError, "a recurrent state .* would count"),
    "nothing": ("llama", lambda call: call | dict(logits_processor=[Returns(None)]), InvalidInputError, RETURNS),
    "row": (
        "llama", lambda call: call | dict(logits_processor=[Returns(torch.zeros(101))]), InvalidInputError, RETURNS,
    ),
    "no tokenizer": ("llama", lambda call: call | dict(stop_strings=["x"]), ValueError, "tokenizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_options_and_models(name):
    model_name, change, error, match = REFUSED[name]
    ours = SLOSpecGenerator(model_of(model_name), config=CHAIN)
    with pytest.raises(error, match=match):
        ours.generate(**change(dict(ragged_prompts(1))), **SAMPLED)
