"""Outputs that follow a JSON schema, whatever the model would like to write."""

from __future__ import annotations

import json

import pytest
import torch

import hf_slospec
from hf_slospec import SLOSpecConfig, SLOSpecGenerator, load_tiny_pair
from hf_slospec.errors import InvalidInputError
from hf_slospec.generate import prepare
from hf_slospec.generate.grammars import Grammars
from tests.support.breadth import quick_or
from tests.support.toys.tiny_models import assert_same_as_stock

SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "size": {"enum": [1, 20, 300]},
        "name": {"type": "string", "maxLength": 4},
    },
    "required": ["ok", "size", "name"],
    "additionalProperties": False,
}
PROMPT = "def main():"


@pytest.fixture(scope="module")
def pair():
    return load_tiny_pair(torch.float32)


@pytest.fixture(scope="module")
def grammars(pair):
    target, _, tokenizer = pair
    return Grammars(tokenizer, target.config.vocab_size, [target.generation_config.eos_token_id])


@pytest.mark.parametrize(
    ("options", "seeds"),
    [
        (dict(do_sample=False), [0]),
        (dict(do_sample=True, temperature=1.5), [0, 1]),
        (dict(do_sample=True), [2]),
    ],
)
def test_outputs_follow_the_schema_and_equal_those_of_generate(pair, grammars, options, seeds):
    target, draft, tokenizer = pair
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    num_prompt = ids.shape[1]
    with SLOSpecGenerator(target, draft, tokenizer) as generator:
        for seed in seeds:
            torch.manual_seed(seed)
            own = [grammars.processor(SCHEMA, num_prompt)]
            expected = target.generate(ids, logits_processor=own, max_new_tokens=160, **options)[
                0, num_prompt:
            ]
            given = dict(
                logits_processor=[grammars.processor(SCHEMA, num_prompt)],
                max_new_tokens=160,
                **options,
            )
            handle = generator.submit(PROMPT, seed=seed if options["do_sample"] else None, **given)
            result = handle.result(120.0)
            assert (
                result.token_ids == expected.tolist()
                and result.finish_reason == "stop"
                and result.text is not None
            )
            found = json.loads(result.text)
            assert found.keys() == {"ok", "size", "name"}
            assert (
                isinstance(found["ok"], bool)
                and found["size"] in (1, 20, 300)
                and len(found["name"]) <= 4
            )


def test_a_text_that_was_cut_back_is_followed_again(grammars):
    constraint = grammars.processor(SCHEMA, 1)
    scores = torch.zeros(1, grammars._vocab_size)
    first = constraint(torch.tensor([[5]]), scores)
    token = int((first[0] == 0).nonzero()[0])
    constraint(torch.tensor([[5, token]]), scores)
    assert torch.equal(constraint(torch.tensor([[5]]), scores), first)


def test_schemas_that_cannot_be_followed_are_refused_by_name(pair, grammars):
    for schema in ({"type": "nonsense"}, {"$ref": "http://elsewhere/schema"}):
        with pytest.raises(InvalidInputError, match="response_format"):
            grammars.processor(schema, 1)
    with pytest.raises(InvalidInputError, match="needs a token that ends an output; set"):
        Grammars(pair[2], 100, []).processor(SCHEMA, 1)


def test_a_schema_that_llguidance_gives_up_on_fails_the_request(pair, grammars):
    constraint = grammars.processor({"$ref": "#"}, 1)
    with SLOSpecGenerator(*pair) as generator:
        handle = generator.submit(PROMPT, logits_processor=[constraint], max_new_tokens=8)
        with pytest.raises(InvalidInputError, match="response_format"):
            handle.result(120.0)


def follow(grammars, text, schema=SCHEMA):
    """The grammar of drafts, and the tokens of an output so far."""
    tokens = grammars._tokenizer(text, add_special_tokens=False)["input_ids"]
    return grammars.processor(schema, 0).for_drafts(), tokens


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("{", ['"ok": false, "size":', '"ok": true, "size":']),
        ('{"ok": true', [f', "size": {size}, "name": "' for size in (1, 20, 300)]),
        ('{"ok" : true,\n  "size": 1', [',\n  "name": "']),
        ('{"ok" : true,\n  "si', [f'ze" : {size},\n  "name" : "' for size in (1, 20, 300)]),
        ('{"ok" : true,\n  "size" : 20', [',\n  "name" : "']),
        ('{\n "ok": true, "size": 20, "name": "ab', []),
        ('{"ok": true, "size": 20, "name": "abcd', ['"}']),
    ],
)
def test_expected_are_keys_punctuation_and_few_values_with_the_whitespace_so_far(
    pair, grammars, output, expected
):
    grammar, tokens = follow(grammars, output)
    ways = grammar.expected(tokens)
    end = pair[0].generation_config.eos_token_id
    texts = []
    for way in ways:
        assert (end in way) == output.endswith("abcd") and end not in way[:-1]
        texts.append(
            grammars._vocabulary.tokenizer.decode_bytes(
                [token for token in way if token != end]
            ).decode()
        )
        scores = grammar.masked(
            [tokens + way[:place] for place in range(len(way))], torch.zeros(len(way), 2048)
        )
        assert scores[range(len(way)), way].isfinite().all()
    assert texts == expected


def test_optional_properties_and_items_part_the_ways(grammars):
    optional = SCHEMA | {"required": ["ok"]}
    for schema, output in (
        (optional, '{"ok": true'),
        ({"type": "array", "items": {"const": "xy"}}, '["xy"'),
    ):
        grammar, tokens = follow(grammars, output, schema)
        texts = [grammars._tokenizer.decode(way) for way in grammar.expected(tokens)]
        assert len(texts) == 2 and texts[0].startswith(', "') and texts[1][:1] in "]}"


def test_branches_are_masked_as_by_a_matcher_of_their_own(grammars):
    grammar, tokens = follow(grammars, '{"ok": ')
    rng = torch.Generator().manual_seed(0)
    size = grammars._vocab_size
    paths = [tokens]
    scores = torch.randn(1, size, generator=rng)
    # Random allowed continuations of random paths, and now and then a forbidden one.
    for _ in range(24):
        path = paths[int(torch.randint(len(paths), (), generator=rng))]
        allowed = grammar.masked([path], scores)[0].isfinite()
        if not allowed.any():
            continue
        paths.append([*path, int(allowed.double().multinomial(1, generator=rng))])
        if len(paths) % 5 == 0 and not allowed.all():
            paths.append([*path, int((~allowed).double().multinomial(1, generator=rng))])
    masked = grammar.masked(paths, scores.expand(len(paths), -1))
    for path, row in zip(paths, masked, strict=True):
        alone, _ = follow(grammars, "")
        assert torch.equal(row, alone.masked([path], scores)[0])
        proposed = list(range(0, size, 7))
        assert grammar.allows(path, proposed) == row[proposed].isfinite().tolist()


def batch(pair):
    texts = ["def main():", "import os\n\nclass Item"]
    return dict(pair[2](texts, return_tensors="pt", padding=True, padding_side="left"))


@pytest.mark.parametrize(
    "schema", [{"type": "integer"}, {"enum": ["a", "bcd", True]}, {"const": [1, 2]}]
)
def test_rows_that_end_before_others_are_padded(pair, grammars, schema):
    inputs = batch(pair)
    ours = SLOSpecGenerator(pair[0], tokenizer=pair[2], config=SLOSpecConfig(policy="fixed"))
    for seed in range(quick_or(2, 3)):
        constraint = grammars.processor(schema, inputs["input_ids"].shape[1])
        options = dict(do_sample=True, temperature=1.5 + seed, max_new_tokens=16)
        assert_same_as_stock(
            pair[0], ours.generate, inputs, logits_processor=[constraint], **options
        )


DRAFTERS = {
    "lookup": {},
    "lookup+suffix": {"drafter": "lookup+suffix"},
    "model": {"is_model": True},
    "head": {"drafter": "mtp"},
}
LONG = {"type": "array", "minItems": quick_or(2, 3), "items": SCHEMA}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(do_sample=False), marks=pytest.mark.nightly),
        dict(do_sample=True, temperature=1.2),
    ],
    ids=["greedy", "sampled"],
)
@pytest.mark.parametrize(
    "drafting",
    [
        DRAFTERS["lookup"],
        pytest.param(DRAFTERS["lookup+suffix"], marks=pytest.mark.nightly),
        pytest.param(DRAFTERS["model"], marks=pytest.mark.nightly),
        DRAFTERS["head"],
    ],
    ids=DRAFTERS,
)
def test_batches_equal_stock_and_take_fewer_steps_than_without_the_grammar(
    pair, grammars, monkeypatch, drafting, options
):
    (target, draft, tokenizer) = pair
    inputs = batch(pair)
    method = (
        hf_slospec.load_tiny_drafter("mtp", target)
        if drafting == DRAFTERS["head"]
        else drafting.get("drafter")
    )
    runs = []
    for knows in (True, False):
        if not knows:
            for name in ("draft_grammar", "draft_processors"):
                monkeypatch.setattr(prepare, name, lambda processors: None)
        ours = SLOSpecGenerator(
            target, draft if "is_model" in drafting else None, tokenizer, drafter=method,
            config=SLOSpecConfig(policy="fixed", max_depth=8, max_width=2, check_invariants=True),
        )  # fmt: skip
        given = dict(
            logits_processor=[grammars.processor(LONG, inputs["input_ids"].shape[1])],
            max_new_tokens=quick_or(56, 80),
        )
        if knows:
            runs.append(assert_same_as_stock(target, ours.generate, inputs, **given, **options))
        else:
            torch.manual_seed(7)  # as that comparison does
            runs.append(ours.generate(**inputs, **given, **options, return_dict_in_generate=True))
    assert torch.equal(runs[0].sequences, runs[1].sequences)
    steps_with, steps_without = (sum(metrics.steps for metrics in out.slo) for out in runs)
    assert steps_with < steps_without
