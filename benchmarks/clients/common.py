"""Shared parts of the scripts that try outside clients: environments, the saved pair, a server, and
the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # this checkout is what is tried

from benchmarks.local_server import local_server
from benchmarks.peers import install
from hf_slospec import load_tiny_pair
from hf_slospec.cli.benchmark import provenance

ROOT = Path(__file__).resolve().parents[2]
MODEL = "tiny"  # the name under which ``serve`` has the embedded pair
CHAT_TEMPLATE = (
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}# assistant:\n{% endif %}"
)
CONSTRAINED = ("torch==", "transformers==")
NOT_INHERITED = ("PYTHONPATH", "HF_HUB_OFFLINE")  # aiperf finds no local tokenizer while offline


@dataclass(frozen=True)
class Work:
    """What a script got on its command line."""

    folder: Path
    json: Path | None
    options: argparse.Namespace

    def log(self, name: str) -> Path:
        """Return the path of a log, whose folder exists."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        return self.folder / "logs" / f"{name}.log"


def parse(description: str | None, **defaults: str | int | float) -> Work:
    """Return the work folder, the JSON file, and an option for each of ``defaults``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "folder", type=Path, help="gets environments, models, logs and the client's own output"
    )
    parser.add_argument("--json", type=Path, help="file of the result")
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    return Work(folder, None if options.json is None else options.json.resolve(), options)


class Client:
    """A client in an environment of its own, which is made if it is not there.

    Args:
        package: a requirement of pip, such as ``lm-eval[api]``.
    """

    def __init__(self, work: Work, package: str):
        self.work = work
        self.name = package.split("[")[0]
        self.bin = work.folder / "environments" / self.name / "bin"
        self.bin.parent.parent.mkdir(exist_ok=True)
        install.environment(self.bin.parent, ["--constraint", str(_constraints(work)), package])

    def run(self, *command: str | Path, log: str, timeout_s: float) -> int:
        """Run one of the environment's programs in the work folder, its output in a log; -> exit
        status.
        """
        program, *arguments = map(str, command)
        return run([str(self.bin / program), *arguments], self.work, log, timeout_s)

    def version(self) -> str:
        """Return the installed version."""
        code = f"import importlib.metadata; print(importlib.metadata.version({self.name!r}))"
        found = subprocess.run(
            [self.bin / "python", "-c", code], check=True, capture_output=True, text=True
        )
        return found.stdout.strip()


def _constraints(work: Work) -> Path:
    """Return a file with this repository's versions of torch and transformers; aiperf refuses those
    of the others.
    """
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    file = work.folder / "constraints.txt"
    file.write_text("".join(f"{line}\n" for line in lines if line.startswith(CONSTRAINED)))
    return file


def run(command: Sequence[str], work: Work, log: str, timeout_s: float, typed: str = "") -> int:
    """Run a client's command in the work folder with ``typed`` as its input, its output in a log;
    -> exit status.

    A client that takes longer is killed, with the status 124 of ``timeout``.
    """
    environment = {name: value for name, value in os.environ.items() if name not in NOT_INHERITED}
    with work.log(log).open("w") as output:
        try:
            ended = subprocess.run(
                command, input=typed, stdout=output, stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
                cwd=work.folder, env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 124
    return ended.returncode


def save_pair(work: Work) -> Path:
    """Return a folder with the embedded target in fp32 and the tokenizer with the chat template."""
    folder = work.folder / "target"
    if not (folder / "tokenizer_config.json").exists():
        target, _, tokenizer = load_tiny_pair(torch.float32)
        tokenizer.chat_template = CHAT_TEMPLATE
        target.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def server(work: Work, *options: str, chat_template: str = CHAT_TEMPLATE) -> Iterator[str]:
    """Yield the address of a server in fp32, of the embedded pair by default, which is stopped
    afterwards.

    Raises:
        RuntimeError: it did not start; its log says why.
    """
    with (
        work.log("server").open("w") as log,
        local_server("--dtype", "float32", *options, chat_template=chat_template, log=log) as (
            url,
            _,
        ),
    ):
        yield url


def server_faults(work: Work) -> list[str]:
    """Return the lines of the server's log that name an exception."""
    lines = work.log("server").read_text(errors="replace").splitlines()
    return [
        line[:300] for line in lines if line.startswith(("ERROR", "Traceback")) or "Error:" in line
    ]


def read_jsons(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """Return the objects in the lines of the files below a folder that match a pattern."""
    files = sorted(folder.rglob(pattern))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def report(work: Work, client: str, version: str, checks: dict[str, bool], **figures: Any) -> int:
    """Print what was found, write it as JSON if asked for, and return the number of checks that
    failed.
    """
    checks = checks | {"the server logged no exception": not server_faults(work)}
    for name, holds in checks.items():
        print("ok    " if holds else "FAILED", name)
    print(json.dumps(figures, indent=1, ensure_ascii=False))
    if work.json is not None:
        facts = provenance(client=client, client_version=version)
        found = {
            "provenance": facts,
            "checks": checks,
            "figures": figures,
            "server_faults": server_faults(work),
        }
        work.json.write_text(
            json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
    return sum(not holds for holds in checks.values())
