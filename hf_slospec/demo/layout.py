"""The page in gradio: its components, their layout and their event handlers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

import gradio as gr

from hf_slospec.demo import cards
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_CHARS, Persona, UserRequest
from hf_slospec.demo.sessions import MAX_SIMULATED, DemoSessions
from hf_slospec.demo.stream import View
from hf_slospec.errors import SLOSpecError

REFRESH_S = 0.5
INTRO = """<h1>One model, many users, each with a speed target</h1>
<div class="intro"><p>All users below are served by <b>the same model at the same time</b>. Each may set a <b>speed
target</b>: at most so many milliseconds per output token (TPOT). <span class="more">A drafter{drafter} proposes the
next tokens, the large target model checks the proposals of all users in one step, and the <b>policy</b> decides whose
proposals are checked: users below their speed target come first. The text is the one that the target model writes
alone.</span> You may <a href="#own-request">send a request of your own</a>.</p></div>"""
SWITCH = "Switch it and see which speed targets are met."
EMBEDDED = """<p class="dim">These models are tiny and were trained on Python source, so all answers are Python-like
nonsense. Speeds, drafts and speed targets are real.</p>"""
LEGEND = """<p class="legend">In the texts, <span class="d">underlined</span> tokens were proposed by the drafter
and accepted; all others were chosen by the target model. The vertical line in a bar is the user's speed target.</p>"""
POLICIES = [
    ("auto: drafts where it pays off, users below their speed target first", "auto"),
    ("adaserve: the whole token budget in every step", "adaserve"),
    ("fixed: four draft tokens for every user", "fixed"),
    ("none: no speculation", "none"),
]


@dataclass(frozen=True)
class Controls:
    """Input fields of one user's request."""

    prompt: gr.Textbox
    tpot_slo_ms: gr.Slider
    has_slo: gr.Checkbox
    temperature: gr.Slider
    top_p: gr.Slider
    max_new_tokens: gr.Slider

    @classmethod
    def of(cls, request: UserRequest, max_slo_ms: float, folds_prompt: bool) -> Controls:
        """Create the fields with the values of ``request``.

        Args:
            request: initial values.
            max_slo_ms: right end of the speed target's slider, in milliseconds.
            folds_prompt: put the prompt into the accordion, which is closed at first.
        """
        prompt: Any = gr.Textbox(
            request.prompt,
            lines=4,
            max_lines=8,
            max_length=MAX_PROMPT_CHARS,
            label="Prompt",
            render=not folds_prompt,
        )
        tpot_slo_ms = gr.Slider(
            *(1, max_slo_ms, request.tpot_slo_ms or max_slo_ms),
            step=1,
            label="Speed target (ms per token)",
            min_width=200,
            visible=request.tpot_slo_ms is not None,
        )
        with gr.Accordion("Prompt and sampling" if folds_prompt else "Sampling", open=False):
            if folds_prompt:
                prompt.render()
            return cls(
                prompt,
                tpot_slo_ms,
                gr.Checkbox(request.tpot_slo_ms is not None, label="Set a speed target"),
                gr.Slider(0, 1.5, request.temperature, step=0.1, label="Temperature (0: greedy)"),
                gr.Slider(0.1, 1, request.top_p, step=0.05, label="Top-p"),
                gr.Slider(16, MAX_NEW_TOKENS, request.max_new_tokens, step=16, label="New tokens"),
            )

    @property
    def all(self) -> list[Any]:
        """The fields in the order of :func:`request_of`'s arguments."""
        return list(vars(self).values())


def request_of(
    prompt: str | None,
    tpot_slo_ms: float,
    has_slo: bool,
    temperature: float,
    top_p: float,
    max_new_tokens: int,
) -> UserRequest:
    """Return the request with the values of the controls; arguments are as in Controls.all."""
    return UserRequest(
        prompt=prompt or "", tpot_slo_ms=tpot_slo_ms if has_slo else None, temperature=temperature, top_p=top_p,
        max_new_tokens=max_new_tokens,
    )  # fmt: skip


def control_values(request: UserRequest) -> list[Any]:
    slo_ms = request.tpot_slo_ms
    slider = gr.Slider(visible=False) if slo_ms is None else gr.Slider(value=slo_ms, visible=True)
    return [
        request.prompt,
        slider,
        slo_ms is not None,
        request.temperature,
        request.top_p,
        request.max_new_tokens,
    ]


@dataclass(frozen=True)
class Panel:
    """Components of one simulated user."""

    column: gr.Column
    card: gr.HTML
    controls: Controls

    @property
    def all(self) -> list[Any]:
        """All components, in the order in which :meth:`Page.refresh` returns updates."""
        return [self.column, self.card, *self.controls.all]


@dataclass(frozen=True)
class Page:
    """The page, with one session per visitor.

    Args:
        personas: the simulated users that can be added, with their requests, by name.
        max_slo_ms: right end of the speed target sliders, in milliseconds.
        note: HTML that follows the introduction.
    """

    sessions: DemoSessions
    personas: dict[str, tuple[Persona, UserRequest]]
    max_slo_ms: float
    note: str

    def build(self) -> gr.Blocks:
        """Create the components and connect their events."""
        page: gr.Blocks
        with gr.Blocks(title="hf_slospec demo", analytics_enabled=False, fill_width=True) as page:
            drafter = self.sessions.generator.drafter
            now = self.sessions.generator.policy
            intro = INTRO.format(drafter=f" ({escape(drafter)})")
            gr.HTML(intro + self.note, apply_default_css=False, elem_id="intro")
            policy = gr.Radio(
                list(POLICIES),
                value=now,
                label="Policy (for all users)",
                info=SWITCH,
                elem_id="policy",
            )
            head = gr.HTML(apply_default_css=False, elem_id="headline")
            gr.HTML(LEGEND, apply_default_css=False, elem_id="legend")
            with gr.Row(elem_classes=["users", "simulated"]):
                panels = [self._panel(index) for index in range(MAX_SIMULATED)]
            with gr.Row(elem_classes="adding"):
                persona = gr.Dropdown(
                    list(self.personas), label="Another simulated user", min_width=180
                )
                add = gr.Button("Add user", elem_id="add", min_width=120)
            own_card = self._own_panel()
            other_cards = gr.HTML(apply_default_css=False, elem_id="others")
            sent = gr.State({"policy": "", "shown": "", "versions": [None] * MAX_SIMULATED})
            outputs = [
                sent,
                policy,
                head,
                own_card,
                other_cards,
                *(part for panel in panels for part in panel.all),
            ]
            for event in (page.load, gr.Timer(REFRESH_S).tick):
                event(self.refresh, [sent, policy], outputs, show_progress="hidden", queue=False)
            handle(policy.input, self.sessions.set_policy, policy, show_progress="hidden")
            handle(add.click, self.add, persona)
            page.unload(self.leave)
        return page

    def _panel(self, index: int) -> Panel:
        with gr.Column(
            min_width=300, visible=False, elem_classes="user", elem_id=f"user-{index}"
        ) as column:
            card = gr.HTML(apply_default_css=False)
            controls = Controls.of(
                next(iter(self.personas.values()))[1], self.max_slo_ms, folds_prompt=True
            )
            with gr.Row():
                start = gr.Button("Start again", size="sm", min_width=60)
                stop = gr.Button("Stop", size="sm", min_width=60)
                remove = gr.Button("Remove", size="sm", min_width=60)

        def change(*values: Any) -> None:
            self.sessions.change(index, request_of(*values))

        for event in (start.click, controls.tpot_slo_ms.release, controls.has_slo.input):
            handle(event, change, controls.all, show_progress="hidden")
        handle(stop.click, lambda: self.sessions.stop(index))
        handle(remove.click, lambda: self.sessions.remove(index))
        return Panel(column, card, controls)

    def _own_panel(self) -> gr.HTML:
        """Create the panel of the visitor's own request, and return the component of its card."""
        first = next(iter(self.personas.values()))[1]
        with gr.Row(elem_classes="users"):
            with gr.Column(min_width=330, elem_classes=["user", "yours"], elem_id="own-request"):
                gr.HTML("<h3>Your own request</h3>", apply_default_css=False)
                controls = Controls.of(first, self.max_slo_ms, folds_prompt=False)
                with gr.Row():
                    write = gr.Button("Write", variant="primary", min_width=80, elem_id="own-write")
                    stop = gr.Button("Stop", min_width=80, elem_id="own-stop")
            with gr.Column(min_width=330, elem_classes=["user", "yours"]):
                card = gr.HTML(apply_default_css=False, elem_id="own-card")
        handle(write.click, self.ask, controls.all)
        handle(stop.click, self.stop_own)
        return card

    # ---- event handlers

    def add(self, name: str | None) -> None:
        """Add the simulated user of this name, or the first one."""
        self.sessions.add(*self.personas[name or next(iter(self.personas))])

    def ask(self, request: gr.Request, *values: Any) -> None:
        """Start the visitor's own request."""
        self.sessions.ask(str(request.session_hash), request_of(*values))

    def stop_own(self, request: gr.Request) -> None:
        self.sessions.stop_own(str(request.session_hash))

    def leave(self, request: gr.Request) -> None:
        self.sessions.leave(str(request.session_hash))

    def refresh(self, sent: dict[str, Any], shown: str | None, request: gr.Request) -> list[Any]:
        """Return the updates of all components for this session.

        Args:
            sent: state after the previous refresh: the policy and the versions of requests that
                were sent to the session, and the policy that it showed. Controls are updated only
                if another session changed them.
            shown: policy that the session's page shows. If it is not the current policy, it is
                corrected only when two refreshes in a row see it: at the first one, the visitor may
                have chosen it just now, as events may overtake each other.
            request: identifies the session.
        """
        scene = self.sessions.refresh(str(request.session_hash))
        simulated, own_card, other_cards = cards.cards(scene)
        is_current = scene.policy == sent["policy"] and (
            shown == scene.policy or shown != sent["shown"]
        )
        policy = gr.skip() if is_current else scene.policy
        updates = [policy, cards.headline(scene), own_card or EMPTY_CARD, other_cards]
        for view, html, version in zip(scene.simulated, simulated, sent["versions"], strict=True):
            updates += _panel_updates(view, html, version)
        versions = [None if view is None else view.version for view in scene.simulated]
        return [{"policy": scene.policy, "shown": shown, "versions": versions}, *updates]


EMPTY_CARD = (
    '<article class="card"><h3>You</h3><p class="dim">Your stream appears here.</p></article>'
)


def _panel_updates(view: View | None, html: str, sent: int | None) -> list[Any]:
    version = None if view is None else view.version
    if version == sent:
        return [gr.skip(), html if view else gr.skip(), *[gr.skip()] * 6]
    return [
        gr.Column(visible=view is not None),
        html,
        *(control_values(view.user_request) if view else [gr.skip()] * 6),
    ]


def handle(
    event: Callable[..., Any], handler: Callable[..., None], inputs: Any = None, **options: Any
) -> None:
    """Run ``handler`` at an event of a component, and show this package's errors on the page."""

    @functools.wraps(handler)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            handler(*args, **kwargs)
        except SLOSpecError as error:
            raise gr.Error(str(error), duration=8, print_exception=False) from error

    event(run, inputs, None, concurrency_limit=None, **options)
