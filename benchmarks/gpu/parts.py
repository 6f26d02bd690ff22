"""The parts of a whole run on a GPU, in the order of their value, each a command with a time limit.

Each part writes its own JSON as it measures. ``parts.json`` beside them has how each ended, by the
version of the code: what is finished is not run again, what was cut off goes on.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.budget import Budget
from benchmarks.gpu.comparison import NO_TIME
from hf_slospec.cli.benchmark import OURS, PLAIN

ROOT = Path(__file__).parents[2]
TOTAL_S = 640.0
MIN_LEFT_S = 20.0  # no part begins with less
OWN_SHARE = 0.85  # share of its limit in which a part begins new measurements
MAX_LINES = 30  # lines of a failed part's output that are kept
HEAD_METHODS = (
    PLAIN, OURS, *(f"{OURS}, {name}" for name in (
        "no drafts", "chain of 2", "chain of 4", "chain of 8", "chain of 16", "tree of 8", "tree of 16",
    )),
)  # fmt: skip
# Statuses; those of RETRIED are run again, in this order, after parts that never ran.
FINISHED, FAILED, CUT_OFF, SKIPPED, ABSENT = (
    "finished",
    "failed",
    "cut off",
    "skipped",
    "not present",
)
RETRIED = (SKIPPED, CUT_OFF, ABSENT, FAILED)


@dataclass(frozen=True)
class Part:
    """A part of the run: a module's command, which writes JSON to the file of ``--json``."""

    name: str
    what: str
    limit_s: float
    module: str
    options: tuple[str, ...]
    tiny: tuple[str, ...]  # options of a dry run on a CPU, in place of those
    package: str | None = None  # that the part needs
    resumes: str | None = None  # option with which the command goes on from its file
    seconds: tuple[str, float] | None = None  # option for its time limit, and seconds per unit
    exits: tuple[int, ...] = (0,)  # codes with which it has finished, right or wrong


def _check(*options: str, tiny: tuple[str, ...] = (), **others: Any) -> dict[str, Any]:
    small = ("check", "--shapes", "tiny", "--identity-shape", "tiny", "--prompt-tokens", "8")
    small += ("--new-tokens", "4", "--repeats", "1", "--batches", "2", "--device", "cpu")
    return {
        "module": "benchmarks.gpu",
        "options": ("check", *options),
        "tiny": (*small, "--skip-tests", *tiny),
        "resumes": "--resume",
        "seconds": ("--budget-s", 1.0),
        "exits": (0, 1),
        **others,
    }


def _methods(names: Sequence[str]) -> tuple[str, str]:
    return "--methods", ";".join(names)


SOME = _methods((PLAIN, f"{OURS}, chain of 2"))
QUANTISED = _methods((PLAIN, OURS, f"{OURS}, no drafts"))
COMPILED = _methods((PLAIN, OURS, "generate, static cache, compiled", f"{OURS}, no drafts"))
PARTS = (
    Part(
        "head", "an EAGLE-3 head of the shape for 8B: chains, trees, auto and no drafts", 170.0,
        **_check(
            "--drafter", "eagle3", "--batches", "1,8,16,64", "--repeats", "3", "--skip-tests", "--profile",
            *_methods(HEAD_METHODS), tiny=("--drafter", "eagle3", *SOME),
        ),
    ),
    Part(
        "load", "a load of AdaServe's classes with TPOT SLOs at four rates, 200 requests each", 150.0,
        "benchmarks.serving",
        ("load", "--size", "8B", "--drafter", "eagle3", "--device", "cuda", "--adaserve", "--number", "200",
         "--pressures", "1,2,4,6", "--kinds", "poisson", "--repeats", "1",
         "--systems", "auto,plain,fixed-2,fixed-4,adaserve,vllm-adaptive"),
        ("load", "--size", "tiny", "--drafter", "eagle3", "--device", "cpu", "--adaserve", "--number", "3",
         "--pressures", "1", "--kinds", "poisson", "--repeats", "1", "--systems", "auto,plain"),
        seconds=("--minutes", 60.0),
    ),
    Part(
        "compiled", "compiled stock at batch 8 and 64 beside the head", 110.0,
        **_check(
            "--drafter", "eagle3", "--batches", "8,64", "--repeats", "3", "--skip-tests", *COMPILED,
            tiny=("--drafter", "eagle3", *SOME),
        ),
    ),
    Part(
        "tests", "the tests that need a GPU", 100.0, "benchmarks.gpu", ("tests",), ("tests",),
        seconds=("--budget-s", 1.0), exits=(0, 1),
    ),
    Part(
        "repeatable", 'outputs of exact="self" that differ, and its speed', 80.0, "benchmarks.gpu.repeatable",
        (), ("--size", "tiny", "--device", "cpu", "--number", "1", "--new-tokens", "3"),
        seconds=("--minutes", 60.0), exits=(0, 1),
    ),
    Part(
        "attention", "kernels of Triton, FlashAttention's packages and torch against the reference", 40.0,
        "benchmarks.gpu.attention", (), ("--device", "cpu", "--keys", "8"), exits=(0, 1),
    ),
    Part(
        "quantised", "8B shapes with int4 and float8 weights in graphs", 70.0,
        **_check(
            "--shapes", "8B-int4,8B-fp8", "--batches", "1,8", "--repeats", "3", "--skip-tests", *QUANTISED,
            tiny=("--shapes", "tiny-fp8", *SOME), package="torchao",
        ),
    ),
    Part(
        "draft", "a draft model of the shape of Llama-3.2-1B", 60.0,
        **_check(
            "--batches", "8,64", "--repeats", "3", "--skip-tests", "--profile", *QUANTISED, tiny=SOME,
        ),
    ),
)  # fmt: skip


def version() -> str:
    """Return the commit of the code that runs, or a digest of its sources where there is none, or
    where files were changed.
    """
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        git = ["git", "-C", str(ROOT)]
        changed = subprocess.check_output([*git, "status", "--porcelain", "-uno"], text=True)
        if not changed.strip():
            return subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    digest = hashlib.sha256()
    for folder in ("hf_slospec", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return f"sources {digest.hexdigest()[:16]}"


class Run:
    """A whole run, which keeps how its parts ended in ``parts.json``."""

    def __init__(self, folder: Path, is_dry: bool, code: str, report: Callable[[str], None]):
        self.folder = folder
        self.is_dry = is_dry
        self.report = report
        self._path = folder / "parts.json"
        folder.mkdir(parents=True, exist_ok=True)
        before = json.loads(self._path.read_text()) if self._path.exists() else {}
        self._key = {"code": code, "dry": is_dry}
        is_same = before.get("run") == self._key
        self.parts: dict[str, Any] = before["parts"] if is_same else {}

    def run(self, parts: Sequence[Part], total_s: float) -> dict[str, Any]:
        """Run the parts that are not finished; return how all ended, by name."""
        budget = Budget(total_s)
        status = {name: record["status"] for name, record in self.parts.items()}
        waiting = [part for part in parts if status.get(part.name) != FINISHED]
        waiting.sort(  # stable: in the order of their value otherwise
            key=lambda part: (SKIPPED, *RETRIED).index(status.get(part.name, SKIPPED))
        )
        for part in waiting:
            begun_s = budget.spent_s
            record = self._why_not(part, budget) or self._run(
                part, min(part.limit_s, budget.left_s)
            )
            record["seconds"] = round(budget.spent_s - begun_s, 1)
            self.parts[part.name] = {"what": part.what, **record}
            content = {"run": self._key, "parts": self.parts}
            self._path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
            self.report(f"{part.name}: {record['status']} after {record['seconds']:.0f} s")
        return self.parts

    def _why_not(self, part: Part, budget: Budget) -> dict[str, Any] | None:
        if budget.left_s < MIN_LEFT_S:
            return {"status": SKIPPED, "reason": "no time was left"}
        if part.package is not None and importlib.util.find_spec(part.package) is None:
            return {"status": ABSENT, "reason": f"it needs pip install {part.package}"}
        return None

    def command(self, part: Part, limit_s: float) -> list[str]:
        """Return a part's module and options for this run."""
        path = self.folder / f"{part.name}.json"
        command = [part.module, *(part.tiny if self.is_dry else part.options), "--json", str(path)]
        if part.seconds is not None:
            option, unit_s = part.seconds
            command += [option, f"{OWN_SHARE * limit_s / unit_s:.3f}"]
        goes_on = self.parts.get(part.name, {}).get("status") == CUT_OFF and path.exists()
        if not goes_on:
            path.unlink(missing_ok=True)
        elif part.resumes is not None:
            command.append(part.resumes)
        return command

    def _run(self, part: Part, limit_s: float) -> dict[str, Any]:
        command = self.command(part, limit_s)
        self.report(f"{part.name}: {part.what}; at most {limit_s:.0f} s")
        record: dict[str, Any] = {"command": " ".join(["python -m", *command])}
        code, text = (_inside if self.is_dry else _beside)(command, limit_s)
        has_raised = code == 1 and "Traceback (most recent call last)" in text
        if code is not None and (code not in part.exits or has_raised):
            lines = text.splitlines()[-MAX_LINES:]
            return record | {"status": FAILED, "reason": f"exit code {code}", "output": lines}
        path = self.folder / f"{part.name}.json"
        if code is None or not path.exists() or lacks_some(json.loads(path.read_text())):
            return record | {"status": CUT_OFF, "reason": f"time limit of {limit_s:.0f} s"}
        return record | {"status": FINISHED, "exit_code": code}


def lacks_some(content: Any) -> bool:
    """Return whether a part's JSON says that something was not measured for lack of time."""
    if isinstance(content, list):
        return any(map(lacks_some, content))
    if not isinstance(content, dict):
        return False
    status = content.get("status")
    is_late = status in ("timed out", "cut off", "started") or content.get("turns_left", 0)
    no_time = status == "skipped" and content.get("reason") == NO_TIME["reason"]
    return bool(is_late or no_time) or any(map(lacks_some, content.values()))


def _beside(command: Sequence[str], limit_s: float) -> tuple[int | None, str]:
    """Run a module in a process of its own; return exit code (None: it was ended) and output."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    }
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=Path.cwd(), env=environment, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        code: int | None = None
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:  # with the processes that it started
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return code, output.read()


def _inside(command: Sequence[str], _: float) -> tuple[int | None, str]:
    """Run a module in this process."""
    module, *options = command
    before = sys.argv
    sys.argv = [module, *options]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
            runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        code = end.code
        return (code, "") if isinstance(code, int) else (int(code is not None), str(code))
    except Exception:  # noqa: BLE001  recorded, as that of another process is
        return 1, traceback.format_exc()
    finally:
        sys.argv = before
    return 0, ""
