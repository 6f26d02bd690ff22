"""Outputs that follow a JSON schema, whatever the model would like to write."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_slospec import SLOSpecGenerator, load_tiny_pair
from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.grammars import Grammars

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
def pair() -> tuple[Any, Any, Any]:
    return load_tiny_pair(torch.float32)


@pytest.fixture(scope="module")
def grammars(pair: tuple[Any, Any, Any]) -> Grammars:
    target, _, tokenizer = pair
    return Grammars(tokenizer, target.config.vocab_size, [target.generation_config.eos_token_id])


@pytest.mark.parametrize(
    ("options", "seeds"),
    [(dict(do_sample=False), [0]), (dict(do_sample=True, temperature=1.5), [0, 1]), (dict(do_sample=True), [2])],
)
def test_outputs_follow_the_schema_and_equal_those_of_generate(
    pair: tuple[Any, Any, Any], grammars: Grammars, options: dict[str, Any], seeds: list[int]
) -> None:
    target, draft, tokenizer = pair
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    num_prompt = ids.shape[1]
    with SLOSpecGenerator(target, draft, tokenizer) as generator:
        for seed in seeds:
            torch.manual_seed(seed)
            own = [grammars.processor(SCHEMA, num_prompt)]
            expected = target.generate(ids, logits_processor=own, max_new_tokens=160, **options)[0, num_prompt:]
            given = dict(logits_processor=[grammars.processor(SCHEMA, num_prompt)], max_new_tokens=160, **options)
            handle = generator.submit(PROMPT, seed=seed if options["do_sample"] else None, **given)
            result = handle.result(120.0)
            assert result.token_ids == expected.tolist() and result.finish_reason == "stop" and result.text is not None
            found = json.loads(result.text)
            assert found.keys() == {"ok", "size", "name"}
            assert isinstance(found["ok"], bool) and found["size"] in (1, 20, 300) and len(found["name"]) <= 4


def test_a_text_that_was_cut_back_is_followed_again(grammars: Grammars) -> None:
    constraint, scores = grammars.processor(SCHEMA, 1), torch.zeros(1, grammars._vocab_size)
    first = constraint(torch.tensor([[5]]), scores)
    token = int((first[0] == 0).nonzero()[0])
    constraint(torch.tensor([[5, token]]), scores)
    assert torch.equal(constraint(torch.tensor([[5]]), scores), first)


def test_schemas_that_cannot_be_followed_are_refused_by_name(pair: tuple[Any, Any, Any], grammars: Grammars) -> None:
    for schema in ({"type": "nonsense"}, {"$ref": "http://elsewhere/schema"}):
        with pytest.raises(InvalidInputError, match="response_format"):
            grammars.processor(schema, 1)
    with pytest.raises(InvalidInputError, match="needs a token that ends an output; set"):
        Grammars(pair[2], 100, []).processor(SCHEMA, 1)


def test_a_schema_that_llguidance_gives_up_on_fails_the_request(pair: tuple[Any, Any, Any], grammars: Grammars) -> None:
    constraint = grammars.processor({"$ref": "#"}, 1)
    with SLOSpecGenerator(*pair) as generator:
        handle = generator.submit(PROMPT, logits_processor=[constraint], max_new_tokens=8)
        with pytest.raises(InvalidInputError, match="response_format"):
            handle.result(120.0)
