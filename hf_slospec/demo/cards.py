"""What is seen of a scene, as HTML. Nothing is told by colour alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from hf_slospec.demo.highlight import Piece
from hf_slospec.demo.rates import shares
from hf_slospec.demo.sessions import Scene
from hf_slospec.demo.stream import View

SHOWN_CHARS = 1200  # of an answer, the last ones
PATTERNS = 5  # kinds of segments in the budget bar, see style.css
STATES = {
    "waiting": "reading the prompt",
    "writing": "writing",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def speed_of(view: View) -> float | None:
    """Tokens per second of the request at hand, which is what its target is about."""
    tpot_s = None if view.metrics is None else view.metrics.tpot_s
    return 1.0 / tpot_s if tpot_s else None


def full_scale(views: Sequence[View]) -> float:
    """Tokens per second at the right end of all bars: one scale, so that users can be compared."""
    speeds = [speed_of(view) or 0.0 for view in views]
    targets = [1e3 / view.wish.tpot_slo_ms for view in views if view.wish.tpot_slo_ms is not None]
    fast = max(speeds, default=0.0)
    top = max([fast, *(target for target in targets if target < 4 * max(fast, 5.0)), 10.0]) * 1.15
    step = 10 ** math.floor(math.log10(top)) / 2
    return math.ceil(top / step) * step


def verdict(view: View) -> tuple[str, str]:
    """-> a class for its looks, and words"""
    if view.wish.tpot_slo_ms is None:
        return "spare", "no target"
    if view.metrics is None or view.metrics.attained is None or view.metrics.tpot_s is None:
        return "spare", "not known yet"
    if view.state in ("stopped", "failed"):
        return "spare", ""  # said below
    if view.state == "finished":
        return ("kept", "✓ target met") if view.metrics.attained else ("late", "✗ target missed")
    return ("kept", "✓ on target") if view.metrics.attained else ("late", "✗ behind target")


def card(view: View, scale: float, share: float, hides_text: bool = False) -> str:
    look, words = verdict(view)
    parts = [
        f'<header><h3>{escape(view.name)}</h3><span class="verdict {look}">{words}</span></header>',
        f'<p class="wants">{escape(view.wants)}</p>' if view.wants else "",
        _speed(view),
        _bar(view, scale, look),
        _sparkline(view),
        "" if hides_text else _text(view.pieces, view.state == "writing"),
        f'<p class="error" role="alert">{escape(view.error)}</p>' if view.error else "",
        _figures(view, share),
    ]
    return f'<article class="card {look}" aria-label="{escape(view.name)}">{"".join(parts)}</article>'


def _speed(view: View) -> str:
    speed = speed_of(view)
    number = "-" if speed is None else f"{speed:.1f}"
    per_token = "" if speed is None else f" = {1e3 / speed:.0f} ms/token"
    return (
        f'<p class="speed"><b>{number}</b> tokens/s<span class="dim">{per_token}</span>'
        f'<span class="state {view.state}">{STATES[view.state]}</span></p>'
    )


def _bar(view: View, scale: float, look: str) -> str:
    speed, tpot_slo_ms = speed_of(view) or 0.0, view.wish.tpot_slo_ms
    line, label = "", "no target"
    if tpot_slo_ms is not None:
        wanted = 1e3 / tpot_slo_ms
        at = min(100 * wanted / scale, 99.4)
        label = f"target: at least {wanted:.1f} tokens/s ({tpot_slo_ms:.0f} ms per token)"
        side = "right" if at > 50 else "left"
        line = f'<i class="target" style="left:{at:.1f}%"></i><span class="aim {side}" style="{_beside(at)}">'
        line += f"target {wanted:.1f} tokens/s{' →' if wanted > scale else ''}</span>"
    return (
        f'<div class="bar" role="img" aria-label="{speed:.1f} tokens/s; {label}" title="{label}">'
        f'<span class="fill {look}" style="width:{min(100 * speed / scale, 100):.1f}%"></span>{line}</div>'
    )


def _beside(at: float) -> str:
    return f"right:{100 - at:.1f}%" if at > 50 else f"left:{at:.1f}%"


def _sparkline(view: View) -> str:
    """Tokens per second over the last seconds, smoothed over three, with the target as a dashed line."""
    values = [sum(view.history[max(i - 2, 0) : i + 1]) / min(i + 1, 3) for i in range(len(view.history))]
    wanted = None if view.wish.tpot_slo_ms is None else 1e3 / view.wish.tpot_slo_ms
    top = max(*values, min(wanted or 0.0, 3 * max(*values, 5.0)), 1.0) * 1.1
    points = " ".join(f"{100 * i / (len(values) - 1):.1f},{30 - 30 * v / top:.1f}" for i, v in enumerate(values))
    dashed = ""
    if wanted is not None and wanted <= top:
        y = 30 - 30 * wanted / top
        dashed = f'<line x1="0" x2="100" y1="{y:.1f}" y2="{y:.1f}"/>'
    return (
        f'<div class="spark"><svg viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{points}"/>{dashed}</svg>'
        f'<span>now <b>{view.tokens_per_s:.1f}</b><br><span class="dim">last {len(values)} s</span></span></div>'
    )


def _text(pieces: Sequence[Piece], is_writing: bool) -> str:
    kept: list[str] = []
    left = SHOWN_CHARS
    for piece in reversed(pieces):
        text = escape(piece.text[-left:])
        kept.append(f'<span class="d">{text}</span>' if piece.is_draft else text)
        left -= len(piece.text)
        if left <= 0:
            break
    cursor = '<span class="cursor">▌</span>' if is_writing else ""
    return f'<div class="text" tabindex="0"><pre>{"".join(reversed(kept))}{cursor}</pre></div>'


def _figures(view: View, share: float) -> str:
    own = view.metrics
    length = None if own is None else own.acceptance_length
    accepted = f"{100 * own.accepted / own.drafted:.0f} %" if own is not None and own.drafted else "-"
    promised = ""
    if view.wish.tpot_slo_ms is not None and own is not None and view.is_active:
        promised = "promised" if own.guaranteed else "not promised: it might not be kept"
    kept = f"{view.kept} of {view.judged}" if view.judged else "-"
    pairs = [
        ("budget share", f"{100 * share:.0f} %"),
        ("tokens per step", f"{length:.2f}" if length else "-"),
        ("drafts accepted", accepted),
        ("answers on target", kept),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{cells}</dl><p class="dim promise">{promised}&nbsp;</p>'


def cards(scene: Scene) -> tuple[list[str], str, str]:
    """-> the cards of the simulated users by place, the visitor's own, and those of other visitors"""
    everybody = scene.everybody
    scale = full_scale(everybody)
    share = dict(zip(map(id, everybody), shares([view.nodes for view in everybody]), strict=True))
    simulated = ["" if view is None else card(view, scale, share[id(view)]) for view in scene.simulated]
    own = "" if scene.own is None else card(scene.own, scale, share[id(scene.own)])
    others = "".join(card(view, scale, share[id(view)], hides_text=True) for view in scene.others)
    return simulated, own, f'<div class="others">{others}</div>' if others else ""


def headline(scene: Scene) -> str:
    """The whole engine: throughput, targets met, and whose nodes fill the budget."""
    everybody = scene.everybody
    total = sum(view.tokens_per_s for view in everybody)
    aimed = [view for view in everybody if view.is_active and verdict(view)[0] != "spare"]
    holding = sum(verdict(view)[0] == "kept" for view in aimed)
    kept, judged = scene.record
    drafted = sum(view.metrics.drafted for view in everybody if view.metrics)
    accepted = sum(view.metrics.accepted for view in everybody if view.metrics)
    tiles = [
        (f"{total:.1f}", "tokens/s in all"),
        (f"{holding} of {len(aimed)}", "streams on target now"),
        (f"{kept} of {judged}", f"answers on target since “{scene.policy}” was chosen"),
        (f"{100 * accepted / drafted:.0f} %" if drafted else "-", "of drafted tokens accepted"),
    ]
    cells = "".join(f"<div><b>{number}</b><span>{words}</span></div>" for number, words in tiles)
    return f'<div class="tiles">{cells}</div>{_budget(everybody)}'


def _budget(everybody: Sequence[View]) -> str:
    parts = []
    for place, (view, share) in enumerate(zip(everybody, shares([view.nodes for view in everybody]), strict=True)):
        if share > 0:
            name = escape(view.name)
            parts.append(
                f'<span class="p{place % PATTERNS}" style="flex-grow:{share:.4f}" title="{name}: {100 * share:.0f} %">'
                f"<em>{name} {100 * share:.0f} %</em></span>"
            )
    body = "".join(parts) or "<span class='idle'><em>nothing is being decoded</em></span>"
    return f'<p class="dim">Who the token budget of the last seconds went to:</p><div class="budget">{body}</div>'
