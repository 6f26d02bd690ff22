"""``hf_slospec demo``: several users of one model, in a browser."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from hf_slospec.cli.options import (
    usage_errors,
    with_models,
)
from hf_slospec.demo import SIZE
from hf_slospec.extras import need
from hf_slospec.server.model_options import ModelOptions


@with_models(size=SIZE)
def demo(
    fields: dict[str, Any],
    host: Annotated[
        str | None,
        typer.Option(
            help="Address to listen on; 0.0.0.0 for all machines. Default: this machine only."
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Default: the first free port from 7860.")
    ] = None,
    password: Annotated[
        str | None,
        typer.Option(
            envvar="HF_SLOSPEC_DEMO_PASSWORD",
            help="Required of visitors; preferably set by the environment variable.",
        ),
    ] = None,
    no_password: Annotated[
        bool, typer.Option("--no-password", help="Let other machines in without a password.")
    ] = False,
    compile: Annotated[
        bool,
        typer.Option(
            help="On a CPU, compile forwards first, about a minute; later processes load them at once."
        ),
    ] = True,
) -> None:
    """Show a race against stock generate, and users of one model with SLOs, in a browser.

    The race decodes one prompt with stock generate, with this package without drafts, and with
    drafts. Below it, a coding copilot, a chat, a summary and a batch job share one engine with the
    page's visitors: change their SLOs, switch the policy and see the speed of each user. No data
    leaves the machine. Stop with Ctrl-C.

    Example, with a slower model:  hf_slospec demo --size 0.3B --port 7860

    With other models, for other machines:
    hf_slospec demo --target org/name --assistant org/draft --device cuda --host 0.0.0.0 --password
    ..."""
    console = Console(stderr=True, soft_wrap=True)
    with usage_errors(OSError):
        need("demo", "the demo")
        from hf_slospec.demo.serve import Options, serve

        options = Options(
            ModelOptions(**fields), host, port, password, no_password, "wait" if compile else False
        )
        serve(options, console.print)
