"""Fill the tables of README.md and docs/ from the measurements: ``python -m docs.tables``.

A table is generated between ``<!-- table: name -->`` and ``<!-- end -->``. A figure in running text
is written by hand and has a key behind it, ``1.58x<!--f3-->``. The file of the page in
``docs/figures`` has the source of each key: ``f3 FILE PATH .2f``, a file below
``benchmarks/results`` and the place in it. Keys such as ``g3`` stand for the reason why a figure
has no source. ``tests/repository/test_figures.py`` fails where a page differs from the files.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

TABLE = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
KEY = re.compile(r"<!--([fg]\d+)-->")
FIGURE = re.compile(
    r"(?P<shown>-?\d[\d,]*(?:\.\d+)?)(?P<unit>[^\d<]{0,20})"
    r"<!-- figure: (?P<file>\S+) (?P<path>[^<]+?) (?P<format>\.\df)(?: times (?P<scale>[\d.e-]+))? -->",
)
REDUCED: dict[str, Callable[[Sequence[float]], float]] = {
    "max": max,
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "sum": sum,
}


def read(page: Path) -> str:
    """Return a page's text with its sources in place of their keys."""
    text = page.read_text(encoding="utf-8")
    name = page.relative_to(ROOT).with_suffix("").as_posix().removeprefix("docs/")
    file = ROOT / "docs" / "figures" / f"{name.replace('/', '-')}.txt"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    sources = dict(line.split(" ", 1) for line in lines)
    used = set(KEY.findall(text))
    if used != sources.keys():
        raise ValueError(f"{name}: keys without source, or unused: {used ^ sources.keys()}")
    kinds = {"f": "figure", "g": "given"}
    return KEY.sub(lambda match: f"<!-- {kinds[match[1][0]]}: {sources[match[1]]} -->", text)


@functools.cache
def result(name: str) -> Any:
    """Return the contents of a file below benchmarks/results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def find(rows: Iterable[dict[str, Any]], **fields: Any) -> Any:
    """Return the one row that has these fields, or None."""
    matches = [row for row in rows if all(row.get(key) == value for key, value in fields.items())]
    if len(matches) > 1:
        raise ValueError(f"{len(matches)} rows have {fields}")
    return matches[0] if matches else None


def paired(ours: Sequence[float], others: Sequence[float]) -> float:
    """Return the median of the ratios of the same repeats."""
    return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def markdown(header: str, rows: Iterable[Sequence[object]]) -> str:
    """Return a table; the columns of ``header`` are separated by ``|``."""
    names = [name.strip() for name in header.split("|")]
    lines = [names, ["---"] * len(names), *([str(cell) for cell in row] for row in rows)]
    if any(len(line) != len(names) for line in lines):
        raise ValueError(f"a row of the table {header!r} has another number of cells")
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def value_at(file: str, path: str) -> float:
    """Return the number at a place, or the paired ratio of two: ``PATH over PATH``.

    Args:
        path: keys and indices with ``/`` between them; ``key=value`` selects rows of a list. The
            last part may reduce a list of numbers, as ``max`` does.
    """
    if " over " in path:
        above, below = (_walk(result(file), part) for part in path.split(" over "))
        return paired(above, below) if isinstance(above, list) else above / below
    value = _walk(result(file), path)
    if not isinstance(value, int | float):
        raise ValueError(f"{path} of {file} is no number")
    return value


def _walk(value: Any, path: str) -> Any:
    """Return what is at a path without ``over``."""
    for part in path.split("/"):
        if "=" in part:
            key, wanted = part.split("=", 1)
            value = [row for row in value if str(row.get(key)) == wanted]
        elif part == "values":
            value = list(value.values())
        elif isinstance(value, list) and part in REDUCED:
            value = REDUCED[part](value)
        elif isinstance(value, list) and not part.lstrip("-").isdigit():
            (row,) = value
            value = row[part]
        else:
            value = value[int(part) if isinstance(value, list) else part]
    return value


class Figure(NamedTuple):
    """A number in running text, and what the measurements say."""

    line: int
    shown: str
    expected: str
    unit: str


def figures(text: str) -> Iterator[Figure]:
    """Yield the figures of a page that have a source."""
    for match in FIGURE.finditer(text):
        value = value_at(match["file"], match["path"]) * float(match["scale"] or 1)
        line = text.count("\n", 0, match.start()) + 1
        yield Figure(
            line, match["shown"].replace(",", ""), format(value, match["format"]), match["unit"]
        )


def filled(text: str) -> str:
    """Return a page with its tables generated anew."""
    from docs.measured import TABLES as MEASURED
    from docs.replayed import TABLES as REPLAYED

    tables = MEASURED | REPLAYED
    return TABLE.sub(lambda match: f"{match[1]}{tables[match[2]]()}{match[3]}", text)


def main() -> None:
    for page in PAGES:
        old = page.read_text(encoding="utf-8")
        if (new := filled(old)) != old:
            page.write_text(new, encoding="utf-8")
            print(f"{page.relative_to(ROOT)}: changed")


if __name__ == "__main__":
    main()
