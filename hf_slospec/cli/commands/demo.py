"""``hf_slospec demo``: several users of one model, in a browser."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console

from hf_slospec.cli.options import (
    flag,
    is_given,
    usage_errors,
    with_models,
)
from hf_slospec.demo import SIZE
from hf_slospec.extras import need
from hf_slospec.serving.options import ModelOptions


@with_models(size=SIZE)
def demo(
    given: dict[str, Any],
    context: typer.Context,
    host: Annotated[
        str | None, typer.Option(help="Address to listen on; 0.0.0.0 for all machines. Default: this machine only.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Default: the first free port from 7860.")] = None,
    password: Annotated[
        str | None,
        typer.Option(
            envvar="HF_SLOSPEC_DEMO_PASSWORD", help="Required of visitors; preferably set by the environment variable."
        ),
    ] = None,
    no_password: Annotated[
        bool, typer.Option("--no-password", help="Let other machines in without a password.")
    ] = False,
    server: Annotated[
        str | None, typer.Option(help="URL of a running `hf_slospec serve`, in place of models in this process.")
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="HF_SLOSPEC_API_KEY", help="Key of the server; preferably by the variable.")
    ] = None,
) -> None:
    """Show several users of one model, each with a speed target, in a browser.

    A coding copilot, a chat, a summary and a batch job share one engine with the page's visitors. Change their speed
    targets, switch the policy and see the speed of each user. Without --server, no data leaves the machine. Stop with
    Ctrl-C.

    Example, with a slower model:  hf_slospec demo --size 0.3B --port 7860

    With other models, for other machines:
    hf_slospec demo --target org/name --assistant org/draft --device cuda --host 0.0.0.0 --password ...

    With a running server:  hf_slospec demo --server http://127.0.0.1:8000
    """
    if server is not None and (loading := [flag(name) for name in given if is_given(context, name)]):
        raise typer.BadParameter(f"{', '.join(loading)}: --server has a model of its own; leave one of them out")
    if server is None and is_given(context, "api_key"):
        raise typer.BadParameter("--api-key is the key of a server; give --server, too")
    console = Console(stderr=True, soft_wrap=True)
    with usage_errors(OSError):
        need("demo", "the demo")
        from hf_slospec.demo.serve import Options, serve

        serve(Options(ModelOptions(**given), host, port, password, no_password, server, api_key), console.print)
