"""The tests marked ``gpu``, in a process of their own."""

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

import hf_slospec

ROOT = Path(hf_slospec.__file__).parent.parent
# `file::name OUTCOME (reason) [ 12%]`; a name may hold blanks and words like these
OUTCOME = re.compile(
    r"^(\S+::.*) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)(?: \(.*\))?(?: +\[ *\d+%\])?$", re.MULTILINE
)
SHOWN = 40  # lines of a failing run's output that are kept


def gpu_tests(limit_s: float, root: Path = ROOT) -> dict[str, Any]:
    """Run them for so long at most; what has run by then is counted."""
    files = sorted((root / "tests" / "gpu").glob("test_*.py"))
    if not files:
        return {"status": "not present", "reason": "tests are not installed; run this from a clone of the repository"}
    if missing := [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]:
        return {"status": "not present", "reason": f"{', '.join(missing)} missing; pip install --group dev"}
    names = [str(path.relative_to(root)) for path in files]
    # What CUDA's Python packages warn of while they are imported is not ours: -W comes after pyproject.toml's errors.
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-W", "default", "-p", "no:cacheprovider", *names]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        run = subprocess.Popen(command, cwd=root, env=environment, stdout=output, stderr=subprocess.STDOUT)
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
        record["reason"] = f"{limit_s:.0f} s were over"
    elif not has_run and not failed:
        record["reason"] = "none of them ran"
    if status == "failed":
        record["output"] = text.splitlines()[-SHOWN:]
    return record
