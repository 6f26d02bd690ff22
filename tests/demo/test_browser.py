"""The demo as a visitor meets it, in Chromium. Pictures of it are left in the folder that
SCREENSHOTS names.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

import pytest

from hf_slospec.demo import race
from hf_slospec.demo.serve import Options, launch, prepare
from hf_slospec.server.model_options import ModelOptions
from tests.support.fixed_policy import always_drafting

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
if CHROMIUM is None:
    assert "REQUIRE_BROWSER" not in os.environ, (
        "browser tests are required, and Chromium is not installed"
    )
    pytest.skip("Chromium is not installed", allow_module_level=True)
if importlib.util.find_spec("gradio") is None:  # its import takes seconds
    pytest.skip("gradio is not installed", allow_module_level=True)
# Third parties' own deprecations, and event loops of servers that were closed, are not ours to fail
# on.
pytestmark = [pytest.mark.filterwarnings("default")]

WAIT_MS = 120_000
SCREENSHOTS = os.environ.get("SCREENSHOTS")  # drawing whole pages takes seconds
DESKTOP = dict(width=1280, height=800)
PHONE = dict(width=390, height=844)
ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZE = os.environ.get("DEMO_SIZE", "tiny")
PASSWORD = "only for tests"


@pytest.fixture(scope="module")
def served():
    sessions, page = prepare(Options(ModelOptions(size=SIZE), compile=False))
    yield sessions, launch(page, Options())
    page.close(verbose=False)
    sessions.generator.stop()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def desktop(browser):
    """A context that most visits share, so that what the page loads is read once."""
    return browser.new_context(viewport=DESKTOP)


class Visit:
    """One page of a browser, whose session is its own, and what went wrong in it."""

    def __init__(self, context, url):
        self.context = context
        self.page = context.new_page()
        self.page.set_default_timeout(WAIT_MS)
        self.errors = []
        self.outside = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self._note(request.url, url))
        self.page.goto(url)

    def _note(self, asked, home):
        if not asked.startswith((home, "data:", "blob:")):
            self.outside.append(asked)

    def card(self, place):
        return self.page.locator(f"#user-{place} .card")

    def text(self, selector):
        return str(self.page.locator(f"{selector} .text").inner_text())

    def writes(self, selector):
        """Wait for a text there."""
        self.grows(selector, "")

    def grows(self, selector, before=None):
        """Wait until the text there is another one, and not empty."""
        before = self.text(selector) if before is None else before
        self.page.wait_for_function(
            "([selector, before]) => { const own = document.querySelector(selector + ' .text');"
            " return own && own.innerText !== before && own.innerText.length > 3; }",
            arg=[selector, before],
        )

    def waits_for_layout(self, condition, *selectors):
        """Wait until all elements are there and their boxes, read at once, fulfil the condition."""
        self.page.wait_for_function(
            "selectors => { const own = selectors.map(one => document.querySelector(one));"
            " if (own.includes(null)) return false;"
            " const boxes = own.map(one => one.getBoundingClientRect());"
            f" return {condition}; }}",
            arg=selectors,
        )

    def says(self, selector, words):
        sync_api.expect(self.page.locator(selector)).to_contain_text(words, timeout=WAIT_MS)

    def shoot(self, name):
        if SCREENSHOTS is not None:
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


@pytest.fixture
def visit(browser, desktop, served):
    visits = []

    def begin(**options):
        context = browser.new_context(**options) if options else desktop
        visits.append(Visit(context, served[1]))
        return visits[-1]

    yield begin
    for own in visits:
        assert not own.outside, "something was asked of another host"
        assert not own.errors
        own.page.close() if own.context is desktop else own.context.close()


def test_three_streams_run_and_nothing_leaves_the_machine(visit, served):
    page = visit()
    users = [f"#user-{place}" for place in range(4)]
    page.waits_for_layout("boxes.every(box => box.y === boxes[0].y)", *users)  # four in a row
    for place in range(3):
        page.writes(f"#user-{place}")
        page.grows(f"#user-{place}")
    page.says("#headline", "tokens/s in total")
    with always_drafting(served[0].generator.generator):
        page.page.wait_for_selector(".user .text .d")  # tokens that the draft had guessed
    height = page.page.evaluate("document.documentElement.scrollHeight")
    assert height <= 2 * DESKTOP["height"]
    page.shoot("desktop")


def test_a_race_is_run_and_played_back(visit, monkeypatch):
    monkeypatch.setattr(race, "NUM_TOKENS", 24)
    page = visit()
    page.page.locator("#race-start").click()
    page.page.wait_for_selector(".live pre .t", state="attached")  # seen while it is decoded
    lanes = page.page.locator(".lane.replay")
    sync_api.expect(lanes).to_have_count(3, timeout=WAIT_MS)
    result = page.page.locator(".result .t")
    sync_api.expect(result).to_be_visible(timeout=WAIT_MS)  # at the end
    sync_api.expect(result).to_contain_text("er steps (forwards eager: compile=False)")
    assert "All three wrote the same 24 tokens" in result.inner_text()
    for lane in lanes.all():
        assert "ms/token" in lane.inner_text()
    page.shoot("race")


@pytest.mark.nightly
def test_speeds_are_shown_and_follow_the_slos(visit):
    page = visit()
    for place in range(3):
        page.page.wait_for_selector(f"#user-{place} .verdict.met, #user-{place} .verdict.missed")
    slos_ms = [
        float(re.findall(r"[\d.]+", page.card(place).locator(".slo-label").inner_text())[0])
        for place in range(3)
    ]
    assert slos_ms == sorted(slos_ms)
    page.page.wait_for_function(
        "() => { const [copilot, chat] = [0, 1].map(i => parseFloat("
        "document.querySelector(`#user-${i} .speed b`).innerText)); return copilot < chat; }"
    )


@pytest.mark.nightly
def test_an_slo_is_moved_for_everybody(visit):
    one = visit()
    other = visit()
    other.writes("#user-2")
    number = one.page.locator("#user-2 input[type=number]").first
    number.fill("7")
    number.blur()
    one.says("#user-2", "SLO 7 ms")
    other.says("#user-2", "SLO 7 ms")
    sync_api.expect(other.page.locator("#user-2 input[type=number]").first).to_have_value(
        "7", timeout=WAIT_MS
    )


@pytest.mark.nightly
def test_the_policy_is_switched_under_running_streams(visit):
    page = visit()
    other = visit()
    page.writes("#user-0")
    for name in ("none", "adaserve"):
        page.page.locator(f"#policy input[value={name}]").check()
        page.says("#headline", f"since “{name}” was chosen")
        sync_api.expect(other.page.locator(f"#policy input[value={name}]")).to_be_checked(
            timeout=WAIT_MS
        )
        page.grows("#user-0")
        page.shoot(f"policy-{name}")


def test_a_dead_engine_is_shown_and_can_be_started_again(visit, served):
    def fails(*_):
        raise RuntimeError("the accelerator fell off")

    page = visit()
    page.writes("#user-0")
    engine = served[0].generator.generator._service._engine()
    engine.target.verify = fails
    failed = page.page.locator(".user:has(.error)").first  # it served several in that step
    sync_api.expect(failed.locator(".error")).to_have_text(
        "the accelerator fell off", timeout=WAIT_MS
    )
    page.shoot("failed")
    place = f"#{failed.get_attribute('id')}"
    page.page.locator(place).get_by_role("button", name="Start again").click()
    page.grows(place)


@pytest.mark.parametrize("colors", [pytest.param("light", marks=pytest.mark.nightly), "dark"])
def test_it_fits_a_phone(visit, colors):
    page = visit(viewport=PHONE, color_scheme=colors, is_mobile=True, has_touch=True)
    page.writes("#user-0")
    width = page.page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    page.page.locator("#own-write").tap()
    page.writes("#own-card")
    # The policy and the visitor's answer are seen together without scrolling.
    in_order = "boxes[0].y < boxes[1].y && boxes[1].y < boxes[2].y"
    seen = f"boxes[1].bottom <= {PHONE['height']}"
    page.waits_for_layout(f"{in_order} && {seen}", "#policy", "#own-card", "#user-0")
    page.shoot(f"phone-{colors}")


def test_with_a_password_nobody_else_comes_in(browser, served):
    from hf_slospec.demo.layout import Page

    options = Options(password=PASSWORD)
    sessions = served[0]
    request = sessions.refresh("x").simulated[0].user_request
    closed = Page(sessions, request, 100, "<h1>The page</h1>").build()
    url = launch(closed, options)
    try:
        visit = Visit(browser.new_context(viewport=DESKTOP), url)
        name, password = (
            visit.page.locator("input").nth(0),
            visit.page.locator("input[type=password]"),
        )
        for given, words in (("guess", "Incorrect"), (PASSWORD, "The page")):
            name.fill("somebody")
            password.fill(given)
            visit.page.get_by_role("button", name="Login").click()
            visit.page.get_by_text(words).first.wait_for()
        visit.writes("#user-0")
        visit.context.close()
    finally:
        closed.close(verbose=False)
