"""Options that several commands have, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError
from hf_slospec.sim.files import described
from hf_slospec.tiny.inflate import SHAPES
from hf_slospec.tiny.load import Pair, load_pair

TargetModel = Annotated[
    str | None, typer.Option(help="A model from the Hub or a folder. Default: the embedded target.")
]
Assistant = Annotated[str | None, typer.Option(help="Its draft; required with --target.")]
Size = Annotated[str, typer.Option(help=f"Inflate the embedded target to: tiny, {', '.join(SHAPES)}.")]
DType = Annotated[str, typer.Option(help="bfloat16 for speed on CPU, float32 for identity; or float16.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, ...")]
ConfigJSON = Annotated[str, typer.Option(help="SLOSpecConfig fields as JSON, e.g. '{\"max_depth\": 4}'.")]
ResultPath = Annotated[Path | None, typer.Option("--json", help="Write results with provenance to this file.")]


def settings_of(config: str) -> SLOSpecConfig:
    try:
        return SLOSpecConfig.model_validate_json(config)
    except ValidationError as error:
        faults = [described(e["loc"], e["msg"]) for e in error.errors(include_url=False)]
        raise typer.BadParameter(f"--config: {'; '.join(faults)}") from error


def pair_of(target: str | None, assistant: str | None, size: str, dtype: str, device: str) -> Pair:
    try:
        return load_pair(target, assistant, size, dtype, device)
    except InvalidInputError as error:
        raise typer.BadParameter(str(error)) from error


def write_results(path: Path, facts: dict[str, Any], results: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": facts, "results": results}, indent=2) + "\n")
