"""Objects may have the properties that their schemas list and no others, and formats of pydantic
are followed.
"""

from __future__ import annotations

import base64
import ipaddress
import json
import re
import uuid
from pathlib import Path
from typing import Annotated

import numpy as np
import pydantic
import pytest
import torch
from pydantic import networks

from hf_slospec import load_tiny_pair
from hf_slospec.errors import InvalidInputError
from hf_slospec.generate.grammars import JSON_OPTIONS, Grammars
from hf_slospec.generate.json_schemas import to_follow

A = {"type": "object", "properties": {"a": {"type": "integer"}}}
B = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
TO_A = {"$ref": "#/$defs/A"}
DEFS = {"$defs": {"A": A, "B": B}}
N = {
    "properties": {
        "v": {"type": "integer"},
        "of": {"items": {"$ref": "#/$defs/N"}, "type": "array"},
    }
}
CALL = {
    "properties": {"arguments": {"$id": "tool:0", "properties": {"x": {"$ref": "#/$defs/A"}}, "$defs": {"A": A}}},
    "required": ["arguments"], "additionalProperties": False,
}  # fmt: skip

# Schema, values that follow it, and values that have names of the model's own or lack a required
# one.
CLOSED = {
    "alone": (A, [{"a": 1}, {}], [{"a": 1, "x": 1}, {"x": 1}]),
    "nested": (
        {"type": "object", "properties": {"n": A, "l": {"type": "array", "items": B}}},
        [{"n": {"a": 1}, "l": [{"b": 1}]}],
        [{"n": {"x": 1}}, {"n": {}, "x": 1}, {"l": [{"b": 1, "x": 1}]}],
    ),
    "reference": (TO_A | DEFS, [{"a": 1}], [{"x": 1}]),
    "anyOf": ({"anyOf": [A, B]}, [{"a": 1}, {"b": 1}, {}], [{"b": 1, "x": 1}, {"x": 1}]),
    "anyOf references": (
        {"type": "array", "items": {"anyOf": [TO_A, {"$ref": "#/$defs/B"}]}} | DEFS,
        [[{"a": 1}, {"b": 2}]],
        [[{"x": 1}], [{"b": 1, "x": 1}]],
    ),
    "optional": (
        {"type": "object", "properties": {"p": {"anyOf": [TO_A, {"type": "null"}], "default": None}}} | DEFS,
        [{"p": {"a": 1}}, {"p": None}, {}],
        [{"p": {"x": 1}}, {"q": 1}],
    ),
    "one allOf": (
        {"type": "object", "properties": {"p": {"allOf": [{"$ref": "#/definitions/A"}]}}, "definitions": {"A": A}},
        [{"p": {"a": 1}}],
        [{"p": {"x": 1}}],
    ),
    "allOf": ({"allOf": [TO_A, B]} | DEFS, [{"a": 1, "b": 1}, {"b": 1}], [{"a": 1}, {"b": 1, "x": 1}]),
    "allOf of allOf": (
        {"allOf": [{"allOf": [TO_A, B]}, {"properties": {"c": A}}]} | DEFS,
        [{"a": 1, "b": 1, "c": {"a": 1}}],
        [{"b": 1, "x": 1}, {"b": 1, "c": {"x": 1}}],
    ),
    "shared": (
        {"type": "object", "properties": {"x": TO_A, "y": {"allOf": [TO_A, B]}, "z": {"type": "array", "items": TO_A}}}
        | DEFS,
        [{"x": {"a": 1}, "y": {"a": 1, "b": 1}, "z": [{"a": 1}]}],
        [{"x": {"q": 1}}, {"y": {"b": 1, "q": 1}}, {"z": [{"q": 1}]}],
    ),
    "beside a reference": (TO_A | {"properties": {"c": {"type": "null"}}} | DEFS, [{"a": 1, "c": None}], [{"x": 1}]),
    "recursive": (
        {"$ref": "#/$defs/N", "$defs": {"N": N}}, [{"v": 1, "of": [{"v": 2, "of": []}]}], [{"of": [{"x": 1}]}],
    ),
    "itself": ({"properties": {"next": {"$ref": "#"}}}, [{"next": {"next": {}}}], [{"next": {"x": 1}}]),
    "required alternatives": (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
         "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "type": "object"},
        [{"a": 1}, {"b": 1}],
        [{}, {"a": 1, "x": 1}],
    ),
    "required alone": (A | {"required": ["a", "q"]}, [{"a": 1, "q": "x"}], [{"a": 1}, {"a": 1, "q": 1, "x": 1}]),
    "patterns": ({"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, [{"x1": 1}], [{"y": 1}]),
    "tuple": ({"type": "array", "prefixItems": [A, B]}, [[{"a": 1}, {"b": 1}]], [[{"x": 1}]]),
    "values": (
        {"type": "object", "additionalProperties": A}, [{"any": {"a": 1}}], [{"any": {"x": 1}}],
    ),
    "call": (CALL, [{"arguments": {"x": {"a": 1}}}], [{"arguments": {"x": {"q": 1}}}, {"arguments": {"q": 1}}]),
    "identifier": (
        {"$id": "https://x.example/s.json", "properties": {"p": {"allOf": [TO_A, B]}}} | DEFS,
        [{"p": {"a": 1, "b": 1}}],
        [{"p": {"b": 1, "x": 1}}],
    ),
    "names like keywords": (
        {"type": "object", "properties": {"properties": A, "allOf": {"type": "integer"}, "a/b~c": B, "format": B}},
        [{"properties": {"a": 1}, "allOf": 1, "a/b~c": {"b": 1}}],
        [{"properties": {"x": 1}}, {"a/b~c": {"b": 1, "x": 1}}],
    ),
    "no properties": ({"type": "object", "properties": {}}, [{}], [{"x": 1}]),
}  # fmt: skip
# Schemas that say that there may be other properties, or list none, and values that follow them.
OPEN = {
    "true": (A | {"additionalProperties": True}, [{"a": 1, "x": 1}]),
    "schema": (A | {"additionalProperties": {"type": "string"}}, [{"a": 1, "x": "1"}]),
    "any object": ({"type": "object"}, [{}, {"x": {"y": 1}}]),
    "within": ({"type": "object", "properties": {"m": {"type": "object"}}}, [{"m": {"x": 1}}]),
    "part": ({"allOf": [A | {"additionalProperties": True}, B]}, [{"b": 1, "x": 1}]),
    "constants": ({"enum": [{"properties": {"a": 1}}, 1]}, [{"properties": {"a": 1}}, 1]),
}


@pytest.fixture(scope="module")
def grammars():
    target, _, tokenizer = load_tiny_pair(torch.float32)
    return Grammars(tokenizer, target.config.vocab_size, [target.generation_config.eos_token_id])


def follows(grammars, schema, text):
    """Return True if the text is a complete output."""
    matcher = grammars.processor(schema, 0)._matcher
    tokens = grammars._tokenizer(text, add_special_tokens=False)["input_ids"]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", CLOSED)
def test_names_that_a_schema_does_not_list_are_impossible(grammars, name):
    schema, valid, invalid = CLOSED[name]
    given = json.dumps(schema)
    for value in valid:
        assert follows(grammars, schema, json.dumps(value)), value
    for value in invalid:
        assert not follows(grammars, schema, json.dumps(value)), value
    assert json.dumps(schema) == given  # the client's is not changed


@pytest.mark.parametrize("name", OPEN)
def test_names_that_a_schema_allows_are_possible(grammars, name):
    schema, valid = OPEN[name]
    for value in valid:
        assert follows(grammars, schema, json.dumps(value)), value


def test_models_of_pydantic_are_followed(grammars):
    class Place(pydantic.BaseModel):
        city: str
        tags: dict[str, int] = {}

    class Trip(pydantic.BaseModel):
        begin: Place
        end: Place | None = None
        stops: list[Place] = []

    schema = Trip.model_json_schema()
    assert follows(grammars, schema, Trip(begin=Place(city="x", tags={"own": 1})).model_dump_json())
    for value in ({"begin": {"city": "x", "days": 1}}, {"begin": {"city": "x"}, "days": 1}):
        assert not follows(grammars, schema, json.dumps(value))


VALUES = {
    pydantic.UUID1: ([str(uuid.uuid1())], [str(uuid.uuid4()), "x"]),
    pydantic.UUID3: ([str(uuid.uuid3(uuid.NAMESPACE_DNS, "x"))], [str(uuid.uuid4())]),
    pydantic.UUID4: (
        [str(uuid.uuid4()) for _ in range(8)],
        [str(uuid.uuid1()), str(uuid.uuid4())[:-1]],
    ),
    pydantic.UUID5: ([str(uuid.uuid5(uuid.NAMESPACE_DNS, "x"))], [str(uuid.uuid4())]),
    uuid.UUID: ([str(uuid.uuid4())], ["x"]),
    Path: (["/a/b", "C:\\x", ""], []),
    pydantic.NewPath: (["/no-such-file"], []),
    bytes: (["abc", "\u00e9"], []),
    pydantic.SecretStr: (["secret"], []),
    re.Pattern: (["^a*$"], []),
    pydantic.Base64Str: (
        [base64.b64encode(b"abcdefghi~"[:size]).decode() for size in range(10)],
        ["a", "YQ", "/w=="],
    ),
    pydantic.Base64Bytes: ([base64.b64encode(b"ab\x00").decode()], ["*"]),
    pydantic.Base64UrlStr: ([base64.urlsafe_b64encode(b"a~?b>").decode()], ["a+b/"]),
    ipaddress.IPv4Network: (
        [
            "10.0.0.0/8",
            "172.16.0.0/12",
            "192.168.1.4/30",
            "0.0.0.0/0",
            "128.0.0.0/1",
            "1.2.3.4/32",
            "1.2.3.4",
        ],
        [
            "10.0.0.1/8",
            "172.17.0.0/12",
            "192.168.1.5/30",
            "1.0.0.0/0",
            "1.2.3/24",
            "1.2.3.4/33",
            "256.0.0.0/8",
        ],
    ),
    ipaddress.IPv6Network: (
        ["2001:db8::/32", "::/0", "fe80:1:2:3::/64", "1:2:3:4:5:6:7:8", "::1"],
        ["::1/64"],
    ),
    ipaddress.IPv4Interface: (["10.0.0.1/8", "1.2.3.4"], ["1.2.3.4/33"]),
    ipaddress.IPv6Interface: (["fe80::1/64", "::1"], ["fe80::1/129"]),
    networks.IPvAnyAddress: (["1.2.3.4", "::1"], ["x", "1.2.3.4/8"]),
    networks.IPvAnyInterface: (["1.2.3.4/8", "::1/64"], ["x"]),
    networks.IPvAnyNetwork: (["10.0.0.0/8", "2001:db8::/32"], ["10.0.0.1/8"]),
    Annotated[str, pydantic.Field(json_schema_extra={"format": "nonsense"})]: (["anything"], []),
}


@pytest.mark.parametrize("kind", VALUES, ids=str)
def test_formats_of_pydantic_are_followed(grammars, kind):
    adapter = pydantic.TypeAdapter(kind)
    schema = {"type": "object", "properties": {"x": adapter.json_schema()}, "required": ["x"]}
    valid, invalid = VALUES[kind]
    for text in valid:
        adapter.validate_python(text)
        assert follows(grammars, schema, json.dumps({"x": text}, ensure_ascii=False)), text
    for text in invalid:
        assert not follows(grammars, schema, json.dumps({"x": text})), text


@pytest.mark.parametrize(
    "kind", [kind for kind, (_, invalid) in VALUES.items() if invalid and kind is not uuid.UUID]
)
def test_what_follows_a_format_is_valid_for_pydantic(grammars, kind):
    adapter = pydantic.TypeAdapter(kind)
    rng = np.random.default_rng(0)
    tokenizer = grammars._tokenizer
    quote = tokenizer.convert_tokens_to_ids('"')
    for _ in range(4):
        matcher = grammars.processor(adapter.json_schema(), 0)._matcher
        tokens = []
        # Random characters, and after some the closing quote where it may come.
        while not matcher.is_accepting():
            allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), dtype=np.uint8))
            characters = [int(token) for token in allowed if len(tokenizer.decode([token])) == 1]
            is_end = len(tokens) > 40 and quote in characters
            tokens.append(quote if is_end else int(rng.choice(characters or allowed)))
            assert matcher.try_consume_tokens(tokens[-1:]) == 1 and len(tokens) < 400
        adapter.validate_json(tokenizer.decode(tokens))


def test_formats_beside_patterns_and_lengths(grammars):
    found = str(uuid.uuid4())
    schema = {"type": "string", "format": "uuid4", "pattern": f"^{found[0]}", "maxLength": 36}
    assert follows(grammars, schema, json.dumps(found))
    assert not follows(grammars, schema, json.dumps(f"{(int(found[0], 16) + 1) % 16:x}{found[1:]}"))
    for numeric in ({"type": "integer", "format": "int32"}, {"type": "number", "format": "double"}):
        assert follows(grammars, numeric, "1")


def test_unique_items_are_refused_by_name_and_others_are_not(grammars):
    schema = {"type": "array", "items": {"type": "integer"}}
    assert follows(grammars, schema | {"uniqueItems": False}, "[1, 1]")
    with pytest.raises(InvalidInputError, match="uniqueItems"):
        grammars.processor(schema | {"uniqueItems": True}, 0)


@pytest.mark.parametrize(
    "schema",
    [{"properties": 3}, {"properties": {"a": 3}}, {"allOf": {"a": 1}}, {"required": "x"}, {"$ref": 5}, {"format": [1]},
     {"$ref": "#/nowhere", "properties": {"a": {}}}, {"type": "object", "properties": {"a": {"type": "nonsense"}}}],
)  # fmt: skip
def test_invalid_schemas_are_refused(grammars, schema):
    with pytest.raises(InvalidInputError, match="response_format or tools"):
        grammars.processor(schema, 0)


def test_chains_and_graphs_of_references_are_followed_once_or_refused():
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)}
    with pytest.raises(InvalidInputError, match="nests too deeply"):
        to_follow({"$ref": "#/$defs/a0", "$defs": chain})
    # 2^100 paths.
    graph = {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(100)}
    assert to_follow({"$ref": "#/$defs/a0", "$defs": graph | {"a100": A}})["$defs"].keys() == {
        *graph,
        "a100",
    }
    # Each has the properties of all after it.
    nested = {
        f"a{i}": {
            "properties": {f"p{i}_{j}": {} for j in range(40)},
            "allOf": [{"$ref": f"#/$defs/a{i + 1}"}],
        }
        for i in range(50)
    }
    with pytest.raises(InvalidInputError, match="more than 20000 properties"):
        to_follow({"$ref": "#/$defs/a0", "$defs": nested | {"a50": A}})


PRETTY = json.dumps({"a": [1, {"b": 2}], "c": "x"}, indent=2)


@pytest.mark.parametrize(
    ("text", "is_possible"),
    [
        ('{"a":[1,{"b":2}],"c":"x"}', True),
        ('{"a": [1, {"b": 2}], "c": "x"}', True),
        (PRETTY, True),
        (PRETTY.replace("  ", "\t"), True),
        ('{"a":  1}', False),
        ('{"a":\n\n1}', False),
        ('{"a":\t1}', False),
        ('{"a"' + " " * 9 + ":1}", False),
        ('{\n' + " " * 9 + '"a": 1}', False),
        ('{"a": 1} ', False),
        (' {"a": 1}', False),
        ('{"a": "' + " " * 30 + '"}', True),  # within texts is any
    ],
)  # fmt: skip
def test_whitespace_is_a_space_or_a_line_with_its_indentation(grammars, text, is_possible):
    assert follows(grammars, {"type": "object"}, text) == is_possible
    assert "{0,24}" not in JSON_OPTIONS["whitespace_pattern"]
