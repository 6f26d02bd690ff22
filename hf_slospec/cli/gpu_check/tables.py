"""Results of a check as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from hf_slospec.cli.gpu_check.floor import GOAL

MAX_FAILED = 20  # names of failed tests; the JSON has all


def tables(results: dict[str, Any]) -> Iterator[Table | Text]:
    """Yield all results in order; each table is followed by what was not measured, with the reason."""
    environment, tests, speed, floors = (results[name] for name in ("environment", "tests", "speed", "floor"))
    yield Text("\n".join(f"{name}: {value}" for name, value in environment.items()))
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tests.get("counts", {}).items())
    yield Text("; ".join(filter(None, (f"gpu tests: {tests['status']}", counts, tests.get("reason")))))
    yield from (Text(f"failed: {name}") for name in tests.get("failed", ())[:MAX_FAILED])
    yield _identity([r for r in results["identity"] if "tokens" in r])
    yield from (Text(f"{r['dtype']}, {r['name']}: {_why(r)}") for r in results["identity"] if "tokens" not in r)
    yield _speed(
        [(cell["size"], r) for cell in speed for r in cell.get("contestants", ()) if r["status"] == "measured"]
    )
    reasons: dict[str, list[str]] = {}  # reason -> sizes and batch sizes
    for cell in speed:
        for r in (cell, *cell.get("contestants", ())):
            if r["status"] != "measured":
                what = f"{r['name']}: {_why(r)}" if "name" in r else _why(r)
                reasons.setdefault(what, []).append(f"{cell['size']} at batch {cell['batch']}")
    yield from (Text(f"{what} ({', '.join(places)})") for what, places in reasons.items())
    yield _floor([r for r in floors if "floor_ms" in r], results["copy_gb_per_s"])
    yield from (Text(f"{r['size']} at batch {r['batch']}: {_why(r)}") for r in floors if "floor_ms" not in r)


def _why(record: dict[str, Any]) -> str:
    return f"{record['status']}: {record['reason']}"


def _table(title: str, names: tuple[str, ...], figures: tuple[str, ...]) -> Table:
    table = Table(title=title, box=None, pad_edge=False, header_style="bold")
    for name in names:
        table.add_column(name, no_wrap=True)
    for figure in figures:
        table.add_column(figure, justify="right", no_wrap=True)
    return table


def _identity(records: list[dict[str, Any]]) -> Table:
    table = _table(
        "Outputs against stock generate", ("dtype", "method", "outcome"), ("tokens", "divergences", "near-ties")
    )
    for r in records:
        figures = [str(r[key]) for key in ("tokens", "divergences", "near_ties")]
        table.add_row(f"{r['dtype']}: {r['rule']}", r["name"], r["status"], *figures)
    return table


def _speed(rows: list[tuple[str, dict[str, Any]]]) -> Table:
    table = _table(
        "Speed against stock generate at the same batch size, medians over repeats",
        ("target", "batch", "method"),
        ("speed-up", "tok/s", "ms/tok", "accept", "equal", "GiB"),
    )
    for size, r in rows:
        table.add_row(
            size, str(r["batch"]), r["name"], _figure(r["speedup_vs_generate"], ".2f", "x"),
            _figure(r["tokens_per_s"], ".1f"), _figure(r["ms_per_token_and_row"], ".2f"),
            _figure(r["acceptance_length"], ".2f"), r["rows_equal_to_generate"] or "",
            _figure(r.get("peak_gib"), ".2f"),
        )  # fmt: skip
    return table


def _floor(rows: list[dict[str, Any]], gb_per_s: float) -> Table:
    table = _table(
        f"A verify step against its floor: its bytes at {gb_per_s} GB/s, the bandwidth of a copy",
        ("target", "batch"),
        ("tokens", "weights GB", "K/V GB", "floor ms", "alone ms", "ratio", "phase ms"),
    )
    for r in rows:
        table.add_row(
            r["size"], str(r["batch"]), str(r["tokens"]), f"{r['weight_gb']:.3f}", f"{r['kv_gb']:.3f}",
            f"{r['floor_ms']:.3f}", f"{r['forward_ms']:.3f}", f"{r['forward_over_floor']:.2f}x",
            _figure(r["verify_ms"], ".3f"),
        )  # fmt: skip
    table.caption = f"alone: one packed forward; phase: whole verify phases. Goal at batch 1: {GOAL}x"
    return table


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
