"""Tables and figures of the documentation are those of the files in benchmarks/results.

``python -m docs.tables`` writes the tables. A number with the unit x, ms or % in running text has
its source in ``docs/figures``, or the reason why it has none: ``<!-- given: ... -->`` before a
block for what was chosen, published or defined, and ``<!-- not backed: ... -->`` before a block
with the date of a measurement of which there is no file.
"""

from __future__ import annotations

import re

import pytest

from docs import measured, replayed
from docs.tables import FIGURE, PAGES, TABLE, figures, filled, read
from tests.support.paths import ROOT

# Notebooks print figures of the run in which they are built, and the support matrix has a script of
# its own.
BEARING = [page for page in PAGES if page.parent.name != "notebooks" and page.name != "support.md"]
GIVEN = re.compile(r"<!-- given: [^>]+ -->")
# A block without figures: from its comment to the next empty line.
EXEMPT = re.compile(
    r"^ *<!-- (?:given|not backed): [^>]+ -->\n.*?(?=\n\n|\Z)", re.MULTILINE | re.DOTALL
)
UNBACKED = re.compile(r"^ *<!-- not backed: [^>]+ -->\n(.*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)
DATE = re.compile(r"\b(October|November|December) \d{1,2}, 20\d\d\b")
CODE = re.compile(r"^ *```.*?^ *```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
WITH_UNIT = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:x\b| ?ms\b| ?%)")


def name(page):
    return str(page.relative_to(ROOT))


def wrong(text):
    return [figure for figure in figures(text) if figure.shown != figure.expected]


def blank(match):
    """Keep the lines of a match, so that numbers are reported where they are."""
    return "\n" * match[0].count("\n")


def without_source(text):
    """Yield the numbers with units in running text that have no source."""
    for pattern in (CODE, TABLE, EXEMPT, FIGURE):
        text = pattern.sub(blank, text)
    text = re.sub(WITH_UNIT.pattern + GIVEN.pattern, blank, text)
    for match in WITH_UNIT.finditer(text):
        yield f"{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_tables_are_those_of_the_files(page):
    text = read(page)
    assert filled(text) == text, "run: python -m docs.tables"


def test_every_table_is_shown_once():
    shown = [found[1] for page in PAGES for found in TABLE.findall(read(page))]
    assert sorted(shown) == sorted(measured.TABLES | replayed.TABLES)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_those_of_the_files(page):
    text = read(page)
    assert wrong(text) == []
    assert text.count("<!-- figure") == len(list(FIGURE.finditer(text))), (
        "a marker that cannot be read"
    )
    assert not re.search(r"^\s*<!-- figure", text, re.MULTILINE), (
        "a comment at the start of a line ends the paragraph"
    )


@pytest.mark.parametrize("page", BEARING, ids=name)
def test_numbers_with_units_have_a_source(page):
    assert list(without_source(read(page))) == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_measurements_without_a_file_have_a_date(page):
    blocks = UNBACKED.findall(read(page))
    assert [block for block in blocks if not DATE.search(block)] == []


def test_a_changed_digit_is_found():
    text = read(ROOT / "docs" / "benchmarks" / "gpu.md")
    table = TABLE.search(text)
    assert table is not None
    position = next(match.start() for match in re.finditer(r"\d\.\d\d", table[0])) + table.start()
    changed = text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :]
    assert filled(changed) == text != changed
    sources = list(FIGURE.finditer(text))
    assert len(sources) > 40
    for match in sources:
        position = match.end("shown") - 1
        changed = text[:position] + str((int(text[position]) + 1) % 10) + text[position + 1 :]
        assert wrong(changed), match[0]


@pytest.mark.parametrize("text", ["it is 1.58x as fast", "in 12 ms", "95 % of them", "95% of them"])
def test_a_number_without_a_source_is_found(text):
    assert list(without_source(f"Measured:\n{text}\n"))
    assert not list(without_source(f"<!-- given: a goal -->\n{text}\n\nnothing\n"))
    assert not list(without_source(f"```\n{text}\n```\n`{text}`\n"))
