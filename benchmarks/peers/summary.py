"""Figures and tables of recorded calls."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.peers.contestants import OURS_BF16, OURS_FP32, STOCK, STOCK_BF16
from benchmarks.spec_bench import speedups

Record = dict[
    str, Any
]  # group, batch, task, question, name; and seconds, tokens, different_at; or error

OVERALL = "overall"  # the task of the rows of all tasks


def different_at(reference: list[list[int]], tokens: list[list[int]]) -> list[int | None]:
    """Return for every row the first position at which the tokens differ, or None where they are
    equal.
    """
    found: list[int | None] = []
    for expected, row in zip(reference, tokens, strict=True):
        unequal = [i for i, (a, b) in enumerate(zip(expected, row, strict=False)) if a != b]
        shorter = None if len(expected) == len(row) else min(len(expected), len(row))
        found.append(unequal[0] if unequal else shorter)
    return found


def summarize(records: list[Record], new_tokens: int) -> list[Record]:
    """Return one row per group, batch and contestant: median speed, and medians of the ratios
    within a repeat.

    Ratios above 1 mean: faster than stock ``generate`` in fp32, and hf_slospec is faster than this
    contestant.
    """
    seconds = {
        (r["group"], r["batch"], r["question"], r["name"]): r["seconds"]
        for r in records
        if "seconds" in r
    }
    rows = []
    for group, batch, name in dict.fromkeys((r["group"], r["batch"], r["name"]) for r in records):
        own = [r for r in records if (r["group"], r["batch"], r["name"]) == (group, batch, name)]
        timed = [r for r in own if "seconds" in r]
        row: Record = {"group": group, "batch": batch, "name": name}
        rows.append(row)
        if errors := [r["error"] for r in own if "error" in r]:
            row["error"] = errors[-1]
        if not timed:
            continue
        row["tokens_per_s_per_repeat"] = [
            round(batch * new_tokens / r["seconds"], 2) for r in timed
        ]
        row["tokens_per_s"] = round(statistics.median(row["tokens_per_s_per_repeat"]), 2)
        for key, reference in (
            ("vs_stock", STOCK),
            ("ours_fp32_vs_it", OURS_FP32),
            ("ours_bf16_vs_it", OURS_BF16),
        ):
            pairs = [
                (seconds.get((group, batch, r["question"], reference)), r["seconds"]) for r in timed
            ]
            ratios = [
                theirs / its if key == "vs_stock" else its / theirs
                for theirs, its in pairs
                if theirs
            ]
            row[f"{key}_per_repeat"] = [round(ratio, 3) for ratio in ratios]
            row[key] = round(statistics.median(ratios), 2) if ratios else None
        row["rows_equal"] = rows_equal(timed)
    return rows


def rows_equal(records: list[Record]) -> str:
    """Return how many rows have the tokens of stock ``generate`` in fp32, and the number of rows."""
    compared = [at for r in records for at in r["different_at"]]
    return f"{compared.count(None)}/{len(compared)}"


def summarize_tasks(records: list[Record]) -> list[Record]:
    """Return one row per group, batch, task and contestant: speed over stock ``generate`` in bf16.

    A contestant that has failed has its error in the row of all tasks.
    """
    rows = []
    for group in dict.fromkeys(r["group"] for r in records):
        own = [r for r in records if r["group"] == group]
        timed = [r | {"temperature": 0.0, "method": r["name"]} for r in own if "seconds" in r]
        found = {
            (row["batch"], row["method"], row["task"]): row for row in speedups(timed, STOCK_BF16)
        }
        for batch, name in dict.fromkeys((r["batch"], r["name"]) for r in own):
            errors = [
                r["error"] for r in own if "error" in r and (r["batch"], r["name"]) == (batch, name)
            ]
            for task in [*dict.fromkeys(r["task"] for r in own), OVERALL]:
                speed = found.get((batch, name, task), {})
                row = {"group": group, "batch": batch, "name": name, "task": task}
                row |= {
                    key: speed[key]
                    for key in ("questions", "speedup", "interval", "tokens_per_s")
                    if key in speed
                }
                compared = [
                    r
                    for r in timed
                    if (r["batch"], r["name"]) == (batch, name) and task in (r["task"], OVERALL)
                ]
                row |= {"rows_equal": rows_equal(compared)} if compared else {}
                row |= {"error": errors[-1]} if errors and task == OVERALL else {}
                rows += [row] if speed or "error" in row else []
    return rows


def task_table(rows: list[Record], workers: dict[str, dict[str, Record]]) -> str:
    """Return the rows of ``summarize_tasks`` as a Markdown table; ``workers`` is that of ``table``."""
    tasks = [task for task in dict.fromkeys(row["task"] for row in rows) if task != OVERALL]
    lines = [
        ["group", "batch", "contestant", *tasks, "overall (95 %)", "rows equal", "load s", "RSS GB"]
    ]
    lines.append(["---"] * len(lines[0]))
    for group, batch, name in dict.fromkeys(
        (row["group"], row["batch"], row["name"]) for row in rows
    ):
        own = {
            r["task"]: r
            for r in rows
            if (r["group"], r["batch"], r["name"]) == (group, batch, name)
        }
        facts = workers.get(group, {}).get(name, {})
        overall = own[OVERALL]
        cell = f"failed: {overall['error']}" if "error" in overall else ""
        if "speedup" in overall:
            low, high = overall["interval"]
            cell = f"{overall['speedup']:.2f} ({low:.2f}-{high:.2f}) {cell}".strip()
        cells = [
            group,
            str(batch),
            name,
            *(f"{own[t]['speedup']:.2f}" if t in own else "" for t in tasks),
            cell,
        ]
        lines.append([*cells, *(str(one.get(key, "")) for one, key in (
            (overall, "rows_equal"), (facts, "load_s"), (facts, "rss_gb")
        ))])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(rows: list[Record], workers: dict[str, dict[str, Record]]) -> str:
    """Return the rows as a Markdown table; ``workers`` has the load time and memory by group and
    contestant.
    """
    header = "group|batch|contestant|tokens/s|x stock fp32|ours fp32 / it|ours bf16 / it|rows equal|load s|RSS GB"
    lines = [f"| {header.replace('|', ' | ')} |", "|---" * (header.count("|") + 1) + "|"]
    for row in rows:
        facts = workers.get(row["group"], {}).get(row["name"], {})
        keys = ("tokens_per_s", "vs_stock", "ours_fp32_vs_it", "ours_bf16_vs_it", "rows_equal")
        cells = [row["group"], row["batch"], row["name"], *(row.get(key) for key in keys)]
        cells += [facts.get("load_s"), facts.get("rss_gb")]
        if "error" in row:
            cells[3:4] = [f"{row.get('tokens_per_s', '')} failed: {row['error']}".strip()]
        lines.append("| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |")
    return "\n".join(lines)
