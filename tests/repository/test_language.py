"""Docstrings, comments and messages are plain technical English: the part of that rule that a
program can check.

Sources are parsed, not imported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
PACKAGE = ROOT / "hf_slospec"
MODULES = sorted(PACKAGE.rglob("*.py"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").rglob("*.md"))

# First words that make a fragment or a riddle of a summary.
NOT_FIRST = {
    "How",
    "It",
    "Of",
    "That",
    "They",
    "Those",
    "What",
    "Whether",
    "Who",
    "Whoever",
    "Whom",
    "Whose",
    "Within",
}
# First words of the docstrings of functions and methods. A further verb is added here on purpose.
VERBS = set(
    """
    Activate Add Advance Announce Append Apply Assign Await Begin Build Cache Cancel Capture Change Check Choose Clamp
    Clear Commit Compare Compile Compute Concatenate Connect Continue Convert Copy Count Create Cut Decode Delete Do
    Drop Empty End Enqueue Evict Exclude Fill Find Fit Forget Forward Free Give Grow Guarantee Halve Hand Handle Import
    Join Keep Lay Learn Leave Let Limit List Load Log Make Mark Measure Move Pad Pass Plot Preempt Prefill Prepare Print
    Probe Propose Publish Quantise Queue Raise Read Recall Recognise Record Reduce Refuse Register Release Report Remove
    Replace Reserve Reset Resize Return Rotate Run Save Select Send Serve Set Show Simulate Split Stage Start Stop Store
    Stream Submit Take Time Train Translate Update Use Validate View Wait Walk Wrap Write Yield
    """.split()
) | {"Context"}  # "Context manager that ..."
BANNED = (
    *(
        r"nobody",
        r"somebody",
        r"everybody",
        r"anybody",
        r"who(m)?ever",
    ),  # name the thread, request, user or caller
    *(r"(gives?|gave|given|giving)[\s#]+up",),  # cancel, abort
    *(r"hears?", r"heard"),  # is called, receives
    *(r"fed", r"feeds?", r"feeding"),  # prefill, process, pass
    *(r"promis(e|es|ed|ing)", r"hopeless(ly)?"),  # guarantee; cannot be met
    *(r"ghosts?", r"parcels?", r"crowds?", r"hindsight"),
    *(r"packed[\s#]+rows?",),  # packed batch
    *(r"(TPOT|TTFT|latency|token)[\s#]+targets?",),  # SLO: the target is a model
)
WORDS = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
ENDED = re.compile(r"[.:](\s+(->|\[).*)?\Z", re.DOTALL)  # a shape may follow the last sentence


class Thing(NamedTuple):
    """A module, class, function or method."""

    name: str  # with the names of the classes around it
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

    @property
    def docstring(self):
        return ast.get_docstring(self.node)

    @property
    def does_something(self):
        """Return whether it is a function whose name is its own choice, and no property."""
        if isinstance(self.node, (ast.Module, ast.ClassDef)):
            return False
        decorators = {
            ast.unparse(decorator).split(".")[-1] for decorator in self.node.decorator_list
        }
        return not decorators & {
            "property",
            "cached_property",
            "setter",
        } and not self.node.name.startswith("__")


def things(source, name):
    """Yield a module, and all of its classes, functions and methods but those within functions."""
    module = ast.parse(source)
    yield Thing(name, module)
    stack = [Thing("", module)]
    while stack:
        around = stack.pop()
        for node in around.node.body:
            if isinstance(node, (ast.ClassDef, *FUNCTION)):
                thing = Thing(f"{around.name}.{node.name}".lstrip("."), node)
                yield thing
                if isinstance(node, ast.ClassDef):
                    stack.append(thing)


def bad_summaries(own):
    """Yield what is wrong with the summaries of docstrings."""
    for thing in own:
        if not (docstring := thing.docstring):
            continue
        summary = docstring.split("\n\n")[0]
        first = re.match(r"[\w-]*", summary)
        word = "" if first is None else first[0]
        if not ENDED.search(summary):
            yield f"{thing.name} does not end its summary: {summary!r}"
        if word in NOT_FIRST:
            yield f"{thing.name} begins with {word!r}: {summary!r}"
        elif thing.does_something and word not in VERBS:
            yield f"{thing.name} begins with {word!r}, which is no verb of VERBS: {summary!r}"


def texts(source):
    """Yield the comments and strings of a module, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        kind = tokenize.tok_name[token.type]
        if kind in ("COMMENT", "STRING") or kind.startswith("FSTRING"):
            yield token.start[0], token.string


def prose(page):
    """Return a page without its code; lines stay where they are."""
    page = re.sub(
        r"^```.*?^```$",
        lambda found: "\n" * found[0].count("\n"),
        page,
        flags=re.MULTILINE | re.DOTALL,
    )
    return re.sub(r"`[^`\n]+`|\]\([^)\n]*\)", "", page)


def banned(line, text):
    """Yield the words of a text that the package does not use, with their lines; the text begins at
    ``line``.
    """
    for found in WORDS.finditer(text):
        yield f"{line + text.count(chr(10), 0, found.start())}: {found[0]!r}"


@pytest.fixture(scope="module")
def everything():
    return {
        path: list(things(path.read_text(encoding="utf-8"), path.stem.strip("_")))
        for path in MODULES
    }


def test_summaries_begin_with_a_verb_or_name_the_thing(everything):
    assert [
        f"{path.relative_to(ROOT)}: {bad}"
        for path, own in everything.items()
        for bad in bad_summaries(own)
    ] == []


def test_the_code_has_no_banned_words():
    found = [
        f"{path.relative_to(ROOT)}:{word}"
        for path in MODULES
        for line, text in texts(path.read_text(encoding="utf-8"))
        for word in banned(line, text)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_documentation_has_no_banned_words(page):
    assert list(banned(1, prose(page.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "docstring",
    [
        "Whether it is late.",
        "Of a call that is over: for the next one.",
        "Return the depth",
        "Depth of the tree.",
    ],
)
def test_bad_summaries_are_found(docstring):
    source = (
        f'class Tree:\n    """Token tree."""\n\n    def depth(self):\n        """{docstring}"""\n'
    )
    assert list(bad_summaries(list(things(source, "tree"))))


@pytest.mark.parametrize(
    "docstring", ["Return it.", "Return depths.  -> [num_nodes] int64", "Compute:\n\n- depth"]
)
def test_good_summaries_pass(docstring):
    assert not list(
        bad_summaries(list(things(f'def depth(tree):\n    """{docstring}"""\n', "tree")))
    )


@pytest.mark.parametrize(
    "text", ["nobody hears", "gives\n# up", "it is Promised", "a packed\nrow", "TPOT target"]
)
def test_banned_words_are_found(text):
    assert list(banned(1, text))
    assert list(banned(1, prose(f"{text}\n```python\nnobody\n```\nand `whoever`"))) == list(
        banned(1, text)
    )
