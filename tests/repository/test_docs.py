"""The documentation's code: every Python block and every command that ends by itself runs, the
other commands are ones that the program takes.

The blocks of a page run top to bottom, Python in one namespace, which begins with that of the last
block of docs/getting_started.md ("Names on the other pages"), in a folder where ``org/target`` and
``org/draft`` are the embedded pair, and the published names are the embedded target, or, nightly,
the checkpoint that ``make checkpoints`` brings. Models are loaded in float32,
and commands compute less than they would (``QUICK``). A ``text`` block behind a Python block is
what it prints, numbers aside; with ``<!-- measured: where -->`` before it, what may differ from
machine to machine is left out, too. What cannot run here has ``<!-- not run: the reason -->`` on
the line before it, and Python is compiled all the same. Notebooks are run by the documentation's
build, commands in them here."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from typing import NamedTuple

import prometheus_client
import pytest
import torch
import typer
from typer.testing import CliRunner

from examples.drop_in import save_pair
from hf_slospec.cli.app import app
from hf_slospec.tiny.embedded import FOLDER
from scripts.checkpoints import COMPLETE, SMOLLM2
from scripts.checkpoints import FOLDER as CHECKPOINTS
from tests.support.breadth import EXHAUSTIVE
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
TEXTS = [
    *PAGES,
    ROOT / "CONTRIBUTING.md",
    ROOT / "demo" / "README.md",
    *sorted((ROOT / "hf_slospec").glob("**/*.md")),
]
FENCE = re.compile(
    r"(?P<mark><!-- (?:not run|measured): [^\n]+ -->\n)?^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
COMMAND = re.compile(r"(?:^|`|\$ )python -m hf_slospec ([a-z][^`\n]+)", re.MULTILINE)
CHECKPOINT = CHECKPOINTS / SMOLLM2.folder
PUBLISHED = (f"HuggingFaceTB/{SMOLLM2.folder}", f"build/checkpoints/{SMOLLM2.folder}")
# Options that make a command quick, by command; no others run, for the reason beside them.
QUICK = {
    "generate": "--max-new-tokens 4 --device cpu",
    "check": "--max-new-tokens 2 --seconds 1",
    "bench": """--repeats 1 --batch 1 --prompt-tokens 8 --new-tokens 4 --config '{"compile": "off"}'""",
    "profile": "--seconds 1 --no-keep --no-compile",
    "simulate": "--number 4",
}
SERVES = "serves until it is stopped"
NOT_RUN = {
    "chat": "asks on a terminal",
    "serve": SERVES,
    "demo": SERVES,
    "train-drafter": "trains for minutes",
}
# What needs an extra, by extra: commands, options and drafters.
NEEDED = {
    "serve": r"hf_slospec serve\b",
    "demo": r"hf_slospec demo\b",
    "ray": r"hf_slospec serve .*--replicas",
    "plot": r"hf_slospec (?:profile|simulate) .*--plot",
    "gguf": r"--target \S+\.gguf",
    "suffix": r"""drafter(?:=| )["']?suffix|"suffix", model""",
}


class Block(NamedTuple):
    line: int
    kind: str
    code: str
    mark: str

    @property
    def is_run(self):
        return "not run" not in self.mark


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            text.count("\n", 0, found.start("code")) + 1,
            found["kind"],
            found["code"],
            found["mark"] or "",
        )
        for found in FENCE.finditer(text)
    ]


def name(page):
    return str(page.relative_to(ROOT))


def has_code(page):
    kinds = {"python"} if page.parent.name != "notebooks" else set()
    return any(block.kind in kinds or commands_of(block) for block in blocks(page))


def commands_of(block):
    """Commands of a block that run here."""
    shell = block.is_run and block.kind in ("console", "")
    lines = COMMAND.findall(block.code) if shell else []
    # Without a GPU; loading the checkpoint once more takes seconds.
    left_out = ("--device cuda", *(() if EXHAUSTIVE else ("build/checkpoints",)))
    return [
        line
        for line in lines
        if line.split()[0] in QUICK and not any(words in line for words in left_out)
    ]


def commands():
    found = {
        line.strip() for text in TEXTS for line in COMMAND.findall(text.read_text(encoding="utf-8"))
    }
    return sorted(found)


def without_numbers(text):
    return re.sub(r"\d+(\.\d+)?", "#", text).strip()


def without_measurements(text):
    """Text without numbers, outcomes, and the width of columns that depends on them."""
    return re.sub(r"\s+", " ", re.sub(r"\b(yes|no)\b|-", "#", without_numbers(text)))


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a stand-in that has a chat template; nightly of the published checkpoint."""
    if EXHAUSTIVE and (CHECKPOINT / COMPLETE).exists():
        return CHECKPOINT
    folder = tmp_path_factory.mktemp("published")
    save_pair(folder)
    return folder


@pytest.fixture
def _models_by_name(tmp_path, monkeypatch, published):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in PUBLISHED:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).symlink_to(published)
    for own, model in {"name": "target", "target": "target", "draft": "draft"}.items():
        folder = tmp_path / "org" / own
        folder.mkdir(parents=True)
        for file in (*(FOLDER / model).iterdir(), *(FOLDER / "tokenizer").iterdir()):
            (folder / file.name).symlink_to(file)


@pytest.fixture
def _no_server(monkeypatch):
    """Pages may start a metrics server; this process shall not open a port, or keep a collector."""
    monkeypatch.setattr(prometheus_client, "start_http_server", lambda port: None)
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())


DONE = set[str]()  # commands that ran on another page


@pytest.mark.usefixtures("_models_by_name", "_no_server")
@pytest.mark.parametrize(
    "page",
    [
        # It compiles and measures for minutes.
        pytest.param(page, marks=pytest.mark.nightly) if page.name == "command-line.md" else page
        for page in PAGES
        if has_code(page)
    ],
    ids=name,
)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, published):
    prelude = [
        block for block in blocks(ROOT / "docs" / "getting_started.md") if block.kind == "python"
    ][-1]
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(prelude.code, namespace)
    printed = None
    for block in blocks(page):
        if block.kind == "python":
            source = block.code.replace('dtype="auto"', 'dtype="float32"')
            # Line numbers of the page in tracebacks.
            code = compile("\n" * (block.line - 1) + source, name(page), "exec")
            printed = run_python(code, namespace) if block.is_run else None
        elif block.kind == "text" and printed is not None:
            is_measured = "measured" in block.mark
            same = without_measurements if is_measured else without_numbers
            if not is_measured or published == CHECKPOINT:
                assert same(printed) == same(block.code), f"{name(page)}:{block.line}"
            printed = None
        for line in commands_of(block):
            if line not in DONE:
                DONE.add(line)
                run_command(line, f"{name(page)}:{block.line}")


def run_python(code, namespace):
    """Run a block, and return what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(code, namespace)
    return out.getvalue()


def run_command(line, where):
    """Run a command in this process, with less to compute."""
    command, *arguments = shlex.split(line, comments=True)
    quick = shlex.split(QUICK[command])
    if "--size" in arguments or (command in ("bench", "profile") and "--target" not in arguments):
        quick += ["--size", "tiny"]
    num_threads = torch.get_num_threads()
    result = CliRunner().invoke(app, [command, *arguments, *quick])
    torch.set_num_threads(num_threads)
    assert result.exit_code == 0, f"{where}: {line}\n{result.output}"


def test_every_command_runs_or_has_a_reason():
    assert {line.split()[0] for line in commands()} == {*QUICK, *NOT_RUN}


@pytest.mark.parametrize("page", TEXTS, ids=name)
def test_a_page_names_the_extras_that_its_commands_need(page):
    text = page.read_text(encoding="utf-8")
    code = "\n".join(block.code for block in blocks(page))
    lines = re.findall(r"pip install .*", text)
    named = {extra for line in lines for extra in re.findall(r"\[(\w+)\]", line)}
    needed = {extra for extra, pattern in NEEDED.items() if re.search(pattern, code)}
    needed -= {"serve"} if "ray" in named else set()
    assert needed <= named


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
