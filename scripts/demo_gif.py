"""Record the demo in Chromium as an animated GIF: ``python -m scripts.demo_gif docs/images/demo.gif``.

The page runs on the embedded pair for a while without speculation, then with ``auto``; what is seen is a real run at
its own speed. Needs gradio, playwright and Pillow (which comes with gradio), and a Chromium on the PATH.
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

from hf_slospec.demo.serve import Options, launch, prepare
from hf_slospec.serving.log_level import only_errors_logged

SIZE = dict(width=1420, height=745)  # four streams beside each other, from the policy to the end of the texts
WARM_UP_S = 4.0  # until all streams have a speed to show
COLOURS = 256
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]


def shots(page: Page, seconds: float, every_s: float) -> list[Image.Image]:
    """What is seen, at an even pace."""
    frames, begun_s = [], time.monotonic()
    for number in range(round(seconds / every_s)):
        page.wait_for_timeout(max(1e3 * (begun_s + number * every_s - time.monotonic()), 0.0))
        frames.append(Image.open(io.BytesIO(page.screenshot())).convert("RGB"))
    return frames


def record(url: str, seconds: float, every_s: float) -> list[Image.Image]:
    """A quarter of the time with plain decoding, then ``auto``."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport=SIZE)
        page.goto(url)
        page.wait_for_selector("#user-2 .verdict.kept, #user-2 .verdict.late", timeout=120_000)
        page.evaluate("window.scrollTo(0, document.querySelector('#policy').getBoundingClientRect().top - 12)")
        choose(page, "none")
        page.wait_for_timeout(1e3 * WARM_UP_S)
        frames = shots(page, seconds / 4.0, every_s)
        choose(page, "auto")
        frames += shots(page, 3.0 * seconds / 4.0, every_s)
        browser.close()
    return frames


def choose(page: Page, policy: str) -> None:
    page.locator(f"#policy input[value={policy}]").check()


def save(frames: list[Image.Image], path: Path, every_s: float, width: int) -> None:
    """All frames in one palette, made from a few of them."""
    height = round(width * frames[0].height / frames[0].width)
    small = [frame.resize((width, height), Image.Resampling.LANCZOS) for frame in frames]
    some = small[:: max(len(small) // 6, 1)]
    sheet = Image.new("RGB", (width, height * len(some)))
    for place, frame in enumerate(some):
        sheet.paste(frame, (0, height * place))
    palette = sheet.quantize(COLOURS, method=Image.Quantize.MEDIANCUT)
    drawn: list[Any] = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in small]
    drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=round(1e3 * every_s), loop=0, optimize=True)


def main(
    path: Path,
    seconds: Annotated[float, typer.Option(help="Length of the picture.")] = 16.0,
    every: Annotated[float, typer.Option(help="Seconds between two frames.")] = 0.4,
    width: Annotated[int, typer.Option(help="Pixels.")] = 900,
    size: Annotated[str, typer.Option(help="Of the embedded target.")] = Options.size,
) -> None:
    options = Options(size=size)
    with only_errors_logged():
        crowd, page = prepare(options, lambda words: print(words, file=sys.stderr))
        try:
            frames = record(launch(page, options), seconds, every)
        finally:
            page.close(verbose=False)
            crowd.generator.stop(drain=False)
    save(frames, path, every, width)
    print(f"{path}: {len(frames)} frames, {path.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    typer.run(main)
