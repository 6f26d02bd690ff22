"""The list of modules is made from docstrings, and docs/design.md names only files and methods that
exist.
"""

from __future__ import annotations

import ast
import re

from docs import modules
from tests.support.paths import ROOT

PACKAGE = ROOT / "hf_slospec"
PAGES = (ROOT / "docs" / "design.md", *sorted((ROOT / "docs" / "design").glob("*.md")))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def section(title):
    """Return the text from a heading of second level to the next one."""
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(found)


def test_every_module_is_listed_with_a_sentence_of_its_docstring():
    listed = dict(modules.described())
    assert sorted(listed) == sorted(
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")
    )
    assert [
        path for path, sentence in listed.items() if not re.fullmatch(r"[^\n]{5,200}[.)]", sentence)
    ] == []
    # A file's row appears under the heading of its folder.
    shown = modules.tables()
    for path, _ in modules.described():
        assert f"| `{path.rsplit('/', 1)[-1]}` | " in shown


def test_the_place_of_the_list_is_there():
    page = (ROOT / "docs" / "reference" / "modules.md").read_text(encoding="utf-8")
    assert page.count(modules.PLACE) == 1


def test_the_files_to_look_at_first_exist():
    questions = re.findall(
        r"^\| (.+\?) \| `(.+)` \|$", section("Where to look first"), re.MULTILINE
    )
    assert len(questions) >= 24
    assert all((PACKAGE / file).exists() for _, file in questions)


def test_all_files_that_the_page_names_exist():
    named = set(re.findall(r"`((?:\w+/)+\w*(?:\.py)?)`", PAGE)) - set(
        re.findall(r"`(torch/\w+)`", PAGE)
    )
    assert len(named) > 60
    assert [
        name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).exists()
    ] == []


def test_methods_that_the_page_names_exist():
    members = {
        (
            node.name,
            getattr(member, "name", None) or getattr(getattr(member, "target", None), "id", None),
        )
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        for member in node.body
    }
    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)(?:\(.*?\))?`", PAGE))
    assert len(named) > 20
    assert named <= members
