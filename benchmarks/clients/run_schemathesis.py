"""schemathesis: requests made up from the server's OpenAPI description, none of which may end in a
status of 5xx.

python benchmarks/clients/run_schemathesis.py FOLDER --json schemathesis.json
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

from common import Client, parse, report, server

CHECK = "not_a_server_error"
SHOWN = 10  # faults in the result
SHOWN_CHARACTERS = 600  # per body


def main() -> int:
    work = parse(__doc__, examples=40, seed=0, request_timeout=60, run_timeout=900)
    given = work.options
    client = Client(work, "schemathesis")
    log = work.folder / "schemathesis.har"
    log.unlink(missing_ok=True)
    with server(work) as url:
        status = client.run(
            "schemathesis", "--no-color", "run", f"{url}/openapi.json", "--checks", CHECK,
            "--max-examples", given.examples, "--seed", given.seed, "--request-timeout", given.request_timeout,
            "--generation-database", "none", "--continue-on-failure", "--report", "har", "--report-har-path", log,
            log="schemathesis", timeout_s=given.run_timeout,
        )  # fmt: skip
    entries: list[dict[str, Any]] = (
        json.loads(log.read_text())["log"]["entries"] if log.exists() else []
    )
    statuses = Counter(entry["response"]["status"] for entry in entries)
    faults = [entry for entry in entries if entry["response"]["status"] >= 500]
    unanswered = [entry for entry in entries if entry["response"]["status"] <= 0]
    checks = {
        f"schemathesis ended with status 0, no {CHECK} failed": status == 0,
        "requests were made": bool(entries),
        "no status is 5xx": not faults,
        f"all were answered within {given.request_timeout} s": not unanswered,
    }
    by_path = Counter(f"{entry['request']['method']} {_path(entry, url)}" for entry in entries)
    return report(
        work, "schemathesis", client.version(), checks, exit_status=status, cases=len(entries),
        statuses={str(number): count for number, count in sorted(statuses.items())},
        cases_by_path=dict(by_path.most_common(12)),
        faults=[_described(entry, url) for entry in [*faults, *unanswered][:SHOWN]],
    )  # fmt: skip


def _path(entry: dict[str, Any], url: str) -> str:
    path: str = entry["request"]["url"].removeprefix(url).split("?")[0]
    return "/v1/models/NAME" if path.startswith("/v1/models/") else path


def _described(entry: dict[str, Any], url: str) -> dict[str, Any]:
    request = entry["request"]
    response = entry["response"]
    return {
        "request": f"{request['method']} {_path(entry, url)}",
        "body": str(request.get("postData", {}).get("text", ""))[:SHOWN_CHARACTERS],
        "status": response["status"],
        "answer": str(response["content"].get("text", ""))[:SHOWN_CHARACTERS],
    }


if __name__ == "__main__":
    sys.exit(main())
