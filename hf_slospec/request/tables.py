"""Tables of text and HTML, which results print as in terminals and notebooks."""

from __future__ import annotations

import html
from collections.abc import Sequence


class PrintsAsTable:
    """Base of results that print as a table."""

    # The first row holds the names of the columns; else the first column those of the rows.
    _has_header = True

    def _table(self) -> Sequence[Sequence[str]]:
        """Return the rows, all of the same length."""
        raise NotImplementedError

    def __repr__(self) -> str:
        rows = self._table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        aligned = str.rjust if self._has_header else str.ljust
        return "\n".join("  ".join(map(aligned, row, widths)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        lines = []
        for number, row in enumerate(self._table()):
            line = ""
            for column, cell in enumerate(row):
                tag = "td" if (number if self._has_header else column) else "th"
                line += f"<{tag}>{html.escape(cell)}</{tag}>"
            lines.append(f"<tr>{line}</tr>")
        return f"<table>{''.join(lines)}</table>"


def shown(value: float | None, digits: int = 0, scale: float = 1.0) -> str:
    """Return a number times ``scale`` with this many decimals; None is shown as a dash."""
    return "-" if value is None else f"{value * scale:.{digits}f}"
