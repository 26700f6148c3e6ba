"""How fast the lab feels, measured in the browser: `python -m benchmarks.lab`.

First picture: from the click on Look to the first matrix on the screen, the model being loaded. Pinned token: from
the key press to the shaded tokens. Freezing: the longest time for which the page drew no frame while it scrolled,
zoomed and moved the pin through 4,096 tokens.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from typing import Any

SENTENCE = "The old keys to the cabinet in the hall are on the table where she left them before dinner last night ."
LONG = 4096
ROUNDS = 7
FRAMES = """() => {
  window.longest = 0;
  let before = performance.now();
  const step = (now) => {
    window.longest = Math.max(window.longest, now - before);
    before = now;
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}"""
FIRST_PICTURE = """() => new Promise((done) => {
  const matrix = document.querySelector("regard-matrix"), start = performance.now();
  const strip = document.querySelector("regard-tokens"), tokens = strip && strip.tokens;
  const source = matrix && matrix.source;
  if (matrix) matrix.removeAttribute("data-ready");
  document.querySelector("button.primary").click();
  const look = () => {
    const now = document.querySelector("regard-matrix"), read = document.querySelector("regard-tokens");
    const isNew = now && now.source && now.source !== source && read && read.tokens !== tokens;
    if (isNew && now.hasAttribute("data-ready")) done(performance.now() - start);
    else requestAnimationFrame(look);
  };
  look();
})"""
MOVE_PIN = """() => new Promise((done) => {
  const strip = document.querySelector("regard-tokens"), start = performance.now(), old = strip.pinned;
  strip.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowLeft" }));
  const look = () => {
    if (strip.pinned !== old && strip.weights) requestAnimationFrame(() => done(performance.now() - start));
    else requestAnimationFrame(look);
  };
  look();
})"""


def main() -> None:
    from playwright.sync_api import sync_playwright

    from regard.lab.server import LabServer
    from regard.lab.sources import find_downloaded
    from regard.lab.state import Lab

    server = LabServer(Lab(find_downloaded()))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.is_running:
        time.sleep(0.05)
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        with sync_playwright() as player:
            browser = player.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.set_default_timeout(180_000)
            measure_first_picture(page, server.address)
            measure_long_text(page, server.address)
            browser.close()
    finally:
        server.stop()
        thread.join(20)


def measure_first_picture(page: Any, address: str) -> None:
    page.goto(f"{address}#look?model=minilm&text=warm&view=matrix")
    page.wait_for_selector("regard-overview[data-ready]")
    page.wait_for_selector(".side:not([aria-busy])")
    first, whole = [], []
    for number in range(ROUNDS):
        page.locator("textarea").fill(SENTENCE.replace("night", f"night {number}"))
        start = time.perf_counter()
        first.append(page.evaluate(FIRST_PICTURE))
        page.wait_for_selector(".progress", state="hidden")
        whole.append(1000 * (time.perf_counter() - start))
    print(f"minilm, {len(SENTENCE.split())} words: first picture {describe(first)}; all heads {describe(whole)}")
    page.locator("regard-tokens .rg-token").nth(12).click()
    page.wait_for_timeout(500)
    print(f"minilm: pinned token moves in {describe([page.evaluate(MOVE_PIN) for _ in range(ROUNDS)])}")


def measure_long_text(page: Any, address: str) -> None:
    words = ("one two three four five six seven eight nine ten " * LONG).split()[: LONG + 200]
    page.goto(f"{address}#look?model=smollm2&text=warm&view=matrix")
    page.wait_for_selector("regard-overview[data-ready]")
    page.wait_for_selector(".side:not([aria-busy])")
    page.locator("textarea").fill(" ".join(words))
    start = time.perf_counter()
    page.evaluate(FRAMES)
    first = page.evaluate(FIRST_PICTURE)
    tokens = page.evaluate("document.querySelector('regard-tokens').tokens.length")
    print(f"smollm2, {tokens:,} tokens: first picture {first:,.0f} ms")
    page.wait_for_selector(".progress", state="hidden")
    waiting, longest = time.perf_counter() - start, page.evaluate("longest")
    print(f"smollm2: all heads {waiting:.1f} s; longest frame meanwhile {longest:.0f} ms")
    page.evaluate("longest = 0")
    moves = [page.evaluate(MOVE_PIN) for _ in range(ROUNDS)]
    for _ in range(4):
        page.get_by_role("button", name="zoom in").click()
        page.wait_for_timeout(400)
    page.evaluate("document.querySelector('regard-tokens').scrollTop = 4000")
    page.wait_for_timeout(400)
    longest = page.evaluate("longest")
    print(f"smollm2: pinned token moves in {describe(moves)}; longest frame while zooming {longest:.0f} ms")


def describe(milliseconds: list[float]) -> str:
    return f"{statistics.median(milliseconds):.0f} ms (worst of {len(milliseconds)}: {max(milliseconds):.0f})"


if __name__ == "__main__":
    main()
