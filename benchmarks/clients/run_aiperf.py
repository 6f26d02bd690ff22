"""aiperf: streamed chats with a TPOT SLO, goodput by that SLO, and aiperf's own table of
speculation.

    python benchmarks/clients/run_aiperf.py FOLDER --json aiperf.json

``--target`` is the folder of a checkpoint with a chat template; without it, the embedded pair is
served."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from common import CHAT_TEMPLATE, MODEL, Client, parse, report, save_pair, server

METRICS = (
    "request_count", "good_request_count", "goodput", "error_request_count", "request_throughput",
    "output_token_throughput", "output_sequence_length", "time_to_first_token", "inter_token_latency",
    "request_latency",
)  # fmt: skip
STATISTICS = ("unit", "avg", "min", "p50", "p99", "max")


def main() -> int:
    work = parse(
        __doc__,
        target="",
        requests=16,
        concurrency=2,
        input_tokens=16,
        output_tokens=24,
        slo_tpot=0.2,
    )
    given = work.options
    client = Client(work, "aiperf")
    output = work.folder / "aiperf"
    shutil.rmtree(output, ignore_errors=True)
    if given.target:
        target = Path(given.target).resolve()
        model = Path(given.target).resolve().name
        options = ["--target", str(target)]
        template = (target / "chat_template.jinja").read_text()
    else:
        target = save_pair(work)
        model = MODEL
        options = []
        template = CHAT_TEMPLATE
    with server(work, *options, chat_template=template) as url:
        status = client.run(
            "aiperf", "profile", "--model", model, "--url", url, "--endpoint-type", "chat", "--streaming",
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
    table = _table(work.log("aiperf").read_text())
    answered = figures.get("request_count", {}).get("avg", 0)
    checks = {
        "aiperf ended with status 0": status == 0,
        "all requests were answered": answered == given.requests and not found.get("error_summary"),
        "goodput was counted": "goodput" in figures,
        "the table of speculation was printed": any("Acceptance Length" in line for line in table),
    }
    setting = {name: value for name, value in vars(given).items() if name not in ("folder", "json")}
    speculation = {
        name: _chosen(value)
        for name, value in found.items()
        if "spec_decode" in name or "accept" in name
    }
    return report(
        work, "aiperf", client.version(), checks, setting=setting, metrics=figures, speculation=speculation,
        table=table, errors=found.get("error_summary") or [],
    )  # fmt: skip


def _table(printed: str) -> list[str]:
    """Return the lines of aiperf's table of speculation in what it printed; none if it printed no
    such table.
    """
    lines = iter(printed.splitlines())
    for line in lines:
        if "Spec Decode" in line:
            return [line.strip(), *itertools.takewhile(str.strip, lines)]
    return []


def _chosen(metric: Any) -> Any:
    return (
        {key: metric[key] for key in STATISTICS if key in metric}
        if isinstance(metric, dict)
        else metric
    )


if __name__ == "__main__":
    sys.exit(main())
