"""Figures and tables of recorded calls."""

from __future__ import annotations

import statistics
from typing import Any

from contestants import OURS_BF16, OURS_FP32, STOCK

Record = dict[str, Any]  # group, batch, repeat, name; and seconds, equal_rows, different_at; or error


def different_at(reference: list[list[int]], tokens: list[list[int]]) -> list[int | None]:
    """Return for every row the first position at which the tokens differ, or None where they are equal."""
    found: list[int | None] = []
    for expected, row in zip(reference, tokens, strict=True):
        unequal = [i for i, (a, b) in enumerate(zip(expected, row, strict=False)) if a != b]
        shorter = None if len(expected) == len(row) else min(len(expected), len(row))
        found.append(unequal[0] if unequal else shorter)
    return found


def summarize(records: list[Record], new_tokens: int) -> list[Record]:
    """Return one row per group, batch and contestant: median speed, and medians of the ratios within a repeat.

    Ratios above 1 mean: faster than stock ``generate`` in fp32, and hf_slospec is faster than this contestant.
    """
    seconds = {(r["group"], r["batch"], r["repeat"], r["name"]): r["seconds"] for r in records if "seconds" in r}
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
        row["tokens_per_s_per_repeat"] = [round(batch * new_tokens / r["seconds"], 2) for r in timed]
        row["tokens_per_s"] = round(statistics.median(row["tokens_per_s_per_repeat"]), 2)
        for key, reference in (("vs_stock", STOCK), ("ours_fp32_vs_it", OURS_FP32), ("ours_bf16_vs_it", OURS_BF16)):
            pairs = [(seconds.get((group, batch, r["repeat"], reference)), r["seconds"]) for r in timed]
            ratios = [theirs / its if key == "vs_stock" else its / theirs for theirs, its in pairs if theirs]
            row[f"{key}_per_repeat"] = [round(ratio, 3) for ratio in ratios]
            row[key] = round(statistics.median(ratios), 2) if ratios else None
        compared = [at for r in timed for at in r["different_at"]]
        row["rows_equal"] = f"{compared.count(None)}/{len(compared)}"
    return rows


def table(rows: list[Record], workers: dict[str, dict[str, Record]]) -> str:
    """Return the rows as a Markdown table; ``workers`` has the load time and memory by group and contestant."""
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
