"""Callbacks of the user's own that call the model which decodes: as in stock ``generate``."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from transformers import LogitsProcessor

import hf_slospec
from hf_slospec import InvalidInputError, SLOSpecGenerator, divergence_report
from tests.support.against_stock import DRAFTS_ALWAYS
from tests.support.breadth import nightly_rows_but, quick_or
from tests.support.nested_calls import KINDS, CallingCriterion, CallingProcessor, calling
from tests.support.toys.tiny_models import ragged_prompts, tiny_model

WAIT_S = 120.0
NEW = quick_or(10, 20)
NESTED = dict(max_new_tokens=6, do_sample=False)


@pytest.fixture(params=["enabled", "generator"])
def speculated(request):
    """The model, and a ``generate`` of ours."""
    model = tiny_model("llama")
    draft = tiny_model("llama", noise=0.03)
    if request.param == "generator":
        yield model, SLOSpecGenerator(model, draft, config=DRAFTS_ALWAYS).generate
    else:
        hf_slospec.enable(model, draft, config=DRAFTS_ALWAYS, always=True)
        yield model, model.generate
        hf_slospec.disable(model)


@pytest.fixture
def enabled():
    yield hf_slospec.enable(
        tiny_model("llama"), tiny_model("llama", noise=0.03), config=DRAFTS_ALWAYS, always=True
    )
    hf_slospec.disable(tiny_model("llama"))


def stock_of(model):
    return type(model).generate.__get__(model)


def texts(input_ids, num_rows=1):
    """Inputs of a nested call: beginnings of the tokens, of different lengths."""
    rows = input_ids[:1, : input_ids.shape[1] // 2].repeat(num_rows, 1)
    return dict(input_ids=rows, attention_mask=torch.ones_like(rows))


def nested_calls(model, generate, ours):
    """One kind of nested call after the other."""
    calls = [
        lambda ids: generate(**texts(ids), **NESTED).tolist(),
        lambda ids: generate(**texts(ids, 3), **NESTED).tolist(),
        lambda ids: generate(**texts(ids, 2), **NESTED | dict(do_sample=True)).tolist(),
        lambda ids: generate(
            **texts(ids), **NESTED, **dict(assistant_model=model) if ours else {}
        ).tolist(),
        lambda ids: generate(
            **texts(ids), **NESTED, **dict(prompt_lookup_num_tokens=3) if ours else {}
        ).tolist(),
        lambda ids: len(
            generate(**texts(ids), **NESTED, return_dict_in_generate=True).sequences[0]
        ),
        lambda ids: stock_of(model)(**texts(ids), **NESTED).tolist(),
        lambda ids: model(**texts(ids)).logits[0, -1].argmax().item(),
        lambda ids: generate(**texts(ids), **NESTED, slo_tpot=0.1).tolist() if ours else None,
        lambda ids: divergence_report(model, texts(ids), **NESTED).divergences if ours else [],
    ]
    if not ours:
        calls[8] = calls[0]
    if not hasattr(getattr(model, "generate", None), "decoder"):
        calls.pop()
    turns = itertools.cycle(calls)
    return lambda input_ids: next(turns)(input_ids)


@pytest.mark.parametrize(
    ("kind", "do_sample"),
    nightly_rows_but(
        [("processor", True), ("criterion", True), ("prefix", False), ("streamer", True)],
        list(itertools.product(KINDS, (False, True))),
    ),
)
def test_callbacks_may_call_generate(speculated, kind, do_sample):
    model, ours = speculated
    inputs = ragged_prompts(1, seed=3)
    results = []
    for generate in (stock_of(model), ours):
        torch.manual_seed(5)
        callback, argument = calling(kind, nested_calls(model, generate, generate is ours))
        output = generate(
            **inputs, **argument, do_sample=do_sample, max_new_tokens=NEW, eos_token_id=None,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
        results.append((output.sequences.tolist(), callback.seen, torch.get_rng_state().tolist()))
    assert results[0] == results[1]
    assert len(results[1][1]) >= NEW


def test_copies_per_row_refer_to_the_same_model(enabled):
    class Judge(CallingCriterion):
        def __init__(self, model, generator):
            super().__init__(self.judge)
            self.model = model
            self.generator = generator
            self.method = model.generate

        def judge(self, input_ids):
            assert self.model is enabled and self.method.__self__ is enabled
            call = [self.method, self.generator.generate][input_ids.shape[1] % 2]
            call(**texts(input_ids), **NESTED, slo_tpot=0.1)

    judge = Judge(enabled, SLOSpecGenerator(enabled, config=DRAFTS_ALWAYS))
    inputs = ragged_prompts(2, seed=4)
    options = dict(do_sample=False, max_new_tokens=NEW)
    expected = stock_of(enabled)(**inputs, **options)
    assert torch.equal(enabled.generate(**inputs, **options, stopping_criteria=[judge]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_callbacks_may_wait_for_calls_in_other_threads(enabled, kind):
    def in_thread(input_ids):
        results = []
        call = lambda: results.append(enabled.generate(**texts(input_ids, 2), **NESTED).tolist())  # noqa: E731
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive(), "the call waits for the callback"
        return results[0]

    inputs = ragged_prompts(1, seed=6)
    results = []
    for generate, run in (
        (stock_of(enabled), lambda ids: stock_of(enabled)(**texts(ids, 2), **NESTED).tolist()),
        (enabled.generate, in_thread),
    ):
        callback, argument = calling(kind, run)
        output = generate(
            **inputs, **argument, do_sample=False, max_new_tokens=5, eos_token_id=None
        )
        results.append((output.tolist(), callback.seen))
    assert results[0] == results[1]


def test_padding_of_a_batch_is_processed_by_callbacks_that_call_generate(enabled):
    inputs = ragged_prompts(3, seed=8)
    seen = []
    for generate in (stock_of(enabled), enabled.generate):
        processor = CallingProcessor(lambda ids: generate(**texts(ids), **NESTED))  # noqa: B023
        output = generate(
            **inputs, logits_processor=[processor], do_sample=False, max_new_tokens=24, output_logits=True,
            eos_token_id=list(range(0, 101, 3)), return_dict_in_generate=True,
        )  # fmt: skip
        seen.append(output)
    assert torch.equal(seen[0].sequences, seen[1].sequences)
    torch.testing.assert_close(
        torch.stack(seen[1].logits), torch.stack(seen[0].logits), rtol=1e-3, atol=1e-3
    )


def test_calls_nest_and_their_errors_are_the_callers(enabled):
    inputs = ragged_prompts(1, seed=9)
    options = dict(do_sample=False, max_new_tokens=4)
    expected = stock_of(enabled)(**inputs, **options)

    def inner(input_ids):
        enabled.generate(**texts(input_ids), **NESTED)

    def middle(input_ids):
        enabled.generate(**texts(input_ids), **NESTED, stopping_criteria=[CallingCriterion(inner)])
        with pytest.raises(InvalidInputError, match="input_ids is empty"):
            enabled.generate(input_ids=input_ids[:, :0], max_new_tokens=3)

    assert torch.equal(
        enabled.generate(**inputs, **options, logits_processor=[CallingProcessor(middle)]), expected
    )

    def fails(input_ids):
        if input_ids.shape[1] > inputs["input_ids"].shape[1] + 1:
            raise ZeroDivisionError("of the user's own")

    def failing(input_ids):
        enabled.generate(**inputs, **options, stopping_criteria=[CallingCriterion(fails)])

    with pytest.raises(ZeroDivisionError, match="of the user's own"):
        enabled.generate(**inputs, **options, logits_processor=[CallingProcessor(failing)])
    assert torch.equal(enabled.generate(**inputs, **options), expected)


class Edits:
    """Processor and criterion that changes tokens which the model has read."""

    per_row = True

    def __init__(self, place):
        self.place = place

    def __call__(self, input_ids, scores):
        input_ids.view(-1)[self.place] = 7
        return (
            scores
            if isinstance(scores, torch.Tensor)
            else torch.zeros(len(input_ids), dtype=torch.bool)
        )


@pytest.mark.parametrize(
    ("name", "batch", "place"),
    [
        ("logits_processor", 1, -1),
        ("logits_processor", 2, 3),
        ("stopping_criteria", 1, 0),
        ("stopping_criteria", 1, -2),
        ("stopping_criteria", 2, -1),
    ],
)
def test_changed_tokens_that_the_model_has_read_are_refused(enabled, name, batch, place):
    inputs = ragged_prompts(batch, seed=2)
    options = dict(do_sample=True, max_new_tokens=NEW, eos_token_id=None)
    argument = {name: [Edits(place)]}
    with pytest.raises(hf_slospec.UnsupportedOptionError, match=f"{name}.* has changed input_ids"):
        enabled.generate(**inputs, **options, **argument)
    if batch == 1:  # stock calls them with all rows
        torch.manual_seed(4)
        expected = stock_of(enabled)(
            **{key: value.clone() for key, value in inputs.items()}, **options, **argument
        )
        torch.manual_seed(4)
        with pytest.warns(hf_slospec.FallbackWarning, match=f"{name}.* has changed input_ids"):
            assert torch.equal(
                enabled.generate(**inputs, **options, **argument, fallback=True), expected
            )


def test_processors_may_use_their_tokens_as_scratch_memory_if_they_restore_them(enabled):
    class Restores(LogitsProcessor):
        def __call__(self, input_ids, scores):
            input_ids.add_(1).sub_(1)
            return scores

    inputs = ragged_prompts(1, seed=2)
    options = dict(do_sample=False, max_new_tokens=NEW)
    expected = stock_of(enabled)(**inputs, **options)
    assert torch.equal(
        enabled.generate(**inputs, **options, logits_processor=[Restores()]), expected
    )
