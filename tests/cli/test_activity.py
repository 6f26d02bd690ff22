"""Display of what a command is doing."""

from __future__ import annotations

import io
import logging
import time

import pytest
from rich.console import Console

from hf_slospec.cli import activity as module
from hf_slospec.cli.activity import activity

LOGGER = logging.getLogger("hf_slospec.cpu.compile_job")


@pytest.mark.parametrize("is_terminal", [False, True])
def test_long_activities_are_shown(monkeypatch, is_terminal):
    monkeypatch.setattr(module, "QUIET_S", 0.01)
    monkeypatch.setattr(module, "REFRESH_S", 0.01)
    output = io.StringIO()
    console = Console(file=output, force_terminal=is_terminal, width=200, _environ={})
    level = logging.getLogger("hf_slospec").level

    def wait_for(text):
        begun_s = time.monotonic()
        while text not in output.getvalue():
            assert time.monotonic() - begun_s < 60
            time.sleep(0.01)

    with activity("loading", console) as show:
        wait_for("loading (0 s)")
        LOGGER.info("compiling, about 24 s")
        wait_for("loading: compiling, about 24 s (")
        show("measuring [all]")
        wait_for("measuring [all] (")
        show.detail("3 of 4")
        wait_for("measuring [all]: 3 of 4 (")
        LOGGER.warning("no compiler")
        wait_for("WARNING: no compiler")
    assert logging.getLogger("hf_slospec").level == level
    LOGGER.info("after the end")
    assert "after the end" not in output.getvalue()


def test_short_activities_leave_no_lines():
    output = io.StringIO()
    with activity("loading", Console(file=output)):
        pass
    assert output.getvalue() == ""
