"""The tests marked ``gpu``, in a separate process."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# `file::name OUTCOME (reason) [ 12%]`; a name may contain spaces and these words
OUTCOME = re.compile(
    r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(.*\))?(?: +\[ *\d+%\])?$",
    re.MULTILINE,
)
MAX_LINES = 40  # from the end of a failing run's output


def gpu_tests(limit_s: float, root: Path = ROOT) -> dict[str, Any]:
    """Run the tests for at most ``limit_s`` seconds; tests that finished by then are counted."""
    files = sorted((root / "tests" / "gpu").glob("test_*.py"))
    if missing := [
        name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None
    ]:
        return {
            "status": "not present",
            "reason": f"{', '.join(missing)} not installed; run pip install --group dev",
        }
    names = [str(path.relative_to(root)) for path in files]
    # CUDA's Python packages warn on import; -W default overrides the filter of pyproject.toml that
    # makes them errors.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-v",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        *names,
    ]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(root), os.environ.get("PYTHONPATH")))
    )
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        run = subprocess.Popen(
            command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code: int | None = run.wait(max(limit_s, 0.0))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if run.poll() is None:
                run.kill()
                run.wait()
        output.seek(0)
        text = output.read()
    outcomes = dict(OUTCOME.findall(text))
    failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    has_run = "PASSED" in outcomes.values()
    is_wrong = failed or code not in (0, None) or (code == 0 and not has_run)
    status = "failed" if is_wrong else "cut off" if code is None else "passed"
    record = {
        "status": status,
        "counts": dict(Counter(outcome.lower() for outcome in outcomes.values())),
        "failed": failed,
    }
    if code is None:
        record["reason"] = f"time limit of {limit_s:.0f} s reached"
    elif not has_run and not failed:
        record["reason"] = "no test was run"
    if status == "failed":
        record["output"] = text.splitlines()[-MAX_LINES:]
    return record
