"""The documentation's code: every Python block runs, every command line is one that the commands
take.

Python blocks of a page run top to bottom in one namespace, which begins with that of the last block
of docs/getting_started.md ("Names on the other pages"), in an empty folder where ``org/target`` and
``org/draft`` are the embedded pair. A ``text`` block behind one is what it prints, numbers aside.
What cannot run here has ``<!-- not run: the reason -->`` on the line before it. Notebooks are run
by the documentation's build."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import NamedTuple

import prometheus_client
import pytest
import typer

from hf_slospec.cli.app import app
from hf_slospec.tiny.embedded import FOLDER
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TEXTS = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "demo" / "README.md",
    *sorted((ROOT / "hf_slospec").glob("**/*.md")),
]
FENCE = re.compile(
    r"(?P<mark><!-- not run: .+ -->\n)?^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"(?:^|`|\$ )python -m hf_slospec ([a-z][^`\n]+)", re.MULTILINE)


class Block(NamedTuple):
    line: int
    kind: str
    code: str
    is_run: bool


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["kind"],
            found["code"],
            found["mark"] is None,
        )
        for found in FENCE.finditer(text)
    ]


def name(page):
    return str(page.relative_to(ROOT))


def has_code(page):
    is_notebook = page.parent.name == "notebooks"
    return not is_notebook and any(block.kind == "python" for block in blocks(page))


def commands():
    found = {
        line.strip() for text in TEXTS for line in COMMAND.findall(text.read_text(encoding="utf-8"))
    }
    return sorted(found)


def without_numbers(text):
    return re.sub(r"\d+(\.\d+)?", "#", text).strip()


@pytest.fixture
def _models_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in ("target", "draft"):
        folder = tmp_path / "org" / model
        folder.mkdir(parents=True)
        for file in (*(FOLDER / model).iterdir(), *(FOLDER / "tokenizer").iterdir()):
            (folder / file.name).symlink_to(file)


@pytest.fixture
def _no_server(monkeypatch):
    """Pages may start a metrics server; this process shall not open a port, or keep a collector."""
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda port: None)
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())


@pytest.mark.usefixtures("_models_by_name", "_no_server")
@pytest.mark.parametrize("page", [page for page in PAGES if has_code(page)], ids=name)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page):
    prelude = [
        block for block in blocks(ROOT / "docs" / "getting_started.md") if block.kind == "python"
    ][-1]
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(prelude.code, namespace)
    printed = None
    for block in blocks(page):
        if block.kind == "python" and block.is_run:
            out = io.StringIO()
            # Line numbers of the page in tracebacks.
            code = compile("\n" * (block.line - 1) + block.code, name(page), "exec")
            with contextlib.redirect_stdout(out):
                exec(code, namespace)
            printed = out.getvalue()
        elif block.kind == "text" and printed is not None:
            assert without_numbers(printed) == without_numbers(block.code), (
                f"{name(page)}:{block.line}"
            )
            printed = None


@pytest.mark.parametrize("line", commands())
def test_a_command_line_is_parsed_without_an_error(line):
    command, *arguments = shlex.split(line, comments=True)
    typer.main.get_command(app).commands[command].make_context(command, arguments)


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_files_that_a_page_names_are_there(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    scripts = re.findall(r"\bpython ((?:examples|benchmarks|scripts|docs)/[\w/]+\.py)", text)
    missing = [link for link in links if not (page.parent / link).exists()]
    missing += [script for script in scripts if not (ROOT / script).exists()]
    assert not missing
