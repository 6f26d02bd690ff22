"""Options shared by several commands, their checks, and the output of errors and results."""

from __future__ import annotations

import functools
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import typer
from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.console import Console

from hf_slospec.config import SLOSpecConfig
from hf_slospec.errors import InvalidInputError, SLOSpecError, describe_validation_error
from hf_slospec.extras import need
from hf_slospec.server.model_options import ModelOptions

FLAGS = {  # field -> option, where the names differ
    "model_name": "--served-model-name",
    "api_keys": "--api-key",
    "allowed_origins": "--allowed-origin",
    "bounds": "--request-limits",
    "default_tpot": "--default-slo-tpot",
    "strictest_tpot": "--strictest-slo-tpot",
}
# Fields of ModelOptions
MODEL = ("target", "assistant", "drafter", "size", "dtype", "device", "allow_missing")

Command = Callable[..., None]


def flag(field: str) -> str:
    """Return the command-line option of a model's field."""
    return FLAGS.get(field, f"--{field.replace('_', '-')}")


def option(
    model: type[BaseModel], field: str, *, kind: Any = None, default: Any = ...
) -> inspect.Parameter:
    """Return a parameter of a command for a field of a model, with the field's description.

    Args:
        model: the pydantic model.
        field: name of the field.
        kind: type on the command line; None: the field's type.
        default: default on the command line; ``...``: the field's default.
    """
    info = model.model_fields[field]
    kind = kind or info.annotation
    default = info.default if default is ... else default
    if get_origin(kind) is tuple:
        kind = list[str]
        default = []
    elif get_origin(kind) is Literal:
        kind = str
    annotation = Annotated[kind, typer.Option(flag(field), help=info.description)]
    return inspect.Parameter(
        field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def with_options(*parameters: inspect.Parameter) -> Callable[[Command], Command]:
    """Return a decorator that adds parameters to a command. The command receives their values in
    its first argument, a dict by name.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(
                {parameter.name: values.pop(parameter.name) for parameter in parameters}, **values
            )

        _, *of_command = inspect.signature(command, eval_str=True).parameters.values()
        of_command = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in of_command
        ]
        signature = inspect.Signature([*parameters, *of_command], return_annotation=None)
        run.__signature__ = signature  # type: ignore[attr-defined]
        run.__annotations__ = {
            name: parameter.annotation for name, parameter in signature.parameters.items()
        }
        return run

    return decorate


def with_models(fields: Sequence[str] = MODEL, **defaults: Any) -> Callable[[Command], Command]:
    """Return a decorator that adds fields of ModelOptions to a command, see :func:`with_options`;
    keyword arguments override their defaults.
    """
    return with_options(
        *(option(ModelOptions, field, default=defaults.get(field, ...)) for field in fields)
    )


ConfigJSON = Annotated[
    str,
    typer.Option(
        help='SLOSpecConfig fields as JSON, e.g. \'{"max_depth": 4}\'. "policy" is auto, adaserve, fixed, none or any '
        "other registered one; an unknown name lists them."
    ),
]
ExactName = Annotated[
    str | None,
    typer.Option(
        "--exact", help=f'"bits" or "self". {SLOSpecConfig.model_fields["exact"].description}'
    ),
]
ResultPath = Annotated[
    Path | None, typer.Option("--json", help="Write the results with provenance to this file.")
]


def console(min_width: int = 200) -> Console:
    """Return a console of at least ``min_width`` columns, so that tables are complete in any
    terminal or pipe.
    """
    return Console(width=max(Console().width, min_width))


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether an option is on the command line, also with the value of its default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def settings_of(text: str, kind: Any, option: str) -> Any:
    """Validate the JSON ``text`` of a command-line option as type ``kind``; raises BadParameter if
    it is invalid.
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        raise typer.BadParameter(f"{option}: {describe_validation_error(error)}") from error


def config_of(text: str, **overrides: Any) -> SLOSpecConfig:
    """Return the settings of ``--config``.

    Args:
        text: the settings as JSON.
        overrides: values of options for single fields, which replace those of ``--config``; None:
            the option is not given.

    Raises:
        BadParameter: a setting is invalid.
    """
    settings: SLOSpecConfig = settings_of(text, SLOSpecConfig, "--config")
    for field, value in overrides.items():
        if value is not None:
            text = json.dumps({**json.loads(text), field: value})
            settings = settings_of(text, SLOSpecConfig, flag(field))
    return settings


@contextmanager
def usage_errors(*further: type[Exception]) -> Iterator[None]:
    """Raise InvalidInputError as BadParameter; print other errors of the package, and errors of the
    types ``further``, in one line and exit with 1.
    """
    shown: tuple[type[Exception], ...] = (SLOSpecError, *further)
    try:
        yield
    except InvalidInputError as error:
        message = str(error)
        cause = error.__cause__
        if isinstance(cause, ValidationError) and message == describe_validation_error(cause):
            message = describe_validation_error(cause, flag)
        raise typer.BadParameter(message) from error
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
                raise typer.BadParameter(
                    f"{path}: cannot be written ({reason}); give another path"
                ) from error


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


clock = time.monotonic


class TimeBudget:
    """Time limit of a command, from the creation of this object on; also prints the progress."""

    def __init__(self, seconds: float, console: Console):
        self.seconds = seconds
        self.console = console
        self._started_s = clock()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return clock() - self._started_s

    def allows(self, expected_s: float, share: float) -> bool:
        """Return whether work of ``expected_s`` would end within ``share`` of the time limit."""
        return self.elapsed_s + expected_s <= share * self.seconds

    def show(self, activity: str) -> None:
        """Print the current activity and the time used."""
        line = f"{activity} ({self.elapsed_s:.0f} s)"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)
