"""Run the fuzz tests with many random examples; the tests of CI run few, and always the same.

Usage: python scripts/fuzz.py --examples 5000 tests/generate
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))


def main(
    folders: Annotated[
        list[Path] | None, typer.Argument(help="Folders of tests. Default: all.")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Examples of each test.")] = 2000,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the examples. Default: random.")
    ] = None,
) -> None:
    """Run all fuzz tests below the folders; exit with 1 if one failed."""
    os.environ["FUZZ_EXAMPLES"] = str(examples)  # tests/conftest.py reads it
    found = sorted(
        path for folder in folders or [ROOT / "tests"] for path in folder.rglob("test_fuzz.py")
    )
    if not found:
        raise typer.BadParameter("there is no test_fuzz.py in these folders")
    os.chdir(ROOT)
    seeds = [] if seed is None else [f"--hypothesis-seed={seed}"]
    raise typer.Exit(pytest.main(["-q", "--hypothesis-profile=fuzz", *seeds, *map(str, found)]))


if __name__ == "__main__":
    typer.run(main)
