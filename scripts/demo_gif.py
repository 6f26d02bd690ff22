"""Record the demo in Chromium: ``python -m scripts.demo_gif docs/images/demo.gif --picture
docs/images/demo.png --target build/checkpoints/SmolLM2-135M-Instruct``.

The GIF shows the race of the demo's first prompt: stock ``generate``, this package without drafts,
and with drafts, played back at the speed at which they were decoded. Frames are drawn from the
page's own animations after the race, so that drawing takes no time from it. The picture is a
screenshot of the whole page. Of several races, the one with the median speed-up is shown; close
other programs before. Needs gradio, playwright, Pillow (installed with gradio) and Chromium on the
PATH.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from hf_slospec.demo import SIZE as MODEL_SIZE
from hf_slospec.demo.race import Race
from hf_slospec.demo.serve import Options, launch, prepare
from hf_slospec.demo.sessions import DemoSessions
from hf_slospec.server.model_options import ModelOptions, only_errors_logged

SIZE = dict(width=1280, height=800)
RECORDER = "recorder"  # the visitor whose races are recorded
PICTURE_S = 15.0  # seconds for which users write before the picture is taken
LAST_S = 4.0  # seconds for which the last frame, with the result, stays
NUM_COLOURS = 128
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]
# Stops all animations of the race at a time in milliseconds.
SEEK = """(ms) => { for (const each of document.querySelector('#race').getAnimations({subtree: true}))
    { each.pause(); each.currentTime = ms; } }"""


def gain(race: Race) -> float:
    """Return TPOT of stock ``generate`` / TPOT with drafts."""
    return (race.lanes[0].tpot_s or 0.0) / (race.lanes[-1].tpot_s or 1.0)


def median_race(sessions: DemoSessions, prompt: str, num_races: int) -> Race:
    """Run races, and return the one with the median speed-up."""
    races = []
    for _ in range(num_races):
        sessions.race(RECORDER, prompt)
        races.append(sessions.refresh(RECORDER).race)
        print(f"race: {gain(races[-1]):.2f}x", file=sys.stderr)
    return sorted(races, key=gain)[num_races // 2]


def record(
    url: str, sessions: DemoSessions, every_s: float, num_races: int, picture: Path | None
) -> list[Image.Image]:
    """Return screenshots of the race at regular intervals; write one of the whole page."""
    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next(filter(None, map(shutil.which, names)), None)
    prompt = sessions.refresh(RECORDER).simulated[0].user_request.prompt
    race = median_race(sessions, prompt, num_races)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE, reduced_motion="no-preference")
        page.goto(url)
        page.wait_for_selector("#user-0 .verdict.met, #user-0 .verdict.missed")
        visitor = next(key for key in sessions._refreshed_s if key not in ("", RECORDER))
        sessions._races[visitor] = race
        page.wait_for_selector(".lane.replay")
        page.evaluate(SEEK, 1e6)
        sessions.set_policy("none")  # and back: all answers start together
        sessions.set_policy("auto")
        page.wait_for_timeout(1e3 * PICTURE_S)
        if picture is not None:
            page.screenshot(path=picture, full_page=True)
        frames = screenshots(page, race, every_s)
        browser.close()
    return frames


def screenshots(page: Page, race: Race, every_s: float) -> list[Image.Image]:
    """Return screenshots of the race as it is played back."""
    clip: Any = page.locator("#race").bounding_box()
    end_s = max(lane.read()[-1].at_s for lane in race.lanes)
    frames = []
    for number in range(int(end_s / every_s) + 2):
        page.evaluate(SEEK, 1e3 * every_s * number)
        frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    return frames


def save(frames: list[Image.Image], path: Path, every_s: float) -> None:
    """Write the frames as a GIF with the palette of the last one."""
    palette = frames[-1].quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT)
    drawn: list[Any] = [
        frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames
    ]
    durations = [round(1e3 * every_s)] * (len(drawn) - 1) + [round(1e3 * LAST_S)]
    drawn[0].save(
        path, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True
    )


def main(
    path: Path,
    every: Annotated[float, typer.Option(help="Seconds between frames.")] = 0.1,
    races: Annotated[int, typer.Option(help="Number of races.")] = 5,
    size: Annotated[str, typer.Option(help="Size of the embedded target.")] = MODEL_SIZE,
    target: Annotated[
        str | None, typer.Option(help="A model in place of the embedded pair.")
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="As for `hf_slospec demo`.")] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Also write a screenshot of the page to this PNG.")
    ] = None,
) -> None:
    """Record the demo as an animated GIF."""
    options = Options(ModelOptions(target=target, drafter=drafter, size="tiny" if target else size))
    with only_errors_logged():
        sessions, page = prepare(options, lambda message: print(message, file=sys.stderr))
        try:
            frames = record(launch(page, options), sessions, every, races, picture)
        finally:
            page.close(verbose=False)
            sessions.generator.stop()
    save(frames, path, every)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
