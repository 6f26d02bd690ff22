"""Outputs in JSON: tokens per step, with drafts that follow the schema and with drafts that do not.

    python benchmarks/schemas.py [--target build/checkpoints/SmolLM2-135M-Instruct] [--drafters lookup suffix]
        [--max-new-tokens 96] [--policy fixed] [--sample] [--json FILE]

Every request is answered by stock ``generate`` as well, under the same constraint, and the tokens
must be equal. Steps are counted, not timed. By default, whole trees of the given depth and width
are verified."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_slospec import SLOSpecConfig, SLOSpecGenerator
from hf_slospec.cli.benchmark import provenance
from hf_slospec.generate import prepare
from hf_slospec.generate.grammars import Grammars
from hf_slospec.generate.rows import model_end_tokens

WORD = {"type": "string", "maxLength": 40}
PERSON = {
    "first_name": WORD,
    "last_name": WORD,
    "age": {"type": "integer"},
    "is_student": {"type": "boolean"},
}
SCHEMAS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "person": (
        PERSON,
        ["Describe a person in a novel.", "Describe the inventor of the telephone."],
    ),
    "city": (
        {
            "city": WORD,
            "country": WORD,
            "population": {"type": "integer"},
            "is_capital": {"type": "boolean"},
        },
        ["What is the capital of France?", "Name a large city in Asia."],
    ),
    "call": (
        {
            "name": {"const": "get_weather"},
            "arguments": {"location": WORD, "unit": {"enum": ["celsius", "fahrenheit"]}},
        },
        ["What is the weather in Boston?", "How warm is it in Lima today?"],
    ),
    "people": ({"people": [PERSON]}, ["List three scientists.", "List the members of a family."]),
    "review": (
        {
            "summary": {"type": "string", "maxLength": 200},
            "rating": {"type": "integer"},
            "tags": [WORD],
        },
        ["Review a film that you like.", "Review a restaurant by the sea."],
    ),
}


def schema_of(short: Any) -> dict[str, Any]:
    """Return a JSON schema from its short form: objects by their properties, arrays as lists of
    one.
    """
    if isinstance(short, list):
        return {"type": "array", "items": schema_of(short[0]), "minItems": 2, "maxItems": 4}
    if isinstance(short.get("type"), str) or "enum" in short or "const" in short:
        return dict(short)
    properties = {name: schema_of(part) for name, part in short.items()}
    return {
        "type": "object",
        "properties": properties,
        "required": list(short),
        "additionalProperties": False,
    }


def main() -> None:
    """Print tokens per step by schema and drafter."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", default="build/checkpoints/SmolLM2-135M-Instruct")
    parser.add_argument("--drafters", nargs="+", default=["lookup"])
    parser.add_argument("--schemas", nargs="+", default=list(SCHEMAS), choices=list(SCHEMAS))
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--policy", default="fixed")
    parser.add_argument("--max-depth", type=int, default=12)
    parser.add_argument("--max-width", type=int, default=2)
    parser.add_argument("--sample", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model: Any = AutoModelForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(arguments.target)
    grammars = Grammars(
        tokenizer, model.config.vocab_size, model_end_tokens(model.generation_config)
    )
    config = SLOSpecConfig(
        policy=arguments.policy, max_depth=arguments.max_depth, max_width=arguments.max_width
    )
    results = list[dict[str, Any]]()
    for drafter in arguments.drafters:
        ours = SLOSpecGenerator(model, tokenizer=tokenizer, drafter=drafter, config=config)
        for name in arguments.schemas:
            short, questions = SCHEMAS[name]
            counts = {knows: [0, 0] for knows in (False, True)}  # tokens after the first, and steps
            for question in questions:
                inputs = tokenizer.apply_chat_template(
                    [{"role": "user", "content": f"{question} Answer in JSON with {', '.join(short)}."}],
                    add_generation_prompt=True, return_dict=True, return_tensors="pt",
                )  # fmt: skip
                outputs = [
                    run(ours, grammars, schema_of(short), inputs, arguments, counts[knows], knows)
                    for knows in (False, True)
                ]
                expected = run(
                    None, grammars, schema_of(short), inputs, arguments, [0, 0], model=model
                )
                assert all(torch.equal(output, expected) for output in outputs), (
                    f"{name}: not the tokens of stock"
                )
            without, knowing = (tokens / steps for tokens, steps in counts.values())
            results.append(dict(drafter=drafter, schema=name, without=without, knowing=knowing))
            print(
                f"{drafter:18} {name:8} {without:5.2f} -> {knowing:5.2f} tokens per step ({knowing / without:.2f}x)"
            )
        own = [result for result in results if result["drafter"] == drafter]
        means = [sum(result[key] for result in own) / len(own) for key in ("without", "knowing")]
        print(
            f"{drafter:18} mean     {means[0]:5.2f} -> {means[1]:5.2f} tokens per step ({means[1] / means[0]:.2f}x)"
        )
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    if arguments.json is not None:
        arguments.json.write_text(
            json.dumps(dict(provenance=provenance(arguments=settings), results=results), indent=1)
        )


def run(
    ours: SLOSpecGenerator | None,
    grammars: Grammars,
    schema: dict[str, Any],
    inputs: Any,
    arguments: argparse.Namespace,
    counts: list[int],
    knows: bool = True,
    model: Any = None,
) -> torch.Tensor:
    """Return one output, and add its tokens and steps to ``counts``; without a generator, that of
    stock.
    """
    constraint = grammars.processor(schema, inputs["input_ids"].shape[1])
    options = dict(
        logits_processor=[constraint], max_new_tokens=arguments.max_new_tokens, do_sample=arguments.sample,
        return_dict_in_generate=True,
    )  # fmt: skip
    torch.manual_seed(random.Random(str(schema)).randrange(2**31))
    if ours is None:
        return torch.as_tensor(model.generate(**inputs, **options).sequences)
    with patch.object(
        prepare, "draft_grammar", prepare.draft_grammar if knows else lambda processors: None
    ):
        output = ours.generate(**inputs, **options)
    (metrics,) = output.slo
    counts[0] += metrics.tokens - 1
    counts[1] += metrics.steps
    return torch.as_tensor(output.sequences)


if __name__ == "__main__":
    main()
