"""Tables of text and HTML, which results print as in terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence

Rows = Sequence[Sequence[str]]


def text_table(rows: Rows, to_right: bool = True) -> str:
    """Return rows as lines of text, with columns aligned to the right or to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = str.rjust if to_right else str.ljust
    return "\n".join("  ".join(map(aligned, row, widths)).rstrip() for row in rows)


def html_table(rows: Rows, has_header: bool = True) -> str:
    """Return rows as an HTML table.

    Args:
        rows: texts, which are escaped.
        has_header: the first row holds the names of the columns, else the first column holds the
            names of the rows.
    """
    lines = []
    for number, row in enumerate(rows):
        tags = [
            "th" if (number == 0 if has_header else column == 0) else "td"
            for column in range(len(row))
        ]
        cells = zip(tags, row, strict=True)
        lines.append("".join(f"<{tag}>{html.escape(cell)}</{tag}>" for tag, cell in cells))
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


def shown(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    """Return a number times ``scale`` with this many decimals; None is shown as a dash."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def yes_or_no(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
