"""HTML of a scene: a card per stream, the headline with figures of the whole engine, and the race.

Whatever a colour says, words or patterns say, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from hf_slospec.batcher.texts import ToText
from hf_slospec.demo.generator import HighlightedText, TextPiece
from hf_slospec.demo.race import NAMES, Lane, Race
from hf_slospec.demo.sessions import Scene
from hf_slospec.demo.stream import View, shares

MAX_CHARS = 1200  # a card shows so many characters, from the end of the answer
NUM_PATTERNS = 5  # patterns of segments in the budget bar, see style.css
STATES = {
    "waiting": "reading the prompt",
    "writing": "writing",
    "finished": "finished",
    "stopped": "stopped",
    "paused": "paused for a race",
    "failed": "failed",
}
PREPARED = """<b>Race</b> decodes your prompt in three ways, each alone on this machine, and then plays all
three back side by side, at their measured speed."""
ALONE = "is decoded, alone on this machine: the users below pause."
REPLAY = "All three are played back at the speed at which they were decoded."


def percent(part: float, whole: float = 1.0) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


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
    """Return whether the SLO is met, as a CSS class and as words."""
    if view.user_request.tpot_slo_ms is None:
        return "unjudged", "no SLO"
    if view.state in ("stopped", "paused", "failed"):
        return "unjudged", "not judged"
    if view.metrics is None or view.metrics.attained is None or view.metrics.tpot_s is None:
        return "unjudged", "not judged yet"
    has_ended = view.state == "finished"
    if view.metrics.attained:
        return "met", "✓ SLO met" if has_ended else "✓ meets SLO"
    return "missed", "✗ SLO missed" if has_ended else "✗ misses SLO"


def card(view: View, scale: float, share: float) -> str:
    """Return the card of one stream.

    Args:
        view: the stream.
        scale: tokens per second at the right end of its bar.
        share: its share of all verified nodes, from 0 to 1.
    """
    look, words = verdict(view)
    name = escape(view.name)
    parts = [
        f'<header><h3 title="{name}">{name}</h3>',
        f'<span class="state {view.state}">{STATES[view.state]}</span></header>',
        f'<p class="description">{escape(view.description)}</p>',
        _speed(view, look, words),
        _bar(view, scale, look),
        _prompt(view) + _text(view.pieces, view.state == "writing"),
        _figures(view, share),
        f'<p class="error" role="alert">{escape(view.error)}</p>' if view.error else "",
    ]
    return f'<article class="card {look}" aria-label="{name}">{"".join(parts)}</article>'


def _speed(view: View, look: str, words: str) -> str:
    speed = speed_of(view)
    number = "-" if speed is None else f"{1e3 / speed:.1f}"
    return (
        f'<p class="speed"><b>{number}</b> ms/token<span class="verdict {look}">{words}</span></p>'
    )


def _bar(view: View, scale: float, look: str) -> str:
    speed = speed_of(view) or 0.0
    tpot_slo_ms = view.user_request.tpot_slo_ms
    line = ""
    label = "no SLO"
    if tpot_slo_ms is not None:
        slo = 1e3 / tpot_slo_ms
        at = min(100 * slo / scale, 99.4)
        label = f"SLO: at most {tpot_slo_ms:g} ms per token, {slo:.1f} tokens/s"
        side = f"right:{100 - at:.1f}%" if at > 50 else f"left:{at:.1f}%"
        line = (
            f'<i class="slo-line" style="left:{at:.1f}%"></i><span class="slo-label" style="{side}">'
            f"SLO {tpot_slo_ms:g} ms{' →' if slo > scale else ''}</span>"
        )
    return (
        f'<div class="bar" role="img" aria-label="{speed:.1f} tokens/s; {label}" title="{label}">'
        f'<span class="fill {look}" style="width:{min(100 * speed / scale, 100):.1f}%"></span>{line}</div>'
    )


def _prompt(view: View) -> str:
    """Return the prompt as one line, which the browser cuts off; its tooltip has all of it."""
    prompt = escape(view.user_request.prompt)
    return f'<p class="prompt" title="{prompt}">{prompt}</p>'


def _text(pieces: Sequence[TextPiece], is_writing: bool) -> str:
    shown: list[str] = []
    left = MAX_CHARS
    for piece in reversed(pieces):
        shown.append(_piece(piece._replace(text=piece.text[-left:])))
        left -= len(piece.text)
        if left <= 0:
            break
    cursor = '<span class="cursor">▌</span>' if is_writing else ""
    return f'<div class="text" tabindex="0"><pre>{"".join(reversed(shown))}{cursor}</pre></div>'


def _piece(piece: TextPiece) -> str:
    text = escape(piece.text)
    return f'<span class="d">{text}</span>' if piece.is_draft else text


def _figures(view: View, share: float) -> str:
    metrics = view.metrics
    length = None if metrics is None else metrics.acceptance_length
    accepted = "-" if metrics is None else percent(metrics.accepted, metrics.drafted)
    pairs = [
        ("budget share", percent(share)),
        ("tokens per step", f"{length:.2f}" if length else "-"),
        ("drafts accepted", accepted),
        (
            "SLOs met",
            f"{view.num_attained} of {view.num_judged}" if view.num_judged else "-",
        ),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in pairs)
    return f'<dl class="figures">{cells}</dl>'


def cards(scene: Scene) -> tuple[list[str], str]:
    """Return the HTML of the simulated users' cards by index, and of the visitor's card."""
    views = scene.views
    scale = full_scale(views)
    share = dict(zip(map(id, views), shares([view.nodes for view in views]), strict=True))

    def html(view: View | None) -> str:
        return "" if view is None else card(view, scale, share[id(view)])

    return [html(view) for view in scene.simulated], html(scene.visitor)


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
        (f"{verdicts.count('met')} of {len(verdicts)}", "running answers meet their SLO"),
        (
            f"{attained} of {judged}",
            f"answers met it since “{scene.policy}” was chosen",
        ),
        (percent(accepted, drafted), "of drafted tokens accepted"),
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
            size = percent(share)
            parts.append(
                f'<span class="p{index % NUM_PATTERNS}" style="flex-grow:{share:.4f}" title="{name}: {size}">'
                f"<em>{name} {size}</em></span>"
            )
    body = "".join(parts) or "<span class='idle'><em>nothing is being decoded</em></span>"
    return f'<div class="shares"><span class="dim">Token budget</span><div class="budget">{body}</div></div>'


def race_html(race: Race | None, to_text: ToText) -> str:
    """Return a race. While it is run, its lanes show what they have decoded; once it is done, they
    play that back together, at the speed at which it was decoded.
    """
    lanes = [] if race is None else race.lanes
    is_done = race is not None and race.is_done
    words = f"Lane {max(len(lanes), 1)} of {len(NAMES)} {ALONE}"
    if race is None:
        words = PREPARED
    elif is_done:
        words = f'<span class="until">{REPLAY}</span><span class="t">{result(race)}</span>'
    end_s = max((lane.end_s for lane in lanes), default=0.0)
    parts = [_lane(name, lane, to_text, is_done) for name, lane in zip_longest(NAMES, lanes)]
    return (
        f'<p class="result" style="--t:{end_s:.3f}s">{words}</p>'
        f'<div class="lanes">{"".join(parts)}</div>'
    )


def result(race: Race) -> str:
    """Return what a finished race has shown: the speed-up, and how much of it is due to faster steps
    and how much to drafts.
    """
    stock_s, steps_s, drafts_s = (lane.tpot_s for lane in race.lanes)
    if not (stock_s and steps_s and drafts_s):
        return "The answer has a single token, and so no time per token; take another prompt."
    num_same = race.num_same
    num_tokens = min(len(lane.source.token_ids) for lane in race.lanes)
    same = f"All three wrote the same {num_tokens} tokens."
    if num_same < num_tokens:
        same = f"The first {num_same} tokens are the same; half precision rounds differently after."
    pace = "faster" if steps_s <= stock_s else "slower"
    steps = f"by {pace} steps (forwards {escape(race.forwards)})"
    factors = (
        f"<b>{stock_s / steps_s:.1f}x</b> {steps} &times; <b>{steps_s / drafts_s:.1f}x</b> by drafts "
        f"({race.policy}: {race.lanes[-1].tokens_per_step:.2f} tokens per step)"
    )
    if not any(race.lanes[-1].source.from_draft):
        factors = f"{steps}; no draft was accepted, so drafts gained nothing"
    return (
        f"<b>{stock_s / drafts_s:.1f} times the speed of stock generate</b>: "
        f"{1e3 * stock_s:.1f} → {1e3 * drafts_s:.1f} ms per token, {factors}. {same}"
    )


def _lane(name: str, lane: Lane | None, to_text: ToText, is_done: bool) -> str:
    if lane is None:
        return f'<article class="lane"><header><h3>{name}</h3></header>{_text([], False)}</article>'
    steps = lane.steps
    source = lane.source
    text = HighlightedText(to_text)
    spans = []
    pieces: list[TextPiece] = []
    num_tokens = 0
    for step in steps:
        num_shown = len(pieces)
        tokens = source.token_ids[: step.num_emitted]
        pieces = text.update(tokens, source.from_draft, is_done and step is steps[-1])
        shown = "".join(map(_piece, pieces[num_shown:]))
        num_new = step.num_emitted - num_tokens
        spans.append(f'<span class="t" style="--t:{step.at_s:.3f}s;--n:{num_new}">{shown}</span>')
        num_tokens = step.num_emitted
    end_s = lane.end_s
    speed = f"{1e3 * lane.tpot_s:.1f} ms/token" if lane.tpot_s else ""
    length = f"{lane.tokens_per_step or 1:.1f} per step"
    return (
        f'<article class="lane {"replay" if is_done else "live"}" style="--end:{end_s:.3f}s">'
        f'<header><h3>{name}</h3><p><b class="t" style="--t:{end_s:.3f}s">{speed}</b></p></header>'
        f'<div class="track"><span></span></div><div class="text" tabindex="0"><pre>'
        f"{''.join(spans)}</pre></div>"
        f'<p class="dim count"> tokens, {length}</p></article>'
    )
