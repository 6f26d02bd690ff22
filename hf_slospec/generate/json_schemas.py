"""Conversion of clients' JSON schemas to ones that llguidance follows, with closed objects and
known formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

from hf_slospec.errors import InvalidInputError

_Names = dict[str, bool]  # schemas that allow any value, by name

ALTERNATIVES = ("anyOf", "oneOf")
PARTS = ("allOf", *ALTERNATIVES)  # keywords whose schemas describe the same value
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # keywords with schemas by name
INNER = ("items", "prefixItems", "additionalProperties")  # keywords with schemas of inner values
# Formats that llguidance knows.
FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "time",
    "uri",
    "uuid",
)

MAX_LISTED = 20_000  # properties that compositions list in all, each as often as it is listed again

_BYTE = r"(?:25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)"
_V4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9a-f]{1,4}"
_V6 = rf"(?:{_HEX}(?::{_HEX}){{7}}|(?:{_HEX}(?::{_HEX}){{0,5}})?::(?:{_HEX})?)"
_V4_INTERFACE = rf"{_V4}(?:/(?:3[0-2]|[12]?\d))?"
_V6_INTERFACE = rf"{_V6}(?:/(?:12[0-8]|1[01]\d|[1-9]?\d))?"


def _v4_networks() -> Iterator[str]:
    """Yield patterns of IPv4 networks by the number of their whole bytes: other bits than the
    network's are 0.
    """
    for num_bytes in range(4):
        before = rf"{_BYTE}\." * num_bytes
        after = r"\.0" * (3 - num_bytes)
        for num_bits in range(8):
            bytes_ = "|".join(str(byte) for byte in range(0, 256, 2 ** (8 - num_bits)))
            yield f"{before}(?:{bytes_}){after}/{8 * num_bytes + num_bits}"
    yield f"{_V4}(?:/32)?"


_V4_NETWORK = "|".join(_v4_networks())
_V6_NETWORK = "|".join(
    [*(rf"{_HEX}(?::{_HEX}){{{n - 1}}}::/{16 * n}" for n in range(1, 8)), "::/0", f"{_V6}(?:/128)?"]
)
# Groups of four characters for three bytes of ASCII, as strings of pydantic's Base64Str are decoded
# to UTF-8.
_OF_TWO = "[A-Za-f][A-HQ-Xg-nw-z0-3]"
_OF_THREE = "[ABEFIJMNQRUVYZcdghklopstwx014589]"
_BASE64_END = rf"(?:[A-Za-f][AQgw]==|{_OF_TWO}[AEIMQUYcgkosw048]=)?"

# Patterns of pydantic's formats; it refuses other strings.
PATTERNS = {
    "base64": rf"(?:{_OF_TWO}{_OF_THREE}[A-Za-z0-9+/])*{_BASE64_END}",
    "base64url": rf"(?:{_OF_TWO}{_OF_THREE}[A-Za-z0-9_-])*{_BASE64_END}",
    "ipv4network": _V4_NETWORK, "ipv6network": _V6_NETWORK, "ipvanynetwork": f"{_V4_NETWORK}|{_V6_NETWORK}",
    "ipv4interface": _V4_INTERFACE, "ipv6interface": _V6_INTERFACE, "ipvanyaddress": f"{_V4}|{_V6}",
    "ipvanyinterface": f"{_V4_INTERFACE}|{_V6_INTERFACE}",
} | {
    f"uuid{version}": f"[0-9a-f]{{8}}-[0-9a-f]{{4}}-{version}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}"
    for version in range(1, 9)
}  # fmt: skip


def to_follow(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that llguidance can follow, with ``additionalProperties`` false where it is
    left out.

    An object that lists no properties may have any. Where several schemas describe one object
    (``allOf``, a reference beside properties), it may have the properties of all of them. Formats
    that neither llguidance nor ``PATTERNS`` have are annotations.

    Raises:
        InvalidInputError: the schema nests too deeply, or its compositions list too many
            properties.
    """
    try:
        followed: dict[str, Any] = _Closing(schema).closed(schema, "#")
    except RecursionError:
        raise InvalidInputError("the schema nests too deeply, or its references do") from None
    return followed


class _Closing:
    """Closes the objects of one schema; inner schemas are known by JSON pointers, as in ``$ref``."""

    def __init__(self, schema: dict[str, Any]):
        self._nodes: dict[str, dict[str, Any]] = {}
        self._names: dict[str, _Names | None] = {}
        self._num_listed = 0
        # Schemas of a part of an object, which is closed by the schema of the whole.
        self._open: set[str] = set()
        self._collect(schema, "#")
        for at in self._nodes:
            if self._is_composed(at):
                for part in itertools.chain(*self._parts(at)):
                    self._leave_open(part)

    def closed(self, node: Any, at: str) -> Any:
        """Return a schema with closed objects and known formats."""
        if not isinstance(node, dict):
            return node
        at = _based(node, at)
        closed = _mapped(node, at, self.closed)
        if isinstance(kind := node.get("format"), str) and kind not in FORMATS:
            del closed["format"]
            if kind in PATTERNS:
                closed["allOf"] = [*_list(closed, "allOf"), {"pattern": f"^(?:{PATTERNS[kind]})$"}]
        if node.get("uniqueItems") is False:  # llguidance refuses the keyword
            del closed["uniqueItems"]
        if (
            at in self._open
            or "additionalProperties" in node
            or not isinstance(node.get("properties", {}), dict)
        ):
            return closed
        names: _Names | None = None
        if self._is_composed(at) or any(
            part in self._open for part in itertools.chain(*self._parts(at))
        ):
            names = self._names_at(at)
        elif "properties" in node or "patternProperties" in node:
            names = _own_names(node)
        if names is not None:
            closed |= {
                "properties": names | _dict(closed, "properties"),
                "additionalProperties": False,
            }
        return closed

    def _collect(self, node: Any, at: str) -> None:
        if isinstance(node, dict):
            at = _based(node, at)
            self._nodes[at] = node
            _mapped(node, at, self._collect)

    def _parts(self, at: str) -> list[list[str]]:
        """Return the other schemas of the same value; alternatives are one list."""
        node = self._nodes[at]
        alternatives = [
            [f"{at}/{key}/{place}" for place in range(len(_list(node, key)))]
            for key in ALTERNATIVES
        ]
        parts = [
            [f"{at}/allOf/{place}"] for place in range(len(_list(node, "allOf")))
        ] + alternatives
        if isinstance(target := node.get("$ref"), str):
            parts.append([at[: at.index("#")] * target.startswith("#") + unquote(target)])
        return parts

    def _is_composed(self, at: str) -> bool:
        """Return True if several schemas list properties of the same object."""
        parts = [any(self._names_at(each) != {} for each in part) for part in self._parts(at)]
        return sum(parts) + bool(_own_names(self._nodes[at])) > 1

    def _leave_open(self, at: str) -> None:
        if at in self._nodes and at not in self._open:
            self._open.add(at)
            for part in itertools.chain(*self._parts(at)):
                self._leave_open(part)

    def _names_at(self, at: str) -> _Names | None:
        """Return the properties that a schema and its parts list; None if they allow others."""
        if at not in self._names:
            self._names[at] = {}  # for references to itself
            self._names[at] = self._listed_names(at)
        return self._names[at]

    def _listed_names(self, at: str) -> _Names | None:
        node = self._nodes.get(at)
        if (
            node is None
            or node.get("additionalProperties", False) is not False
            or "patternProperties" in node
        ):
            return None
        names = _own_names(node)
        for part in itertools.chain(*self._parts(at)):
            if (more := self._names_at(part)) is None:
                return None
            names |= more
            self._num_listed += len(names)
            if self._num_listed > MAX_LISTED:
                raise InvalidInputError(
                    f"the schema's allOf, anyOf, oneOf and $ref list more than {MAX_LISTED} properties in all"
                )
        return names


def _own_names(node: dict[str, Any]) -> _Names:
    """Return the properties that a schema itself lists or requires, as schemas that allow any
    value.
    """
    return dict.fromkeys([*_dict(node, "properties"), *map(str, _list(node, "required"))], True)


def _mapped(node: dict[str, Any], at: str, change: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Return a schema with its inner schemas changed; ``change`` takes a schema and its pointer."""
    mapped = dict(node)
    for key in (*PARTS, *INNER, *MAPS):
        place = f"{at}/{key}"
        inner = node.get(key)
        if isinstance(inner, list):
            mapped[key] = [change(each, f"{place}/{index}") for index, each in enumerate(inner)]
        elif key in MAPS and isinstance(inner, dict):
            mapped[key] = {
                name: change(each, f"{place}/{_escaped(name)}") for name, each in inner.items()
            }
        elif isinstance(inner, dict):
            mapped[key] = change(inner, place)
    return mapped


def _based(node: dict[str, Any], at: str) -> str:
    """Return the pointer of a schema, which its own identifier replaces."""
    return f"{base.rstrip('#')}#" if isinstance(base := node.get("$id"), str) else at


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _list(node: dict[str, Any], key: str) -> list[Any]:
    return value if isinstance(value := node.get(key), list) else []


def _dict(node: dict[str, Any], key: str) -> dict[str, Any]:
    return value if isinstance(value := node.get(key), dict) else {}
