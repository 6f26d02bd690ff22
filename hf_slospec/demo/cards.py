"""HTML of a scene: a card per stream, and the headline with figures of the whole engine.

Whatever a colour says, words or patterns say, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from hf_slospec.demo.generator import TextPiece
from hf_slospec.demo.sessions import Scene
from hf_slospec.demo.stream import View, shares

MAX_CHARS = 1200  # a card shows so many characters, from the end of the answer
NUM_PATTERNS = 5  # patterns of segments in the budget bar, see style.css
STATES = {
    "waiting": "reading the prompt",
    "writing": "writing",
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
}


def speed_of(view: View) -> float | None:
    """Return the speed of the current request in tokens per second: 1 / TPOT; None: no TPOT yet."""
    tpot_s = None if view.metrics is None else view.metrics.tpot_s
    return 1.0 / tpot_s if tpot_s else None


def full_scale(views: Sequence[View]) -> float:
    """Return the tokens per second at the right end of all bars, which share one scale."""
    speeds = [speed_of(view) or 0.0 for view in views]
    slos = [1e3 / ms for view in views if (ms := view.user_request.tpot_slo_ms) is not None]
    fastest = max(speeds, default=0.0)
    top = max([fastest, *(slo for slo in slos if slo < 4 * max(fastest, 5.0)), 10.0]) * 1.15
    step = 10.0 ** math.floor(math.log10(top)) / 2
    return math.ceil(top / step) * step


def verdict(view: View) -> tuple[str, str]:
    """Return whether the speed target is met, as a CSS class and as words."""
    if view.user_request.tpot_slo_ms is None:
        return "unjudged", "no speed target"
    if view.metrics is None or view.metrics.attained is None or view.metrics.tpot_s is None:
        return "unjudged", "not known yet"
    if view.state in ("stopped", "failed"):
        return "unjudged", "&nbsp;"  # not empty, as the box would have another height
    is_met = view.metrics.attained
    if view.state == "finished":
        words = "✓ speed target met" if is_met else "✗ speed target missed"
    else:
        words = "✓ at speed target" if is_met else "✗ below speed target"
    return ("met" if is_met else "missed"), words


def card(view: View, scale: float, share: float, hides_text: bool = False) -> str:
    """Return the card of one stream.

    Args:
        view: the stream.
        scale: tokens per second at the right end of its bar.
        share: its share of all verified nodes, from 0 to 1.
        hides_text: leave out prompt and text: those of a visitor are shown to this visitor only.
    """
    look, words = verdict(view)
    parts = [
        f'<header><h3 title="{escape(view.name)}">{escape(view.name)}</h3>',
        f'<p><span class="verdict {look}">{words}</span>',
        f'<span class="state {view.state}">{STATES[view.state]}</span></p></header>',
        f'<p class="description">{escape(view.description)}</p>' if view.description else "",
        _speed(view),
        _bar(view, scale, look),
        _sparkline(view),
        "" if hides_text else _prompt(view) + _text(view.pieces, view.state == "writing"),
        _figures(view, share),
        f'<p class="error" role="alert">{escape(view.error)}</p>'
        if view.error
        else "",  # last, so that the parts above it line up across cards
    ]
    return (
        f'<article class="card {look}" aria-label="{escape(view.name)}">{"".join(parts)}</article>'
    )


def _speed(view: View) -> str:
    speed = speed_of(view)
    number = "-" if speed is None else f"{speed:.1f}"
    per_token = "" if speed is None else f" = {1e3 / speed:.0f} ms/token"
    return f'<p class="speed"><b>{number}</b> tokens/s<span class="dim">{per_token}</span></p>'


def _bar(view: View, scale: float, look: str) -> str:
    speed = speed_of(view) or 0.0
    tpot_slo_ms = view.user_request.tpot_slo_ms
    line = ""
    label = "no speed target"
    if tpot_slo_ms is not None:
        slo = 1e3 / tpot_slo_ms
        at = min(100 * slo / scale, 99.4)
        label = f"speed target: at least {slo:.1f} tokens/s ({tpot_slo_ms:.0f} ms per token)"
        side = f"right:{100 - at:.1f}%" if at > 50 else f"left:{at:.1f}%"
        line = f'<i class="slo-line" style="left:{at:.1f}%"></i><span class="slo-label" style="{side}">'
        line += f"speed target {slo:.1f}/s{' →' if slo > scale else ''}</span>"
    return (
        f'<div class="bar" role="img" aria-label="{speed:.1f} tokens/s; {label}" title="{label}">'
        f'<span class="fill {look}" style="width:{min(100 * speed / scale, 100):.1f}%"></span>{line}</div>'
    )


def _sparkline(view: View) -> str:
    """Plot tokens per second by second, averaged over three seconds, with the speed target as a
    dashed line.
    """
    values = [
        sum(view.history[max(i - 2, 0) : i + 1]) / min(i + 1, 3) for i in range(len(view.history))
    ]
    slo = None if view.user_request.tpot_slo_ms is None else 1e3 / view.user_request.tpot_slo_ms
    top = max(*values, min(slo or 0.0, 3 * max(*values, 5.0)), 1.0) * 1.1
    points = " ".join(
        f"{100 * i / (len(values) - 1):.1f},{30 - 30 * v / top:.1f}" for i, v in enumerate(values)
    )
    dashed = ""
    if slo is not None and slo <= top:
        y = 30 - 30 * slo / top
        dashed = f'<line x1="0" x2="100" y1="{y:.1f}" y2="{y:.1f}"/>'
    return (
        f'<div class="spark"><svg viewBox="0 0 100 30" preserveAspectRatio="none" aria-hidden="true">'
        f'<polyline points="{points}"/>{dashed}</svg>'
        f'<span>now <b>{view.tokens_per_s:.1f}</b><br><span class="dim">last {len(values)} s</span></span></div>'
    )


def _prompt(view: View) -> str:
    """Return the prompt as one line, which the browser cuts off; its tooltip has all of it."""
    prompt = escape(view.user_request.prompt)
    return f'<p class="prompt" title="{prompt}">{prompt}</p>'


def _text(pieces: Sequence[TextPiece], is_writing: bool) -> str:
    shown: list[str] = []
    left = MAX_CHARS
    for piece in reversed(pieces):
        text = escape(piece.text[-left:])
        shown.append(f'<span class="d">{text}</span>' if piece.is_draft else text)
        left -= len(piece.text)
        if left <= 0:
            break
    cursor = '<span class="cursor">▌</span>' if is_writing else ""
    return f'<div class="text" tabindex="0"><pre>{"".join(reversed(shown))}{cursor}</pre></div>'


def _figures(view: View, share: float) -> str:
    metrics = view.metrics
    length = None if metrics is None else metrics.acceptance_length
    accepted = (
        f"{100 * metrics.accepted / metrics.drafted:.0f} %"
        if metrics is not None and metrics.drafted
        else "-"
    )
    guarantee = ""
    if view.user_request.tpot_slo_ms is not None and metrics is not None and view.is_active:
        guarantee = "planned for by the scheduler"
        if not metrics.guaranteed:
            guarantee = "not planned for: others' targets come first"
        if metrics.guaranteed and metrics.attained is False:
            guarantee += ", and missed so far"
        guarantee = f"speed target of this answer: {guarantee}"
    pairs = [
        ("budget share", f"{100 * share:.0f} %"),
        ("tokens per step", f"{length:.2f}" if length else "-"),
        ("drafts accepted", accepted),
        (
            "answers in time",
            f"{view.num_attained} of {view.num_judged}" if view.num_judged else "-",
        ),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{cells}</dl><p class="dim guarantee">{guarantee}&nbsp;</p>'


def cards(scene: Scene) -> tuple[list[str], str, str]:
    """Return the HTML of the simulated users' cards by index, of the visitor's card, and of all
    other visitors' cards.
    """
    views = scene.views
    scale = full_scale(views)
    share = dict(zip(map(id, views), shares([view.nodes for view in views]), strict=True))
    simulated = [
        "" if view is None else card(view, scale, share[id(view)]) for view in scene.simulated
    ]
    visitor = "" if scene.visitor is None else card(scene.visitor, scale, share[id(scene.visitor)])
    rest = "".join(
        card(view, scale, share[id(view)], hides_text=True) for view in scene.other_visitors
    )
    return simulated, visitor, f'<div class="others">{rest}</div>' if rest else ""


def headline(scene: Scene) -> str:
    """Return the figures of the whole engine: throughput, attainment, acceptance and token budget."""
    views = scene.views
    total = sum(view.tokens_per_s for view in views)
    verdicts = [
        look for view in views if view.is_active and (look := verdict(view)[0]) != "unjudged"
    ]
    attained, judged = scene.counts
    drafted = sum(view.metrics.drafted for view in views if view.metrics)
    accepted = sum(view.metrics.accepted for view in views if view.metrics)
    tiles = [
        (f"{total:.1f}", "tokens/s in total"),
        (f"{verdicts.count('met')} of {len(verdicts)}", "running streams at their speed target"),
        (
            f"{attained} of {judged}",
            f"answers met their speed target since “{scene.policy}” was chosen",
        ),
        (f"{100 * accepted / drafted:.0f} %" if drafted else "-", "of drafted tokens accepted"),
    ]
    cells = "".join(f"<div><b>{number}</b><span>{words}</span></div>" for number, words in tiles)
    return f'<div class="tiles">{cells}</div>{_budget(views)}'


def _budget(views: Sequence[View]) -> str:
    parts = []
    for index, (view, share) in enumerate(
        zip(views, shares([view.nodes for view in views]), strict=True)
    ):
        if share > 0:
            name = escape(view.name)
            percent = f"{100 * share:.0f} %"
            parts.append(
                f'<span class="p{index % NUM_PATTERNS}" style="flex-grow:{share:.4f}" title="{name}: {percent}">'
                f"<em>{name} {percent}</em></span>"
            )
    body = "".join(parts) or "<span class='idle'><em>nothing is being decoded</em></span>"
    return f'<p class="dim">Token budget of the last seconds by user:</p><div class="budget">{body}</div>'
