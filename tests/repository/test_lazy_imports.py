"""What is imported when: the package and the command line load torch where it is first needed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hf_slospec
from hf_slospec.cli.app import app

HEAVY = (
    "torch",
    "transformers",
    "gradio",
    "fastapi",
    "httpx",
    "httpx2",
    "ray",
    "matplotlib",
    "openai",
    "accelerate",
)
COMMANDS = (
    "generate",
    "chat",
    "serve",
    "demo",
    "bench",
    "profile",
    "check",
    "simulate",
    "train-drafter",
)
SIMULATED = "simulate --system auto --number 4 --rate 1".split()


def imported_by(code):
    """Return which of the heavy packages a new process has imported after some code."""
    code += f"\nimport sys; print(*[name for name in {HEAVY} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return set(run.stdout.splitlines()[-1].split())


def test_the_import_loads_no_torch_and_limits_its_kernels():
    code = "import os; os.environ.pop('LRU_CACHE_CAPACITY', None); import hf_slospec; "
    assert imported_by(code + "assert os.environ['LRU_CACHE_CAPACITY'] == '256'") == set()
    assert (
        imported_by("import hf_slospec; hf_slospec.SLOSpecConfig(); hf_slospec.TokenTree") == set()
    )
    assert imported_by("import hf_slospec, matplotlib") == {"matplotlib"}


def test_commands_that_need_no_model_load_no_torch():
    lines = [["--version"], ["--help"], *([name, "--help"] for name in COMMANDS), SIMULATED]
    code = f"from hf_slospec.cli.app import app\nfor line in {lines}:\n    app(line, standalone_mode=False)"
    assert imported_by(code) == set()


def test_all_commands_are_tested():
    assert {
        command.name or command.callback.__name__.replace("_", "-")
        for command in app.registered_commands
    } == {*COMMANDS}


def test_type_checkers_see_the_same_names():
    tree = ast.parse(Path(hf_slospec.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == {name: f"{module}.{name}" for name, module in hf_slospec._HOMES.items()}


def test_all_ways_to_a_public_name():
    names: dict[str, object] = {}
    exec("from hf_slospec import *", names)
    assert names.keys() - {"__builtins__"} == {*hf_slospec.__all__} <= {*dir(hf_slospec)}
    assert names["enable"] is hf_slospec.enable
    with pytest.raises(AttributeError, match="no attribute 'enabel'"):
        hf_slospec.enabel  # noqa: B018
    with pytest.raises(ImportError, match="enabel"):
        exec("from hf_slospec import enabel")
