"""The command line ``python -m hf_slospec`` or ``hf_slospec``. Each file in ``commands/`` is a
command.
"""

from __future__ import annotations

from typing import Annotated

import typer

from hf_slospec import __version__
from hf_slospec.cli.commands.bench import bench
from hf_slospec.cli.commands.chat import chat
from hf_slospec.cli.commands.check import check
from hf_slospec.cli.commands.demo import demo
from hf_slospec.cli.commands.generate import generate
from hf_slospec.cli.commands.profile import profile
from hf_slospec.cli.commands.serve import serve
from hf_slospec.cli.commands.simulate import simulate
from hf_slospec.cli.commands.train_drafter import train_drafter

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Tree speculation with a TPOT SLO per request."
)


def _version(is_given: bool) -> None:
    if is_given:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Handle the options of the command line itself."""


for command in (generate, chat, serve, demo, bench, profile, check, simulate, train_drafter):
    app.command()(command)
