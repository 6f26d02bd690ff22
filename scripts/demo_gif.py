"""Record the demo in Chromium as an animated GIF: ``python -m scripts.demo_gif docs/images/demo.gif``.

The page runs on the embedded pair, first without speculation, then with policy ``auto``. The recording is a real run at
its real speed. Needs gradio, playwright and Pillow (installed with gradio), and Chromium on the PATH.
"""

from __future__ import annotations

import io
import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from hf_slospec.demo import SIZE as MODEL_SIZE
from hf_slospec.demo.serve import Options, launch, prepare
from hf_slospec.serving.log_level import only_errors_logged
from hf_slospec.serving.options import ModelOptions

SIZE = dict(width=1420, height=745)  # four streams side by side, from the policy control to the end of the texts
WARM_UP_S = 4.0  # until all streams have a measured speed
NUM_COLOURS = 256
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def screenshots(page: Page, seconds: float, every_s: float) -> list[Image.Image]:
    """Return screenshots at regular intervals."""
    frames, begun_s = [], time.monotonic()
    for number in range(round(seconds / every_s)):
        page.wait_for_timeout(max(1e3 * (begun_s + number * every_s - time.monotonic()), 0.0))
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return frames


def record(url: str, seconds: float, every_s: float) -> list[Image.Image]:
    """Return screenshots of plain decoding for a quarter of the time, then of policy ``auto``."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_selector("#user-2 .verdict.met, #user-2 .verdict.missed", timeout=120_000)
        page.evaluate("window.scrollTo(0, document.querySelector('#policy').getBoundingClientRect().top - 12)")
        select_policy(page, "none")
        page.wait_for_timeout(1e3 * WARM_UP_S)
        frames = screenshots(page, seconds / 4.0, every_s)
        select_policy(page, "auto")
        frames += screenshots(page, 3.0 * seconds / 4.0, every_s)
        browser.close()
    return frames


def select_policy(page: Page, policy: str) -> None:
    """Select a policy on the page."""
    page.locator(f"#policy input[value={policy}]").check()


def save(frames: list[Image.Image], path: Path, every_s: float, width: int) -> None:
    """Write the frames as a GIF with one palette, made from a few of them."""
    height = round(width * frames[0].height / frames[0].width)
    small = [frame.resize((width, height), Image.Resampling.LANCZOS) for frame in frames]
    samples = small[:: max(len(small) // 6, 1)]
    sheet = Image.new("RGB", (width, height * len(samples)))
    for index, frame in enumerate(samples):
        sheet.paste(frame, (0, height * index))
    palette = sheet.quantize(NUM_COLOURS, method=Image.Quantize.MEDIANCUT)
    drawn: list[Any] = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=round(1e3 * every_s), loop=0, optimize=True)


def main(
    path: Path,
    seconds: Annotated[float, typer.Option(help="Length of the recording.")] = 16.0,
    every: Annotated[float, typer.Option(help="Seconds between frames.")] = 0.4,
    width: Annotated[int, typer.Option(help="Width in pixels.")] = 900,
    size: Annotated[str, typer.Option(help="Size of the embedded target.")] = MODEL_SIZE,
) -> None:
    """Record the demo as an animated GIF."""
    options = Options(ModelOptions(size=size))
    with only_errors_logged():
        sessions, page = prepare(options, lambda message: print(message, file=sys.stderr))
        try:
            frames = record(launch(page, options), seconds, every)
        finally:
            page.close(verbose=False)
            sessions.generator.stop()
    save(frames, path, every, width)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
