"""Tables of the package's modules, with the first sentence of each docstring, for the built
documentation.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hf_slospec"
PLACE = "<!-- modules -->"


def described() -> Iterator[tuple[str, str]]:
    """Yield (path below the package, first sentence of its docstring) of every module that has
    something to say.
    """
    for path in sorted(PACKAGE.rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
        if docstring is None:
            raise ValueError(f"{path} has no docstring")
        first = " ".join(docstring.split("\n\n")[0].split())
        yield (
            path.relative_to(PACKAGE).as_posix(),
            re.split(r"(?<=\.) (?=[A-Z])", first.replace("``", "`"))[0],
        )


def tables() -> str:
    """Return a table per folder, in Markdown."""
    by_folder: dict[str, list[str]] = {}
    for path, sentence in described():
        sentence = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", sentence).replace("|", r"\|")
        by_folder.setdefault(str(Path(path).parent), []).append(
            f"| `{Path(path).name}` | {sentence} |"
        )
    return "\n\n".join(
        f"## {'The root' if folder == '.' else f'`{folder}`'}\n\n| module | |\n|---|---|\n"
        + "\n".join(rows)
        for folder, rows in by_folder.items()
    )
