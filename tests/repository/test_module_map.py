"""docs/design.md lists every module of the package once, and names only files that exist."""

from __future__ import annotations

import ast
import re

from tests.support.paths import ROOT

PACKAGE = ROOT / "hf_slospec"
PAGE = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.*) \|$", re.MULTILINE)


def section(title: str) -> str:
    """Return the text from a heading of second level to the next one."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_every_module_is_listed_once_with_a_description() -> None:
    listed = ROW.findall(section("Module map"))
    assert sorted(path for path, _ in listed) == sorted(
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
    )
    assert all(re.fullmatch(r"[A-Z].+\.", description) for _, description in listed)


def test_modules_are_listed_with_their_layer() -> None:
    layers = re.findall(r"^### Layer `([\w/]+)`\n(.*?)(?=^### |\Z)", section("Module map"), re.MULTILINE | re.DOTALL)
    assert layers and all(path.startswith(f"{layer}/") for layer, rows in layers for path, _ in ROW.findall(rows))


def test_the_files_to_look_at_first_exist() -> None:
    questions = re.findall(r"^\| (.+\?) \| `(.+)` \|$", section("Where to look first"), re.MULTILINE)
    assert len(questions) == 17
    assert all((PACKAGE / file).exists() for _, file in questions)


def test_all_other_files_that_the_page_names_exist() -> None:
    named = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", PAGE)) - set(re.findall(r"`(torch/\w+)`", PAGE))
    assert len(named) > 100
    assert [name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()] == []


def test_methods_that_the_page_names_exist() -> None:
    members = {
        (node.name, getattr(member, "name", None) or getattr(getattr(member, "target", None), "id", None))
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for member in node.body
    }
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(.*?\))?`", PAGE))
    assert len(named) > 20
    assert named <= members
