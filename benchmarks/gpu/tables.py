"""Results of a check as tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.gpu.floor import GOAL

MAX_FAILED = 20  # names of failed tests; the JSON has all


def tables(results: dict[str, Any]) -> Iterator[Table | Text]:
    """Yield all results in order; each table is followed by what was not measured, with the reason."""
    environment, speed, floors = (results[name] for name in ("environment", "speed", "floor"))
    yield Text("\n".join(f"{name}: {value}" for name, value in environment.items()))
    yield Text(
        "cuDNN attention is off for all methods: it builds a plan for each new shape, within timed calls"
    )
    tests = results["tests"]
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tests.get("counts", {}).items())
    yield Text(
        "; ".join(filter(None, (f"gpu tests: {tests['status']}", counts, tests.get("reason"))))
    )
    yield from (Text(f"failed: {name}") for name in tests.get("failed", ())[:MAX_FAILED])
    yield _identity([r for r in results["identity"] if "tokens" in r])
    yield from (
        Text(f"{r['dtype']}, {r['name']}: {_why(r)}")
        for r in results["identity"]
        if "tokens" not in r
    )
    yield _speed(
        [
            (cell["size"], r)
            for cell in speed
            for r in cell["contestants"]
            if r["status"] == "measured"
        ]
    )
    reasons: dict[str, list[str]] = {}  # reason -> sizes and batch sizes
    for cell in speed:
        place = f"{cell['size']} at batch {cell['batch']}"
        for r in cell["contestants"]:
            if r["status"] != "measured":
                reasons.setdefault(f"{r['name']}: {_why(r)}", []).append(place)
        if "drift" in cell:
            yield Text(
                f"{place}: generate took {cell['drift']:.2f} times its first time after all other methods"
            )
        if "profile" in cell:
            yield Text(f"{place}, profile: {_profile(cell['profile'])}")
    yield from (Text(f"{what} ({', '.join(places)})") for what, places in reasons.items())
    yield _floor([r for r in floors if "floor_ms" in r], results["bandwidth"])
    yield from (
        Text(f"{r['size']} at batch {r['batch']}: {_why(r)}") for r in floors if "floor_ms" not in r
    )


def _profile(record: dict[str, Any]) -> str:
    if record["status"] != "measured":
        return _why(record)
    phases = [f"{name} {counts}" for name, counts in record["per_step"].items()]
    return f"{', '.join(phases)} per step; {record['per_draft_level']} per draft level"


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
        "Outputs against stock generate",
        ("dtype", "method", "outcome"),
        ("tokens", "divergences", "near-ties", "largest margin"),
    )
    for r in records:
        figures = [str(r[key]) for key in ("tokens", "divergences", "near_ties")]
        margin = _figure(r["largest_margin"], ".2g")
        table.add_row(f"{r['dtype']}: {r['rule']}", r["name"], r["status"], *figures, margin)
    return table


def _speed(rows: list[tuple[str, dict[str, Any]]]) -> Table:
    table = _table(
        "Speed against stock generate at the same batch size, medians over repeats",
        ("target", "batch", "method"),
        (
            "speed-up",
            "tok/s",
            "ms/tok",
            "accept",
            "equal",
            "GiB",
            "warm-up",
            "captured",
            "replayed",
            "eager",
        ),
    )
    table.caption = (
        "warm-up: calls and seconds; captured, replayed, eager: forwards in all timed calls"
    )
    for size, r in rows:
        warm_up = f"{r['warm_up']['calls']}, {r['warm_up']['seconds']:.1f} s"
        total = {
            key: sum(counts[key] for counts in r["counts"])
            for key in ("forwards", "captures", "replays", "eager")
        }
        forwards = [
            str(total[key]) if total["forwards"] else "" for key in ("captures", "replays", "eager")
        ]
        table.add_row(
            size, str(r["batch"]), r["name"], _figure(r["speedup_vs_generate"], ".2f", "x"),
            _figure(r["tokens_per_s"], ".1f"), _figure(r["ms_per_token_and_row"], ".2f"),
            _figure(r["acceptance_length"], ".2f"), r["rows_equal_to_generate"] or "",
            _figure(r.get("peak_gib"), ".2f"), warm_up, *forwards,
        )  # fmt: skip
    return table


def _floor(rows: list[dict[str, Any]], bandwidth: dict[str, float | None]) -> Table:
    read, datasheet = (
        _figure(rate and rate / 1e9, ".0f", " GB/s") or "unknown" for rate in bandwidth.values()
    )
    table = _table(
        f"A verify step against the time to read its bytes (measured: {read}, datasheet: {datasheet})",
        ("target", "batch"),
        (
            "tokens",
            "weights GB",
            "K/V GB",
            "floor ms",
            "alone ms",
            "ratio",
            "of datasheet",
            "phase ms",
            "ratio",
        ),
    )
    for r in rows:
        table.add_row(
            r["size"], str(r["batch"]), str(r["tokens"]), f"{r['weight_gb']:.3f}", f"{r['kv_gb']:.3f}",
            f"{r['floor_ms']:.3f}", f"{r['forward_ms']:.3f}", f"{r['forward_over_floor']:.2f}x",
            _figure(r["forward_over_datasheet"], ".2f", "x"), _figure(r["verify_ms"], ".3f"),
            _figure(r["verify_over_floor"], ".2f", "x"),
        )  # fmt: skip
    table.caption = (
        f"alone: one packed forward; phase: whole verify phases. Goal at batch 1: {GOAL}x"
    )
    return table


def _figure(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"
