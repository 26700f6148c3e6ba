"""Film a session of the lab as an animated GIF: `python tools/film_lab.py docs/pictures/lab.gif`.

A script of actions runs in the machine's Chromium against a lab with the downloaded models; every action leaves one or
more frames. `--stills FOLDER` also saves the last frame of each scene as a PNG.
"""

from __future__ import annotations

import argparse
import io
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from regard.render.colors import CURVES, DARK, HEADS, LIGHT

SIZE = (1280, 800)
FILMED = (1024, 640)
COLORS = 96
MOST_BYTES = 8_000_000
SENTENCE = "The keys to the old cabinet are on the table, and she knows where they belong."
CAPTION = """(text) => {
  let box = document.getElementById("film-caption");
  if (!box) {
    box = document.createElement("div");
    box.id = "film-caption";
    box.style.cssText = "position:fixed;left:50%;bottom:22px;transform:translateX(-50%);z-index:9;"
      + "padding:.55rem 1.3rem;border-radius:99px;"
      + "background:#14161aee;color:#fff;font:600 19px system-ui,'DejaVu Sans',sans-serif";
    document.body.append(box);
  }
  box.textContent = text;
}"""
DOT = """([x, y]) => {
  let dot = document.getElementById("film-dot");
  if (!dot) {
    dot = document.createElement("div");
    dot.id = "film-dot";
    dot.style.cssText = "position:fixed;z-index:10;width:20px;height:20px;margin:-10px;border-radius:50%;"
      + "background:#c2410c99;border:2px solid #fff;pointer-events:none";
    document.body.append(dot);
  }
  dot.style.left = x + "px";
  dot.style.top = y + "px";
}"""


class Film:
    """The frames of a film, and how long each is seen."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.frames: list[Image.Image] = []
        self.milliseconds: list[int] = []

    def shoot(self, milliseconds: int = 250) -> None:
        picture = Image.open(io.BytesIO(self.page.screenshot())).convert("RGB")
        self.frames.append(picture.resize(FILMED, Image.Resampling.LANCZOS))
        self.milliseconds.append(milliseconds)

    def say(self, text: str, milliseconds: int = 1600) -> None:
        self.page.evaluate(CAPTION, text)
        self.shoot(milliseconds)

    def click(self, target: Any, milliseconds: int = 500, wait: str = "") -> None:
        target.scroll_into_view_if_needed()
        box = target.bounding_box()
        self.page.evaluate(DOT, [box["x"] + box["width"] / 2, box["y"] + box["height"] / 2])
        self.shoot(300)
        target.click()
        if wait:
            self.page.wait_for_selector(wait)
        self.page.wait_for_timeout(250)
        self.shoot(milliseconds)

    def type(self, target: Any, text: str, step: int = 6) -> None:
        target.fill("")
        for end in range(step, len(text) + step, step):
            target.fill(text[:end])
            self.shoot(110)

    def press(self, key: str, times: int, milliseconds: int = 350) -> None:
        for _ in range(times):
            self.page.keyboard.press(key)
            self.page.wait_for_timeout(220)
            self.shoot(milliseconds)

    def save(self, path: Path) -> None:
        """One palette for all frames, so that what does not change costs nothing."""
        sheet = Image.new("RGB", (FILMED[0] // 4, FILMED[1] // 4 * len(self.frames[::4])))
        for place, frame in enumerate(self.frames[::4]):
            sheet.paste(frame.resize((FILMED[0] // 4, FILMED[1] // 4)), (0, place * (FILMED[1] // 4)))
        self._add_accents(sheet)
        palette = sheet.quantize(COLORS)
        drawn = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in self.frames]
        drawn[0].save(path, save_all=True, append_images=drawn[1:], duration=self.milliseconds, loop=0, optimize=True)

    def _add_accents(self, sheet: Image.Image) -> None:
        """Colors that cover few pixels, and would have none of the palette's otherwise."""
        names = (*HEADS, *CURVES, LIGHT["query"], DARK["query"], LIGHT["holds"], DARK["holds"], LIGHT["broken"])
        side = FILMED[0] // 4 // len(names)
        for place, name in enumerate(names):
            sheet.paste(name, (place * side, 0, (place + 1) * side, 6 * side))


def look(film: Film) -> None:
    page = film.page
    page.wait_for_selector("textarea")
    film.say("Any model of yours, in your browser, offline", 1800)
    film.type(page.locator("textarea"), SENTENCE)
    film.click(page.get_by_role("button", name="Look", exact=True), 1500, "regard-overview[data-ready]")
    film.say("Every head of every layer", 1500)
    page.locator("regard-overview select").select_option("previous:down")
    film.say("Sorted by what a head does: here, attending to the previous token", 1800)
    page.locator("regard-overview select").select_option("entropy:up")
    film.shoot(700)
    page.evaluate("document.querySelector('.results').scrollIntoView()")
    film.click(page.locator(".rg-head").nth(8), 1000)
    film.click(page.get_by_role("radio", name="lines"), 1200, "regard-lines[data-ready]")
    film.say("Pin a token, and move it with the arrow keys", 900)
    page.evaluate("document.querySelector('regard-lines').dispatchEvent(new CustomEvent('pin', {detail: 2}))")
    page.wait_for_timeout(400)
    page.locator("regard-lines [aria-pressed=true]").focus()
    film.press("ArrowDown", 8, 450)
    film.click(page.get_by_role("button", name="Compare side by side"), 300)
    page.wait_for_timeout(1500)
    second = page.locator(".side").nth(1)
    second.locator("textarea").fill("He gave the keys to the old man who lives in the cabin.")
    film.click(second.get_by_role("button", name="Look", exact=True), 500)
    page.wait_for_timeout(1500)
    film.say("Two inputs, or two models, side by side", 2400)
    page.get_by_role("button", name="Compare side by side").click()


def predict(film: Film) -> None:
    page = film.page
    page.get_by_label("model").select_option("stories15m")
    page.wait_for_selector("regard-bars[data-ready]")
    page.wait_for_timeout(900)
    page.evaluate("document.querySelector('.results').scrollIntoView()")
    film.say("Next-token probabilities of a decoder", 1200)
    page.locator("regard-bars").scroll_into_view_if_needed()
    film.shoot(1200)
    film.click(page.get_by_role("button", name="Ten tokens"), 800)
    page.wait_for_timeout(2500)
    film.shoot(1600)
    film.click(page.get_by_role("button", name="Switch off"), 500)
    page.locator("regard-bars").scroll_into_view_if_needed()
    page.wait_for_timeout(800)
    film.say("A head switched off: the orange marks are what it was", 2200)


def play(film: Film) -> None:
    page = film.page
    page.evaluate("location.hash = '#play?expression=Causal()&tokens=64'")
    page.wait_for_selector("regard-pattern[data-ready]")
    film.say("Patterns: pairs, formula and cost as you type", 1100)
    for text in ("Causal() & Window(8, 0)", "Causal() & Window(8, 0, step=3)", "Causal() & Window(8, 0) | First(2)"):
        page.locator("input.code").first.fill(text)
        page.wait_for_timeout(700)
        film.shoot(1100)
    page.evaluate("location.hash = '#play?figure=convolution&alpha=0.3'")
    page.wait_for_selector("regard-quadratic[data-ready]")
    film.say("Nine heads that attend by position ...", 900)
    for place in range(-10, 34, 4):
        page.evaluate(f"document.querySelector('regard-quadratic').show({{alpha: {10 ** (place / 20):.4f}}})")
        film.shoot(220)
    film.say("... become a convolution", 1800)
    page.evaluate("location.hash = '#play?figure=key'")
    page.wait_for_selector("regard-key[data-ready]")
    film.say("Move a key: the exact law beside the run", 700)
    page.locator("[data-dot='1']").focus()
    film.press("ArrowRight", 8, 200)
    film.shoot(900)


def train(film: Film) -> None:
    """Only with a run that has heads by position."""
    page = film.page
    page.evaluate("location.hash = '#train'")
    page.wait_for_selector("regard-player svg")
    film.say("Watch `regard train`: curves, and heads that move", 1600)
    page.locator("regard-player input").focus()
    page.evaluate("document.querySelector('regard-player').scrollIntoView({block: 'end'}); window.scrollBy(0, 90)")
    page.keyboard.press("Home")
    film.shoot(600)
    film.press("ArrowRight", 6, 350)
    model = page.evaluate("document.querySelector('[data-panel=train] select').value")
    page.evaluate(f"location.hash = '#look?model={model}&image=digit&token=9'")
    page.wait_for_selector("regard-image[data-ready]")
    page.wait_for_selector("regard-bars[data-ready]")
    page.evaluate("document.querySelector('.results').scrollIntoView()")
    page.wait_for_timeout(600)
    film.say("Image models: choose a patch", 1200)
    page.locator(".rg-image").focus()
    film.press("ArrowRight", 2, 500)
    film.press("ArrowUp", 1, 900)


def check(film: Film) -> None:
    page = film.page
    page.evaluate("location.hash = '#check?model=stories15m'")
    page.wait_for_selector("regard-chart[data-ready]")
    film.say("Check the laws on your model, and price it at any size", 1200)
    page.get_by_role("button", name="Check the laws").click()
    for _ in range(8):
        page.wait_for_timeout(1200)
        film.shoot(350)
    film.shoot(900)
    page.evaluate("location.hash = '#check?model=stories15m&tokens=4096&devices=8'")
    page.wait_for_timeout(1800)
    film.shoot(1800)


def theme(film: Film) -> None:
    page = film.page
    page.evaluate("location.hash = '#look?model=minilm&layer=3&head=6&view=matrix&token=4&order='")
    page.wait_for_selector("regard-matrix[data-ready]")
    page.wait_for_timeout(1500)
    page.evaluate("document.getElementById('theme').click(); document.getElementById('theme').click()")
    page.evaluate("window.scrollTo(0, 260)")
    page.wait_for_timeout(400)
    film.say('pip install "regard[lab]"   ·   regard lab', 3000)


SCENES: tuple[Callable[[Film], None], ...] = (look, predict, train, play, check, theme)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", type=Path)
    parser.add_argument("--stills", type=Path, help="a folder for the last frame of each scene")
    parser.add_argument("--run", type=Path, help="the folder of a run of `regard train spatial`, for the scene train")
    parser.add_argument("--scenes", nargs="*", help="only these: " + ", ".join(scene.__name__ for scene in SCENES))
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    from regard.cli.lab import find_runs, make_source
    from regard.lab.server import LabServer
    from regard.lab.sources import find_downloaded
    from regard.lab.state import Lab

    program = shutil.which("chromium") or shutil.which("google-chrome")
    folders = [str(arguments.run)] if arguments.run else []
    sources = [*find_downloaded(), *map(make_source, folders)]
    server = LabServer(Lab(sources, find_runs(folders)))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.is_running:
        time.sleep(0.05)
    try:
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(
                viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light", reduced_motion="reduce"
            )
            page.set_default_timeout(90_000)
            page.goto(f"{server.address}#look")
            film = Film(page)
            for scene in SCENES:
                if (arguments.scenes and scene.__name__ not in arguments.scenes) or (scene is train and not folders):
                    continue
                scene(film)
                if arguments.stills:
                    arguments.stills.mkdir(parents=True, exist_ok=True)
                    film.frames[-1].quantize(128).save(arguments.stills / f"lab_{scene.__name__}.png", optimize=True)
            film.save(arguments.path)
            browser.close()
    finally:
        server.stop()
        thread.join(20)
    seconds, size = sum(film.milliseconds) / 1000, arguments.path.stat().st_size
    print(f"{len(film.frames)} frames, {seconds:.0f} seconds, {size / 1e6:.1f} MB")
    assert size < MOST_BYTES, f"larger than {MOST_BYTES:,} bytes"


if __name__ == "__main__":
    main()
