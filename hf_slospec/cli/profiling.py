"""Measurement of forward latencies for ``profile``: points, fits, prediction errors and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.table import Table

from hf_slospec.model.measure import CURVE, HELD_OUT, REPEATS, Forwards, measure, save_profile
from hf_slospec.model.packed_model import PackedModel
from hf_slospec.model.properties import evaluating


def profile(packed: PackedModel, seconds: float, keep: bool) -> dict[str, Any]:
    """Measure the forwards of one model.

    Args:
        packed: the model's packed forwards.
        seconds: approximate duration; large sizes and repeats are left out to keep it.
        keep: store the fit for later runs on this machine.

    Returns:
        Dict with ``measured``: tokens, requests, keys per request and milliseconds of every size;
        ``fit``: latency curve, and milliseconds per further request and per 1000 keys;
        ``held_out``: relative errors of the fit at sizes that it was not made from;
        ``not_measured``: tokens of the sizes for which there was no time, or which are too slow for
        a step.
    """
    with evaluating(packed.model):
        measured = measure(Forwards(packed), seconds, held_out=True, repeats=4 * REPEATS)
    sizes = (*CURVE, *HELD_OUT)
    cost = measured.fit()
    if keep:
        save_profile(packed, cost)
    return {
        "measured": [
            _place(size) | {"ms": round(1e3 * seconds, 3)}
            for size, seconds in sorted(measured.seconds.items())
        ],
        "fit": {
            "tokens": cost.curve.num_tokens,
            "ms": [round(1e3 * t, 3) for t in cost.curve.seconds],
            "ms_per_further_request": round(1e3 * cost.per_request_s, 4),
            "ms_per_1000_keys": round(1e6 * cost.per_key_s, 4),
        },
        "not_measured": sorted({size.num_tokens for size in sizes if size not in measured.seconds}),
        "held_out": [
            _place(size) | {"error": round(error, 4)}
            for size, error in sorted(measured.errors(cost).items())
        ],
    }


def _place(size: Any) -> dict[str, Any]:
    return {"tokens": size.num_tokens, "requests": size.num_requests, "keys_each": size.keys_each}


def table(name: str, record: dict[str, Any]) -> Table:
    fit = record["fit"]
    result = Table(title=f"{name}: milliseconds of a forward by its number of tokens")
    for tokens in fit["tokens"]:
        result.add_column(str(tokens), justify="right", no_wrap=True)
    result.add_row(*(f"{ms:.1f}" for ms in fit["ms"]))
    errors = ", ".join(
        f"{e['tokens']} tokens of {e['requests']}: {e['error']:+.0%}" for e in record["held_out"]
    )
    result.caption = (
        f"+{fit['ms_per_further_request']:.2f} ms per further request, +{fit['ms_per_1000_keys']:.2f} ms per 1,000 "
        f"keys; error at held-out sizes: {errors or 'none measured'}"
    )
    if left_out := ", ".join(map(str, record["not_measured"])):
        result.caption += (
            f"; not measured, as too slow for --seconds or for a step: {left_out} tokens"
        )
    return result


def draw(records: dict[str, dict[str, Any]], path: Path) -> None:
    """Plot measured points and fitted curves, one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(records), figsize=(5.5 * len(records), 4), layout="constrained", squeeze=False
    )
    for panel, (name, record) in zip(panels[0], records.items(), strict=True):
        plain = [m for m in record["measured"] if m["requests"] == 1 and m["keys_each"] == 128]
        other = [m for m in record["measured"] if m not in plain]
        panel.plot(
            record["fit"]["tokens"], record["fit"]["ms"], color="#0072B2", label="fit, without keys"
        )
        for points, mark, color, label in (
            (plain, "o", "#0072B2", "one request"),
            (other, "^", "#D55E00", "several requests or long contexts"),
        ):
            tokens = [point["tokens"] for point in points]
            panel.plot(tokens, [point["ms"] for point in points], mark, color=color, label=label)
        panel.set(
            xscale="log",
            xlabel="tokens of the forward",
            ylabel="milliseconds",
            title=name,
            ylim=(0, None),
        )
        panel.set_xticks(
            record["fit"]["tokens"], [str(tokens) for tokens in record["fit"]["tokens"]]
        )
        panel.minorticks_off()
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)
