"""Options shared by several commands, their checks, and the output of errors and results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from hf_slospec.config import SLOSpecConfig
from hf_slospec.drafters.named import NAMES
from hf_slospec.errors import InvalidInputError, SLOSpecError, describe_validation_error
from hf_slospec.extras import need
from hf_slospec.tiny.shapes import SHAPES

TargetModel = Annotated[
    str | None, typer.Option(help="A model from the Hub or a folder. Default: the embedded target.")
]
Assistant = Annotated[str | None, typer.Option(help="Its draft model. Default, with --target: prompt lookup drafts.")]
Drafter = Annotated[
    str | None,
    typer.Option(
        help=f"What drafts in place of --assistant: {NAMES}, a trained head (EAGLE-3, MTP, DFlash) or a draft model by "
        "name or folder (safetensors only), or a sum such as lookup+mtp. For the embedded target: also eagle3, and "
        "assistant, its draft model, as in suffix+assistant."
    ),
]
Size = Annotated[str, typer.Option(help=f"Size of the embedded target: tiny, {', '.join(SHAPES)}.")]
DType = Annotated[
    str,
    typer.Option(
        help="bfloat16, float16, float32 (output identical to generate), auto: that of the checkpoint, or fast: "
        "bfloat16 if fast here, else float32."
    ),
]
Device = Annotated[
    str,
    typer.Option(help="cpu, cuda, cuda:1, ..., or auto: CUDA, or MPS if a trial gives the right tokens, or cpu."),
]
AllowMissing = Annotated[
    bool,
    typer.Option(
        "--allow-missing", help="Load checkpoints that lack tensors, which stay random, or have unknown ones."
    ),
]
ConfigJSON = Annotated[
    str,
    typer.Option(
        help='SLOSpecConfig fields as JSON, e.g. \'{"max_depth": 4}\'. "policy" is auto, adaserve, fixed, none or any '
        "other registered one; an unknown name lists them."
    ),
]
ResultPath = Annotated[Path | None, typer.Option("--json", help="Write the results with provenance to this file.")]


def console(min_width: int = 200) -> Console:
    """Return a console of at least ``min_width`` columns, so that tables are complete in any terminal or pipe."""
    return Console(width=max(Console().width, min_width))


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option is on the command line, also with the value of its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def settings_of(config: str) -> SLOSpecConfig:
    """Return the config of ``--config``; raises BadParameter if it is invalid."""
    try:
        return SLOSpecConfig.model_validate_json(config)
    except ValidationError as error:
        raise typer.BadParameter(f"--config: {describe_validation_error(error)}") from error


@contextmanager
def usage_errors(*further: type[Exception]) -> Iterator[None]:
    """Raise InvalidInputError as BadParameter; show other errors of the package, and ``further`` ones, in a line."""
    shown: tuple[type[Exception], ...] = (SLOSpecError, *further)
    try:
        yield
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from error
    except shown as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(1) from error


def check_outputs(plot: Path | None, *further: Path | None) -> None:
    """Raise BadParameter for output files that cannot be written; create their folders."""
    if plot is not None:
        if plot.suffix.lower() != ".png":
            raise typer.BadParameter(f"--plot writes a PNG, so {plot} must end in .png")
        with usage_errors():
            need("plot", "--plot")
    for path in (plot, *further):
        if path is not None:
            try:
                _check_writable(path)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", None) or error
                raise typer.BadParameter(f"{path}: cannot be written ({reason}); give another path") from error


def _check_writable(path: Path) -> None:
    """Check that a file can be written, and leave it unchanged; raises OSError or ValueError."""
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; give a file")
    path.parent.mkdir(parents=True, exist_ok=True)
    is_there = path.exists()
    if path.is_file() or not is_there:  # not a pipe or a device
        path.open("a").close()
    if not is_there:
        path.unlink()


def write_results(path: Path, facts: dict[str, Any], results: Any) -> None:
    """Write results with their provenance as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": facts, "results": results}, indent=2) + "\n")
