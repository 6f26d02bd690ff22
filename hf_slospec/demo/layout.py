"""The page in gradio: its components, their layout and their event handlers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from hf_slospec.demo import cards
from hf_slospec.demo.generator import POLICIES
from hf_slospec.demo.personas import MAX_NEW_TOKENS, MAX_PROMPT_CHARS, UserRequest
from hf_slospec.demo.race import Race
from hf_slospec.demo.sessions import DemoSessions
from hf_slospec.errors import SLOSpecError

REFRESH_S = 0.5
INTRO = """<h1>hf_slospec: the tokens of stock generate, sooner</h1>
<div class="intro"><p class="dim">{model}; drafts: {drafter}. {note}</p></div>"""
EMBEDDED = "Trained on Python source, it writes Python-like nonsense; all speeds are measured."
USERS = """<div class="intro"><h2>Many users of one model, each with an SLO</h2>
<p class="more">An <b>SLO</b> is at most so many milliseconds per output token (the line in the bar). A drafter proposes
tokens, the model checks those of all users in one step, and the policy decides whose are checked.
<span class="d">Underlined</span> tokens are accepted drafts.</p></div>"""
SWITCH = "; ".join(f"{name}: {words}" for name, words in POLICIES.items())


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
            max_slo_ms: right end of the SLO's slider, in milliseconds.
            folds_prompt: put the prompt into the accordion, which is closed at first.
        """
        prompt: Any = gr.Textbox(
            request.prompt,
            lines=4,
            max_lines=4,
            max_length=MAX_PROMPT_CHARS,
            label="Prompt" if folds_prompt else "Your prompt",
            render=not folds_prompt,
        )
        with gr.Column(min_width=150, elem_classes="settings"):
            tpot_slo_ms = gr.Slider(
                *(1, max_slo_ms, request.tpot_slo_ms or max_slo_ms),
                step=1,
                label="SLO (ms per token)",
                min_width=120,
                visible=request.tpot_slo_ms is not None,
            )
            with gr.Accordion("Prompt, sampling" if folds_prompt else "Sampling", open=False):
                if folds_prompt:
                    prompt.render()
                return cls(
                    prompt,
                    tpot_slo_ms,
                    gr.Checkbox(request.tpot_slo_ms is not None, label="Set an SLO"),
                    gr.Slider(0, 1.5, request.temperature, step=0.1, label="Temperature"),
                    gr.Slider(0.1, 1, request.top_p, step=0.05, label="Top-p"),
                    gr.Slider(16, MAX_NEW_TOKENS, request.max_new_tokens, step=16, label="Tokens"),
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
class Page:
    """The page, with one session per visitor.

    Args:
        first: the visitor's request before any change.
        max_slo_ms: right end of the SLO sliders, in milliseconds.
        intro: HTML of the page's head.
    """

    sessions: DemoSessions
    first: UserRequest
    max_slo_ms: float
    intro: str

    def build(self) -> gr.Blocks:
        """Create the components and connect their events."""
        page: gr.Blocks
        with gr.Blocks(title="hf_slospec demo", analytics_enabled=False, fill_width=True) as page:
            scene = self.sessions.refresh("").blank()  # until the first refresh
            gr.HTML(self.intro, apply_default_css=False, elem_id="intro")
            self._own_controls()
            with gr.Row(elem_id="race-row"):
                race = gr.HTML(self._race_html(None), apply_default_css=False, elem_id="race")
                own_card = gr.HTML(EMPTY_CARD, apply_default_css=False, elem_id="own-card")
            gr.HTML(USERS, apply_default_css=False, elem_id="users")
            policy = gr.Radio(
                list(POLICIES),
                value=scene.policy,
                label="Policy (a change starts all answers and counts again)",
                info=SWITCH,
                elem_id="policy",
            )
            head = gr.HTML(cards.headline(scene), apply_default_css=False, elem_id="headline")
            with gr.Row(elem_classes="users"):
                panels = [
                    self._panel(index, view.user_request, html)
                    for index, (view, html) in enumerate(
                        zip(scene.simulated, cards.cards(scene)[0], strict=True)
                    )
                ]
            sent = gr.State(
                {"policy": "", "shown": "", "versions": [0] * len(panels), "race": None}
            )
            outputs = [
                sent,
                policy,
                head,
                race,
                own_card,
                *(part for panel in panels for part in panel),
            ]
            for event in (page.load, gr.Timer(REFRESH_S).tick):
                event(self.refresh, [sent, policy], outputs, show_progress="hidden", queue=False)
            handle(policy.input, self.sessions.set_policy, policy, show_progress="hidden")
            page.unload(self.leave)
        return page

    def _panel(self, index: int, request: UserRequest, html: str) -> list[Any]:
        """Create the panel of a simulated user, and return its card and its fields."""
        with gr.Column(min_width=230, elem_classes="user", elem_id=f"user-{index}"):
            card = gr.HTML(html, apply_default_css=False)
            controls = Controls.of(request, self.max_slo_ms, folds_prompt=True)
            with gr.Row():
                start = gr.Button("Start again", size="sm", min_width=60)
                stop = gr.Button("Stop", size="sm", min_width=60)

        def change(*values: Any) -> None:
            self.sessions.change(index, request_of(*values))

        for event in (start.click, controls.tpot_slo_ms.release, controls.has_slo.input):
            handle(event, change, controls.all, show_progress="hidden")
        handle(stop.click, lambda: self.sessions.stop(index))
        return [card, *controls.all]

    def _own_controls(self) -> None:
        """Create the fields and buttons of the visitor's own prompt."""
        with gr.Row(elem_id="own-request"):
            controls = Controls.of(self.first, self.max_slo_ms, folds_prompt=False)
            with gr.Column(min_width=180, elem_classes="buttons"):
                race = gr.Button("Race", variant="primary", elem_id="race-start")
                write = gr.Button("Write", elem_id="own-write")
                stop = gr.Button("Stop", elem_id="own-stop")
        handle(race.click, self.race, controls.prompt, show_progress="hidden")
        handle(write.click, self.ask, controls.all, show_progress="hidden")
        handle(stop.click, self.stop_own, show_progress="hidden")

    # ---- event handlers

    def ask(self, request: gr.Request, *values: Any) -> None:
        """Start the visitor's own request."""
        self.sessions.ask(str(request.session_hash), request_of(*values))

    def race(self, request: gr.Request, prompt: str | None) -> None:
        """Run a race with the visitor's prompt."""
        self.sessions.race(str(request.session_hash), prompt or "")

    def _race_html(self, race: Race | None) -> str:
        return cards.race_html(race, self.sessions.generator.to_text)

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
        simulated, own_card = cards.cards(scene)
        is_current = scene.policy == sent["policy"] and (
            shown == scene.policy or shown != sent["shown"]
        )
        policy = gr.skip() if is_current else scene.policy
        # A race that is done plays back by itself in the browser.
        race = None if scene.race is None or not scene.race.is_done else id(scene.race)
        shows_race = race is not None and race == sent["race"]
        race_html = gr.skip() if shows_race else self._race_html(scene.race)
        updates = [policy, cards.headline(scene), race_html, own_card or EMPTY_CARD]
        for view, html, version in zip(scene.simulated, simulated, sent["versions"], strict=True):
            is_sent = view.version == version
            fields = [gr.skip()] * 6 if is_sent else control_values(view.user_request)
            updates += [html, *fields]
        versions = [view.version for view in scene.simulated]
        now = {"policy": scene.policy, "shown": shown, "versions": versions, "race": race}
        return [now, *updates]


EMPTY_CARD = """<article class="card empty"><header><h3>You, among the users</h3></header><p class="dim">“Write”
writes your answer here, while the users below are served.</p></article>"""


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
