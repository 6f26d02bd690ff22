"""A check's results for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from hf_slospec.gpu_check.floor import GOAL


def tables(results: dict[str, Any]) -> Iterator[Table | str]:
    """All of it, in order."""
    yield _facts(results["environment"])
    tests = results["tests"]
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tests.get("counts", {}).items())
    yield f"gpu tests: {tests['status']}" + "".join(f"; {escape(x)}" for x in (counts, tests.get("reason")) if x)
    yield _identity(results["identity"])
    yield _speed(results["speed"])
    yield _floor(results["floor"], results["copy_gb_per_s"])


def _facts(environment: dict[str, Any]) -> Table:
    table = Table("fact", "value", title="Environment")
    for name, value in environment.items():
        table.add_row(name, escape(str(value)))
    return table


def _identity(records: list[dict[str, Any]]) -> Table:
    table = Table(title="Against stock's output")
    for heading in ("dtype", "method", "must be", "outcome", "tokens", "apart", "near-ties"):
        table.add_column(heading)
    for r in records:
        figures = [str(r.get(key, "")) for key in ("tokens", "divergences", "near_ties")]
        table.add_row(r["dtype"], r["name"], r["rule"], _outcome(r), *figures)
    return table


def _speed(cells: list[dict[str, Any]]) -> Table:
    table = Table(title="Speed against stock generate, same batch, same repeat (medians)")
    for heading in ("target", "batch", "method", "attention"):
        table.add_column(heading)
    for heading in ("speed-up", "tokens/s", "ms/token", "accept", "equal", "GiB"):
        table.add_column(heading, justify="right")
    for cell in cells:
        place = cell["size"], str(cell["batch"])
        if cell["status"] != "measured":
            table.add_row(*place, _outcome(cell))
        for r in cell.get("contestants", ()):
            if r["status"] != "measured":
                table.add_row(*place, r["name"], _outcome(r))
                continue
            table.add_row(
                *place, r["name"], r.get("attention", ""), _figure(r["speedup_vs_generate"], ".2f", "x"),
                _figure(r["tokens_per_s"], ".1f"), _figure(r["ms_per_token_and_row"], ".2f"),
                _figure(r["acceptance_length"], ".2f"), r["rows_equal_to_generate"] or "",
                _figure(r.get("peak_gib"), ".2f"),
            )  # fmt: skip
    return table


def _floor(rows: list[dict[str, Any]], gb_per_s: float) -> Table:
    table = Table(title=f"A verify step against its floor: bytes at the {gb_per_s} GB/s of a copy here")
    for heading in ("target", "batch", "tokens", "weights GB", "K/V GB", "floor ms", "forward ms", "ratio", "phase ms"):
        table.add_column(heading, justify="right")
    for r in rows:
        if "floor_ms" not in r:
            table.add_row(r["size"], str(r["batch"]), _outcome(r))
            continue
        table.add_row(
            r["size"], str(r["batch"]), str(r["tokens"]), f"{r['weight_gb']:.3f}", f"{r['kv_gb']:.3f}",
            f"{r['floor_ms']:.3f}", f"{r['forward_ms']:.3f}", f"{r['forward_over_floor']:.2f}x",
            _figure(r["verify_ms"], ".3f"),
        )  # fmt: skip
    table.caption = f"forward: alone; phase: a whole verify phase of ours. Goal of the ratio at batch 1: {GOAL}x"
    return table


def _outcome(record: dict[str, Any]) -> str:
    status, reason = record["status"], record.get("reason")
    return escape(status if reason is None else f"{status}: {reason.splitlines()[0]}")


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
