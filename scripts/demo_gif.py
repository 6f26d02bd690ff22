"""Record the demo in Chromium: ``python -m scripts.demo_gif docs/images/demo.gif --picture
docs/images/demo.png``.

The GIF shows the same four requests twice, one above the other: without speculation, and with
policy ``auto``. Both were recorded at their real speed, one after the other. ``--target`` names a
model, such as build/checkpoints/SmolLM2-135M-Instruct; the default is the embedded pair. Needs
gradio, playwright, Pillow (installed with gradio) and Chromium on the PATH.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, sync_playwright

from hf_slospec.demo import SIZE as MODEL_SIZE
from hf_slospec.demo.serve import Options, launch, prepare
from hf_slospec.demo.sessions import DemoSessions
from hf_slospec.server.model_options import ModelOptions, only_errors_logged

SIZE = dict(
    width=1420, height=1180
)  # four streams side by side, from the headline to their controls
CAPTIONS = {
    "none": "No speculation",
    "auto": "Policy auto: speculation, users below their speed target first",
}
CAPTION_PX = 34
WARM_UP_S = 4.0  # until all streams have a measured speed
NUM_COLOURS = 256
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
]


def record(
    url: str, sessions: DemoSessions, seconds: float, every_s: float, picture: Path | None
) -> dict[str, list[Image.Image]]:
    """Return screenshots by policy, from the moment at which all simulated users ask; write one of
    the whole page.
    """
    chromium = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_selector("#user-2 .verdict.met, #user-2 .verdict.missed", timeout=120_000)
        frames = {}
        for policy in CAPTIONS:
            sessions.set_policy(policy)
            restart(sessions)
            page.wait_for_timeout(1e3 * WARM_UP_S)
            restart(sessions)
            frames[policy] = screenshots(page, seconds, every_s)
        if picture is not None:
            page.screenshot(path=picture)
        browser.close()
    return frames


def restart(sessions: DemoSessions) -> None:
    """Let all simulated users ask again, greedily, so that the answers are the same with all
    policies.
    """
    for index, view in enumerate(sessions.refresh("recording").simulated):
        if view is not None:
            sessions.change(index, view.user_request.model_copy(update={"temperature": 0.0}))


def screenshots(page: Page, seconds: float, every_s: float) -> list[Image.Image]:
    """Return screenshots of headline and streams at regular intervals."""
    top, bottom = (page.locator(name).bounding_box() for name in ("#headline", "#user-0 .figures"))
    assert top is not None and bottom is not None
    height = bottom["y"] + bottom["height"] - top["y"] + 8.0
    clip: Any = {"x": 0, "y": top["y"], "width": SIZE["width"], "height": height}
    frames = []
    begun_s = time.monotonic()
    for number in range(round(seconds / every_s)):
        page.wait_for_timeout(max(1e3 * (begun_s + number * every_s - time.monotonic()), 0.0))
        frames.append(Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB"))
    return frames


def stacked(frames: dict[str, list[Image.Image]], every_s: float) -> list[Image.Image]:
    """Return one frame a moment, with the policies above each other under their captions."""
    font = ImageFont.load_default(0.6 * CAPTION_PX)
    made = []
    for number, images in enumerate(zip(*frames.values(), strict=True)):
        sheet = Image.new(
            "RGB", (images[0].width, sum(CAPTION_PX + image.height for image in images)), "white"
        )
        draw = ImageDraw.Draw(sheet)
        y = 0
        for policy, image in zip(frames, images, strict=True):
            draw.rectangle((0, y, sheet.width, y + CAPTION_PX), fill="#0072b2")
            caption = f"{CAPTIONS[policy]}, after {number * every_s:.1f} s"
            draw.text((14, y + CAPTION_PX / 2), caption, "white", font, anchor="lm")
            sheet.paste(image, (0, y + CAPTION_PX))
            y += CAPTION_PX + image.height
        made.append(sheet)
    return made


def save(frames: list[Image.Image], path: Path, every_s: float, width: int) -> None:
    """Write the frames as a GIF with one palette, made from a few of them; the last one stays for
    two seconds.
    """
    height = round(width * frames[0].height / frames[0].width)
    small = [frame.resize((width, height), Image.Resampling.LANCZOS) for frame in frames]
    samples = small[:: max(len(small) // 6, 1)]
    sheet = Image.new("RGB", (width, height * len(samples)))
    for index, frame in enumerate(samples):
        sheet.paste(frame, (0, height * index))
    palette = sheet.quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT)
    drawn: list[Any] = [
        frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small
    ]
    durations = [round(1e3 * every_s)] * (len(drawn) - 1) + [2000]
    drawn[0].save(
        path, save_all=True, append_images=drawn[1:], duration=durations, loop=0, optimize=True
    )


def main(
    path: Path,
    seconds: Annotated[float, typer.Option(help="Length of the recording.")] = 12.0,
    every: Annotated[float, typer.Option(help="Seconds between frames.")] = 0.4,
    width: Annotated[int, typer.Option(help="Width in pixels.")] = 900,
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
            frames = record(launch(page, options), sessions, seconds, every, picture)
        finally:
            page.close(verbose=False)
            sessions.generator.stop()
    save(stacked(frames, every), path, every, width)
    print(
        f"{path}: {len(frames['auto'])} frames, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr
    )


if __name__ == "__main__":
    typer.run(main)
