"""The page: what stands where, and what its controls do."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from hf_slospec.demo import cards
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_CHARS, Person, Wish
from hf_slospec.demo.sessions import MAX_SIMULATED, Crowd, Scene
from hf_slospec.errors import SLOSpecError

LOOK_S = 0.5  # between two looks at the crowd
INTRO = """<h1>One model, many users, each at a promised speed</h1>
<div class="intro"><p>Everybody below is served by <b>the same model at the same time</b>. Each asks for a speed: at
most so many milliseconds per token (<b>TPOT</b>, time per output token). A small draft model guesses how texts go on,
the large one checks the guesses of all users in one step, and the <b>policy</b> decides whose guesses are worth
checking: those who are behind their target first. The text stays what the large model would have written anyway.
Switch the policy and watch targets break and hold, or <a href="#own-wish">write something yourself</a>, among
them.</p></div>"""
EMBEDDED = """<p class="dim">The models here are tiny and were trained on Python source, so all users get Python-looking
nonsense. Speeds, drafts and targets are real.</p>"""
LEGEND = """<p class="legend">In the texts: <span class="d">underlined</span> tokens were guessed by the draft and
accepted; plain ones were written by the target itself. The upright line in a bar is the user's target.</p>"""
POLICIES = [
    ("auto: guesses where they pay, late users first", "auto"),
    ("adaserve: the whole token budget, on every step", "adaserve"),
    ("fixed: four guesses for everybody", "fixed"),
    ("none: no guessing", "none"),
]


@dataclass(frozen=True)
class Controls:
    """What a user may ask for."""

    prompt: gr.Textbox
    tpot_slo_ms: gr.Slider
    has_target: gr.Checkbox
    temperature: gr.Slider
    top_p: gr.Slider
    max_new_tokens: gr.Slider

    @classmethod
    def of(cls, wish: Wish, most_ms: float, folds_prompt: bool) -> Controls:
        prompt = gr.Textbox(
            wish.prompt, lines=4, max_lines=8, max_length=MAX_PROMPT_CHARS, label="Prompt", render=not folds_prompt
        )
        tpot_slo_ms = gr.Slider(
            *(1, most_ms, wish.tpot_slo_ms or most_ms),
            step=1,
            label="Target (ms per token)",
            min_width=200,
            visible=wish.tpot_slo_ms is not None,
        )
        with gr.Accordion("Prompt and sampling" if folds_prompt else "Sampling", open=False):
            if folds_prompt:
                prompt.render()
            return cls(
                prompt,
                tpot_slo_ms,
                gr.Checkbox(wish.tpot_slo_ms is not None, label="Promise a speed"),
                gr.Slider(0, 1.5, wish.temperature, step=0.1, label="Temperature (0: likeliest)"),
                gr.Slider(0.1, 1, wish.top_p, step=0.05, label="Top-p"),
                gr.Slider(16, MAX_NEW_TOKENS, wish.max_new_tokens, step=16, label="Tokens to write"),
            )

    @property
    def all(self) -> list[Any]:
        return [
            self.prompt, self.tpot_slo_ms, self.has_target, self.temperature, self.top_p, self.max_new_tokens,
        ]  # fmt: skip


def wish_of(
    prompt: str | None, tpot_slo_ms: float, has_target: bool, temperature: float, top_p: float, max_new_tokens: int
) -> Wish:
    """What the controls say, in their order."""
    return Wish.of(
        prompt=prompt or "", tpot_slo_ms=tpot_slo_ms if has_target else None, temperature=temperature, top_p=top_p,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def shown(wish: Wish) -> list[Any]:
    """What the controls should say."""
    target = gr.Slider(visible=False) if wish.tpot_slo_ms is None else gr.Slider(value=wish.tpot_slo_ms, visible=True)
    return [wish.prompt, target, wish.tpot_slo_ms is not None, wish.temperature, wish.top_p, wish.max_new_tokens]


@dataclass(frozen=True)
class Place:
    """Where a simulated user is shown."""

    column: gr.Column
    card: gr.HTML
    controls: Controls

    @property
    def all(self) -> list[Any]:
        return [self.column, self.card, *self.controls.all]


class Page:
    """One page for all visitors; each has a session of its own."""

    def __init__(self, crowd: Crowd, people: dict[str, tuple[Person, Wish]], most_ms: float, note: str):
        self.crowd, self.people, self.most_ms, self.note = crowd, people, most_ms, note

    def build(self) -> gr.Blocks:
        with gr.Blocks(title="hf_slospec demo", analytics_enabled=False, fill_width=True) as page:
            gr.HTML(INTRO + self.note, apply_default_css=False)
            policy = gr.Radio(POLICIES, value=self.crowd.policy, label="Policy (for everybody)", elem_id="policy")
            head = gr.HTML(apply_default_css=False, elem_id="headline")
            gr.HTML(LEGEND, apply_default_css=False)
            with gr.Row(elem_classes=["users", "simulated"]):
                places = [self._place(number) for number in range(MAX_SIMULATED)]
            with gr.Row(elem_classes="adding"):
                who = gr.Dropdown(list(self.people), label="Another simulated user", elem_id="who", min_width=180)
                add = gr.Button("Add user", elem_id="add", min_width=120)
            own = self._own()
            others = gr.HTML(apply_default_css=False, elem_id="others")
            seen = gr.State({"policy": "", "versions": [None] * MAX_SIMULATED})
            outputs = [seen, policy, head, own, others, *(part for place in places for part in place.all)]
            look = dict(fn=self.look, inputs=seen, outputs=outputs, show_progress="hidden", queue=False)
            page.load(**look)
            gr.Timer(LOOK_S).tick(**look)
            policy.input(guarded(self.crowd.set_policy), policy, None, concurrency_limit=None, show_progress="hidden")
            add.click(guarded(self.add), who, None, concurrency_limit=None)
            page.unload(self.leave)
        return page

    def _place(self, number: int) -> Place:
        with gr.Column(min_width=300, visible=False, elem_classes="user", elem_id=f"user-{number}") as column:
            card = gr.HTML(apply_default_css=False)
            controls = Controls.of(next(iter(self.people.values()))[1], self.most_ms, folds_prompt=True)
            with gr.Row():
                start = gr.Button("Start again", size="sm", min_width=60)
                stop = gr.Button("Stop", size="sm", min_width=60)
                remove = gr.Button("Remove", size="sm", min_width=60)
        change = guarded(lambda *values: self.crowd.change(number, wish_of(*values)))
        for event in (start.click, controls.tpot_slo_ms.release, controls.has_target.input):
            event(change, controls.all, None, concurrency_limit=None, show_progress="hidden")
        stop.click(guarded(lambda: self.crowd.stop(number)), None, None, concurrency_limit=None)
        remove.click(guarded(lambda: self.crowd.remove(number)), None, None, concurrency_limit=None)
        return Place(column, card, controls)

    def _own(self) -> gr.HTML:
        """-> where the visitor's own stream is shown"""
        first = next(iter(self.people.values()))[1]
        with gr.Row(elem_classes="users"):
            with gr.Column(min_width=330, elem_classes=["user", "yours"], elem_id="own-wish"):
                gr.HTML("<h3>Your own request, among theirs</h3>", apply_default_css=False)
                controls = Controls.of(first, self.most_ms, folds_prompt=False)
                with gr.Row():
                    write = gr.Button("Write", variant="primary", min_width=80, elem_id="own-write")
                    stop = gr.Button("Stop", min_width=80, elem_id="own-stop")
            with gr.Column(min_width=330, elem_classes=["user", "yours"]):
                card = gr.HTML(apply_default_css=False, elem_id="own-card")
        write.click(guarded(self.ask), controls.all, None, concurrency_limit=None)
        stop.click(guarded(self.stop_own), None, None, concurrency_limit=None)
        return card

    # ---- what controls do

    def add(self, name: str | None) -> None:
        person, wish = self.people[name or next(iter(self.people))]
        self.crowd.add(person, wish)

    def ask(self, request: gr.Request, *values: Any) -> None:
        self.crowd.ask(str(request.session_hash), wish_of(*values))

    def stop_own(self, request: gr.Request) -> None:
        self.crowd.stop_own(str(request.session_hash))

    def leave(self, request: gr.Request) -> None:
        self.crowd.leave(str(request.session_hash))

    def look(self, seen: dict[str, Any], request: gr.Request) -> list[Any]:
        """What has changed for this session. Controls are set only when another session changed them."""
        scene = self.crowd.look(str(request.session_hash))
        simulated, own, others = cards.cards(scene)
        policy = gr.skip() if scene.policy == seen["policy"] else scene.policy
        updates = [policy, cards.headline(scene), own or NOTHING_YET, others]
        for number, html in enumerate(simulated):
            updates += _place_updates(scene, number, html, seen["versions"][number])
        versions = [None if view is None else view.version for view in scene.simulated]
        return [{"policy": scene.policy, "versions": versions}, *updates]


NOTHING_YET = '<article class="card"><h3>You</h3><p class="dim">Your stream appears here.</p></article>'


def _place_updates(scene: Scene, number: int, html: str, seen: int | None) -> list[Any]:
    view = scene.simulated[number]
    version = None if view is None else view.version
    if version == seen:
        return [gr.skip(), html if view else gr.skip(), *[gr.skip()] * 6]
    return [gr.Column(visible=view is not None), html, *(shown(view.wish) if view else [gr.skip()] * 6)]


def guarded(handler: Callable[..., None]) -> Callable[..., None]:
    """What a visitor did wrong becomes a message on the page, and nothing else."""

    @functools.wraps(handler)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            handler(*args, **kwargs)
        except SLOSpecError as error:
            raise gr.Error(str(error), duration=8, print_exception=False) from error

    return run
