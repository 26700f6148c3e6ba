"""The report in a real browser: no requests, no console messages, and working controls."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
ROOT = Path(__file__).resolve().parent.parent.parent
PHONE, DESK = (390, 844), (1280, 900)
SMALLEST = 14  # pixels of a letter on a phone

# The words of the page that are smaller than they should be, as they are drawn, letters in drawings too.
SMALL_WORDS = """(least) => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || ["SCRIPT", "STYLE"].includes(parent.tagName)) continue;
    if (!parent.getClientRects().length) continue;
    let size = parseFloat(getComputedStyle(parent).fontSize);
    const drawing = parent.closest("svg");
    if (drawing) size *= drawing.getBoundingClientRect().width / drawing.viewBox.baseVal.width;
    if (size < least - 0.05) found.push(`${walker.currentNode.textContent.trim().slice(0, 20)}: ${size}`);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: regard[browser]")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no Chromium on this machine: make browser")
    with playwright.sync_playwright() as player:
        opened = player.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser):
    """Open a page; afterwards nothing may have been asked for but the page, nor said in the console."""
    contexts = []

    def visit(path: Path, size=DESK, scheme="light", motion="reduce"):
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion=motion
        )
        page = context.new_page()
        requests, messages = [], []
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        context.route("**/*", lambda route: route.continue_() if route.request.url == path.as_uri() else route.abort())
        page.goto(path.as_uri())
        contexts.append((context, path, requests, messages))
        return page

    yield visit
    for context, path, requests, messages in contexts:
        context.close()
        assert [url for url in requests if not url.startswith("data:")] == [path.as_uri()]
        assert messages == []


def sideways(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_report_can_be_read_on_a_phone(visit, quick_page, scheme):
    page = visit(quick_page, PHONE, scheme)
    assert sideways(page) <= 0
    assert page.evaluate(SMALL_WORDS, SMALLEST) == []
    # Whatever is wider than the screen scrolls within itself.
    wide = "e => getComputedStyle(e).overflowX === 'auto' || e.scrollWidth <= document.documentElement.clientWidth"
    assert all(page.eval_on_selector_all("main pre, main table, main figure", f"all => all.map({wide})"))


def test_small_words_are_found_where_there_are_some(visit, tmp_path):
    (tmp_path / "page.html").write_text(
        '<!doctype html><link rel="icon" href="data:,"><main><p style="font-size:13px">small</p>'
        '<svg viewBox="0 0 100 100" width="50"><text y="50" font-size="20">drawn</text></svg></main>'
    )
    page = visit(tmp_path / "page.html", PHONE)
    assert [word.split(":")[0] for word in page.evaluate(SMALL_WORDS, SMALLEST)] == ["small", "drawn"]


@pytest.mark.slow
def test_dark_paper_is_dark_and_ink_stands_out_from_it(visit, quick_page):
    light, dark = (visit(quick_page, scheme=scheme) for scheme in ("light", "dark"))
    for page, brighter in ((light, True), (dark, False)):
        paper, ink = (
            sum(int(part) for part in page.evaluate(f"getComputedStyle(document.body).{name}")[4:-1].split(","))
            for name in ("backgroundColor", "color")
        )
        assert (paper > ink) == brighter
        assert abs(paper - ink) > 500


@pytest.mark.slow
def test_the_slider_moves_the_heads(visit, quick_page):
    page = visit(quick_page)
    dots = ".player .dot"
    read = "all => all.map(e => e.getAttribute('transform'))"
    end = page.eval_on_selector_all(dots, read)
    slider = page.locator(".player input")
    slider.focus()
    page.keyboard.press("Home")
    start = page.eval_on_selector_all(dots, read)
    assert start != end
    assert "epoch 0" in page.locator(".player output").inner_text()
    page.keyboard.press("End")
    assert page.eval_on_selector_all(dots, read) == end
    assert "epoch 3" in page.locator(".player output").inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_the_button_plays_to_the_end_also_without_motion(visit, quick_page, motion):
    page = visit(quick_page, motion=motion)
    button, told = page.locator(".player button"), page.locator(".player output")
    if motion == "no-preference":  # it plays by itself when it comes into view
        page.locator(".player").scroll_into_view_if_needed()
        page.wait_for_function("document.querySelector('.player button').textContent === 'Pause'")
    else:
        assert button.inner_text() == "Play"
        button.click()
        assert button.inner_text() == "Pause"
        button.click()
        assert button.inner_text() == "Play"
        button.click()
    page.wait_for_function("document.querySelector('.player button').textContent === 'Play'", timeout=15_000)
    assert "epoch 3" in told.inner_text()


@pytest.mark.slow
def test_a_pixel_can_be_pointed_at_by_mouse_and_by_keys(visit, quick_page):
    page = visit(quick_page)
    board, status = page.locator("[data-board]"), page.locator("[data-status]")
    board.scroll_into_view_if_needed()
    box = board.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 2.5 / 8, box["y"] + box["height"] * 1.5 / 8)
    assert "row 1, column 2" in status.inner_text()
    board.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    assert "row 2, column 3" in status.inner_text()
    for _ in range(9):
        page.keyboard.press("ArrowLeft")
    assert "row 2, column 0" in status.inner_text()


def painted(page) -> list[list[int]]:
    """How opaque each cell of each head's canvas is."""
    return page.eval_on_selector_all(
        ".view canvas",
        "all => all.map(c => Array.from(c.getContext('2d').getImageData(0, 0, c.width, c.height).data)"
        ".filter((_, k) => k % 4 === 3))",
    )


@pytest.mark.slow
def test_tabs_models_and_images_change_what_is_seen(visit, quick_page):
    page = visit(quick_page)
    tabs = page.locator("[data-layers] button")
    first = painted(page)
    assert len(first) == 9
    assert all(len(cells) == 64 and max(cells) > 200 for cells in first)
    assert tabs.nth(0).get_attribute("aria-selected") == "true"
    tabs.nth(1).click()
    second = painted(page)
    assert second != first
    page.locator("[data-images] button").nth(4).click()
    assert painted(page) == second  # heads that look by position see every image alike
    assert "a 4" in page.locator("[data-status]").inner_text()
    page.locator("[data-models] button").nth(1).click()
    by_content = painted(page)
    assert all(len(cells) == 16 for cells in by_content)
    page.locator("[data-images] button").nth(7).click()
    assert painted(page) != by_content
    page.locator("[data-class-token]").click()
    assert "class token" in page.locator("[data-status]").inner_text()
    tabs.nth(1).focus()
    page.keyboard.press("ArrowLeft")
    assert tabs.nth(0).get_attribute("aria-selected") == "true"


def test_a_film_is_a_page_of_its_own(visit, tmp_path):
    from regard import Quadratic
    from regard.layers.profiles import head_profile
    from regard.visualize import animate_heads, draw_heads

    steps = [{"a": head_profile(Quadratic(2, grid=(5, 7), centre=[[0, t], [t, 0]]))} for t in range(3)]
    page = visit(animate_heads(steps).save(tmp_path / "film.html"), PHONE)
    page.locator(".player button").click()
    assert sideways(page) <= 0
    page = visit(draw_heads(steps[0]).save(tmp_path / "heads.html"), PHONE)
    assert page.locator("svg").bounding_box()["width"] > 200
    assert sideways(page) <= 0


@pytest.mark.slow
def test_a_saved_page_of_attention_is_explored(visit, tmp_path):
    import torch

    from regard.models import GPT, GPTConfig, ViT, ViTConfig
    from regard.visualize import show

    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=13, context_length=11, dim=8, layers=3, heads=2))
    words = ["<b>a</b>", "b", "c", "d", "e"]
    page = visit(show(gpt, torch.arange(5)[None], words=words).save(tmp_path / "text.html"), PHONE)
    page.wait_for_selector("regard-attention[data-ready]")
    assert sideways(page) <= 0
    assert page.locator(".rg-head").count() == 6
    page.locator(".rg-head").nth(3).click()
    page.locator("regard-tokens .rg-token").nth(0).click()
    assert "“<b>a</b>” attends to “<b>a</b>” 100 %" in page.locator("regard-attention").inner_text()
    vit = ViT(ViTConfig(image=(6, 9), patch=3, channels=1, classes=2, dim=8, layers=2, heads=2))
    page = visit(show(vit, torch.rand(1, 1, 6, 9)).save(tmp_path / "image.html"))
    page.wait_for_selector("regard-image[data-ready]")
    page.locator(".rg-image").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert "column" in page.locator("regard-image .rg-status").inner_text()


@pytest.mark.slow
@pytest.mark.long  # tests/test_documents.py runs the demo too
def test_the_whole_demo_leaves_a_report_that_opens(visit, tmp_path):
    command = [sys.executable, str(ROOT / "examples" / "demo.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    page = visit(tmp_path / "runs" / "demo" / "report.html", PHONE)
    assert sideways(page) <= 0
    assert page.evaluate(SMALL_WORDS, SMALLEST) == []
    assert len(painted(page)) == 9
