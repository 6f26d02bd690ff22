"""aiperf: streamed chats with a target of time per token, and goodput by that target.

python benchmarks/clients/run_aiperf.py FOLDER --json aiperf.json
"""

from __future__ import annotations

import json
import shutil
import sys
from typing import Any

from common import MODEL, Client, parse, report, save_pair, server

METRICS = (
    "request_count", "good_request_count", "goodput", "error_request_count", "request_throughput",
    "output_token_throughput", "output_sequence_length", "time_to_first_token", "inter_token_latency",
    "request_latency",
)  # fmt: skip
STATISTICS = ("unit", "avg", "min", "p50", "p99", "max")


def main() -> int:
    work = parse(__doc__, requests=16, concurrency=2, input_tokens=16, output_tokens=24, slo_tpot=0.2)
    given = work.options
    client = Client(work, "aiperf")
    target, output = save_pair(work), work.folder / "aiperf"
    shutil.rmtree(output, ignore_errors=True)
    with server(work) as url:
        status = client.run(
            "aiperf", "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming",
            "--tokenizer", target, "--isl", given.input_tokens, "--osl", given.output_tokens,
            "--request-count", given.requests, "--concurrency", given.concurrency,
            "--extra-inputs", f"slo_tpot:{given.slo_tpot}",
            "--goodput", f"inter_token_latency:{1e3 * given.slo_tpot:g}",
            "--output-artifact-dir", output, "--random-seed", "0", "--ui-type", "none",
            log="aiperf", timeout_s=600,
        )  # fmt: skip
    files = sorted(output.rglob("profile_export_aiperf.json"))
    found: dict[str, Any] = json.loads(files[0].read_text()) if files else {}
    figures = {name: _chosen(found[name]) for name in METRICS if name in found}
    answered = figures.get("request_count", {}).get("avg", 0)
    checks = {
        "aiperf ended with status 0": status == 0,
        "all requests were answered": answered == given.requests and not found.get("error_summary"),
        "goodput was counted": "goodput" in figures,
    }
    setting = {name: value for name, value in vars(given).items() if name not in ("folder", "json")}
    speculation = {name: _chosen(value) for name, value in found.items() if "specul" in name or "accept" in name}
    return report(
        work, "aiperf", client.version(), checks, setting=setting, metrics=figures, speculation=speculation,
        errors=found.get("error_summary") or [],
    )  # fmt: skip


def _chosen(metric: Any) -> Any:
    return {key: metric[key] for key in STATISTICS if key in metric} if isinstance(metric, dict) else metric


if __name__ == "__main__":
    sys.exit(main())
