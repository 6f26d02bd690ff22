"""guidellm: concurrent streams of synthetic text with a target of time per token.

python benchmarks/clients/run_guidellm.py FOLDER --json guidellm.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from common import MODEL, Client, parse, report, save_pair, server

METRICS = (
    "requests_per_second", "request_concurrency", "request_latency", "prompt_token_count", "output_token_count",
    "time_to_first_token_ms", "time_per_output_token_ms", "inter_token_latency_ms", "output_tokens_per_second",
)  # fmt: skip
STATISTICS = ("mean", "median", "min", "max", "count")


def main() -> int:
    work = parse(__doc__, requests=16, streams=2, prompt_tokens=16, output_tokens=24, slo_tpot=0.2)
    given = work.options
    client = Client(work, "guidellm")
    target = save_pair(work)
    output = work.folder / "guidellm.json"
    output.unlink(missing_ok=True)
    with server(work) as url:
        backend = {
            "kind": "openai_http", "target": url, "model": MODEL, "extras": {"body": {"slo_tpot": given.slo_tpot}},
        }  # fmt: skip
        status = client.run(
            "guidellm", "run", "--backend", json.dumps(backend),
            "--profile", f"kind=concurrent,streams={given.streams}",
            "--constraint", f"kind=max_requests,count={given.requests}", "--tokenizer", f"kind=hf_auto,model={target}",
            "--data", f"kind=synthetic_text,prompt_tokens={given.prompt_tokens},output_tokens={given.output_tokens}",
            "--output", f"kind=json,path={output}", "--disable-console-interactive",
            log="guidellm", timeout_s=600,
        )  # fmt: skip
    found: dict[str, Any] = (
        json.loads(output.read_text()) if output.exists() else {"benchmarks": []}
    )
    metrics = found["benchmarks"][0]["metrics"] if found["benchmarks"] else {}
    totals = metrics.get("request_totals", {})
    checks = {
        "guidellm ended with status 0": status == 0,
        "all requests were answered": totals.get("successful") == given.requests
        and not totals.get("errored"),
    }
    setting = {name: value for name, value in vars(given).items() if name not in ("folder", "json")}
    figures = {name: _chosen(metrics[name]) for name in METRICS if name in metrics}
    return report(
        work,
        "guidellm",
        client.version(),
        checks,
        setting=setting,
        requests=totals,
        metrics=figures,
    )


def _chosen(metric: dict[str, Any]) -> dict[str, Any]:
    own = metric.get("successful") or {}
    return {key: own[key] for key in STATISTICS if key in own}


if __name__ == "__main__":
    sys.exit(main())
