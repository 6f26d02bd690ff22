"""Results of an earlier run that a check goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_slospec.errors import InvalidInputError

STARTED = "started"  # written before a method begins, so that one that ended the process is known
RETRIED = {"skipped", "timed out", "cut off"}
MAY_DIFFER = {"date", "budget_s", "runs_tests", "profiles"}  # from one run to the next


def is_done(record: dict[str, Any]) -> bool:
    """Return whether a record need not be measured again."""
    return record["status"] not in RETRIED


def earlier_results(path: Path, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the results in a file; methods during which the process ended are marked as hung.

    Args:
        facts: provenance of this run, which must be that of the file.

    Raises:
        InvalidInputError: the file cannot be read, or is of another machine, version or plan.
    """
    try:
        written = json.loads(path.read_text())
        before = written["provenance"]
        results = written["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInputError(
            f"--resume: {path} holds no results ({error!r}); leave out --resume"
        ) from error
    now = json.loads(json.dumps(facts))
    differing = [
        name for name in sorted({*before, *now} - MAY_DIFFER) if before.get(name) != now.get(name)
    ]
    if differing:
        changes = "; ".join(
            f"{name}: {before.get(name)!r}, now {now.get(name)!r}" for name in differing
        )
        raise InvalidInputError(
            f"--resume: {path} is of another machine, version or plan ({changes}); leave out --resume or name another "
            "file with --json"
        )
    for cell in results.get("speed", ()):
        for record in cell["contestants"]:
            if record["status"] == STARTED:
                record |= {
                    "status": "hung",
                    "reason": "the process ended while it ran; it is not run again",
                }
    found: dict[str, Any] = results
    return found
