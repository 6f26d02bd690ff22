"""Save the embedded pair, with its target inflated, for ``from_pretrained``.

python benchmarks/inflate.py 0.6B /tmp/pair --dtype bfloat16 python -m hf_slospec bench --target
/tmp/pair/target --assistant /tmp/pair/draft
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from hf_slospec import load_tiny_pair
from hf_slospec.tiny.inflate import inflate
from hf_slospec.tiny.shapes import SHAPES


def main(
    size: Annotated[str, typer.Argument(help=f"One of {', '.join(SHAPES)}.")],
    folder: Annotated[Path, typer.Argument(help="Folder for target/ and draft/.")],
    dtype: Annotated[str, typer.Option(help="Dtype of the weights.")] = "bfloat16",
) -> None:
    """Save the inflated embedded target and the embedded draft."""
    if size not in SHAPES:
        raise typer.BadParameter(f"size must be one of {', '.join(SHAPES)}")
    target, draft, tokenizer = load_tiny_pair(getattr(torch, dtype))
    for name, model in (("target", inflate(target, SHAPES[size])), ("draft", draft)):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    typer.run(main)
