"""The view Look, in a real browser, with text, image and translation models."""

from __future__ import annotations

import base64
import re
import time
import xml.etree.ElementTree as ElementTree
from urllib.parse import unquote

import pytest

PHONE, DESK = (390, 844), (1440, 900)
TEXT = "the old dog sees a lazy fox ."
VIEWS = {
    "text": f"look?model=encoder&text={TEXT.replace(' ', '+')}",
    "decoder": "look?model=decoder&text=Once+upon+a+time&view=lines",
    "image": "look?model=picture&image=shapes",
    "translation": "look?model=translation&source=the+fox&target=der+Fuchs&attention=cross",
}
READY = "regard-overview[data-ready]"


def wait(page) -> None:
    page.wait_for_selector(READY)
    page.wait_for_selector(".head-view > [data-ready]")
    page.wait_for_selector(".side:not([aria-busy])")


def until(page, condition: str) -> None:
    """Wait for a condition; the page's own policy forbids Playwright's way, which evaluates text within it."""
    deadline = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, condition
        page.wait_for_timeout(50)


def sideways(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


def read_address(page) -> str:
    """The address once it was written, which happens a moment after a change."""
    page.wait_for_timeout(250)
    return unquote(page.evaluate("location.hash").replace("+", " "))


def save(page, button) -> str:
    with page.expect_download() as download:
        button.click()
    return download.value.path().read_text() if download.value.suggested_filename.endswith(".svg") else ""


def test_a_text_is_looked_at_and_nothing_is_said_in_the_console(visit):
    page = visit(VIEWS["text"])
    wait(page)
    assert page.locator(".rg-head").count() == 6
    assert page.locator("regard-tokens .rg-token").all_inner_texts()[:4] == ["[CLS]", "the", "old", "dog"]
    assert sideways(page) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_every_kind_of_model_at_every_width(visit, kind, size, scheme):
    page = visit(VIEWS[kind], size, scheme)
    wait(page)
    assert page.locator(".error").count() == 0
    assert page.locator(".rg-head").count() == {"text": 6, "decoder": 15, "image": 6, "translation": 4}[kind]
    assert sideways(page) <= 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(VIEWS))
def test_figures_are_saved_as_drawings_that_open_and_as_pictures(visit, kind):
    page = visit(VIEWS[kind])
    wait(page)
    views = [button.inner_text() for button in page.locator("[aria-label=view] button").all()]
    assert views == (["matrix", "lines", "image"] if kind == "image" else ["matrix", "lines"])
    for view in views:
        page.get_by_role("radio", name=view).click()
        page.wait_for_selector(f"regard-{view}[data-ready]")
        for group in page.get_by_role("group", name=re.compile("^save")).all():
            if not group.is_visible():
                continue
            text = save(page, group.get_by_role("button", name="SVG"))
            drawing = ElementTree.fromstring(text)
            assert drawing.tag.endswith("svg")
            assert len(list(drawing.iter())) > 3
            assert "var(" not in text  # it has its colors in itself
            opened = page.context.new_page()
            coded = base64.b64encode(text.encode()).decode()
            opened.set_content(f'<img src="data:image/svg+xml;base64,{coded}">')
            assert opened.evaluate("document.images[0].decode().then(() => document.images[0].naturalWidth)") > 40
            opened.close()
        with page.expect_download() as download:
            page.get_by_role("group", name="save attention").get_by_role("button", name="PNG").click()
        assert download.value.path().read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_an_address_restores_its_view(visit):
    page = visit(VIEWS["text"])
    wait(page)
    page.get_by_role("radio", name="lines").click()
    page.locator(".rg-head[data-place='1.2']").click()
    page.locator("regard-tokens .rg-token").nth(3).click()
    page.locator("regard-overview select").select_option("entropy:up")
    page.wait_for_selector("regard-lines .rg-pinned")
    hash = read_address(page)
    for part in ("layer=1", "head=2", "token=3", "view=lines", "order=entropy:up", f"text={TEXT}"):
        assert part in hash
    again = visit(hash[1:].replace(" ", "+"))
    wait(again)
    again.wait_for_selector("regard-lines .rg-pinned")
    assert again.locator("h2", has_text="Layer 1, head 2").count() == 1
    assert again.locator("regard-lines .rg-pinned").text_content() == "dog"
    assert again.locator("regard-tokens [aria-selected=true]").inner_text() == "dog"
    assert again.locator(".rg-head").all_inner_texts() == page.locator(".rg-head").all_inner_texts()


@pytest.mark.slow
def test_an_image_is_part_of_the_address(visit, tmp_path):
    from PIL import Image

    file = tmp_path / "made.png"
    Image.new("RGB", (45, 31), (200, 40, 40)).save(file)
    page = visit(VIEWS["image"])
    wait(page)
    page.locator("input[type=file]").set_input_files(str(file))
    until(page, "location.hash.includes('data%3Aimage')")
    wait(page)
    shown = page.locator("regard-image img").get_attribute("src")
    again = visit(page.evaluate("location.hash.slice(1)"))
    wait(again)
    assert again.locator("regard-image img").get_attribute("src") == shown


@pytest.mark.slow
def test_heads_are_sorted_by_a_number(visit):
    page = visit(VIEWS["text"])
    wait(page)
    for order, direction in (("entropy:up", 1), ("entropy:down", -1)):
        page.locator("regard-overview select").select_option(order)
        numbers = [direction * float(text) for text in page.locator(".rg-head b").all_inner_texts()]
        assert len(numbers) == 6
        assert numbers == sorted(numbers)
    options = page.locator("regard-overview option").all_inner_texts()
    for name in ("entropy", "distance", "previous token", "same word", "first token", "delimiter"):
        assert f"{name}, most first" in options


@pytest.mark.slow
def test_everything_is_done_by_keys(visit):
    page = visit(VIEWS["text"])
    wait(page)
    head = page.locator(".rg-head[tabindex='0']")
    head.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector("h2:has-text('Layer 1, head 1')")
    tokens = page.locator("regard-tokens")
    tokens.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("regard-tokens [aria-selected=true]:has-text('the')")
    assert tokens.get_attribute("aria-activedescendant") == page.locator("[aria-selected=true]").get_attribute("id")
    page.keyboard.press("End")
    page.wait_for_selector("regard-tokens [aria-selected=true]:has-text('[SEP]')")
    matrix = page.locator("regard-matrix canvas")
    matrix.focus()
    page.keyboard.press("0")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowLeft", "+", "-"):
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.wait_for_selector("regard-tokens [aria-selected=true]:has-text('fox')")
    page.get_by_role("radio", name="matrix").focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("regard-lines[data-ready]")
    assert page.evaluate("document.activeElement.textContent") == "lines"


@pytest.mark.slow
def test_controls_have_names(visit):
    page = visit(VIEWS["translation"], PHONE)
    wait(page)
    unnamed = page.evaluate(
        """() => Array.from(document.querySelectorAll("button, select, input, textarea, [tabindex='0']"))
          .filter((one) => {
          const label = one.getAttribute("aria-label") || one.textContent.trim() || one.title
            || (one.labels && one.labels.length && one.labels[0].textContent.trim());
          return one.getClientRects().length && !label;
        }).map((one) => one.outerHTML.slice(0, 80))"""
    )
    assert unnamed == []


@pytest.mark.slow
def test_texts_are_never_markup(visit):
    page = visit("look?model=encoder&text=%3Cb%3E+%26+the+%3Cimg+src=x+onerror=alert(1)%3E&view=lines")
    wait(page)
    assert "<b>" in page.locator("regard-tokens .rg-token").all_inner_texts()
    assert page.locator("main b:has-text('old')").count() == 0
    assert page.locator("img[src=x]").count() == 0


@pytest.mark.slow
def test_a_model_that_fails_is_an_error_of_the_page(visit):
    page = visit("look?model=broken&text=a")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "<b>no such file</b>" in alert.inner_text()
    page.get_by_label("model").first.select_option("encoder")
    wait(page)
    assert page.get_by_role("alert").count() == 0


@pytest.mark.slow
def test_two_models_stand_side_by_side(visit):
    page = visit(VIEWS["text"])
    wait(page)
    page.get_by_role("button", name="Compare side by side").click()
    page.locator(".side").nth(1).locator(READY).wait_for()
    page.locator(".side").nth(1).get_by_label("model").select_option("decoder")
    until(page, "document.querySelectorAll('.side')[1].querySelectorAll('.rg-head').length === 15")
    assert page.locator(".side").nth(0).locator(".rg-head").count() == 6
    hash = read_address(page)
    again = visit(hash[1:].replace(" ", "+"))
    until(again, "document.querySelectorAll('.rg-head').length === 21")
    assert "b.model=decoder" in hash
    page.get_by_role("button", name="Compare side by side").click()
    assert page.locator(".side").count() == 1


@pytest.mark.slow
def test_a_long_text_has_few_elements_and_exact_rows(visit):
    words = 4000
    page = visit(f"look?model=decoder&text={'a' * words}&layer=1")
    wait(page)
    tokens = page.locator("regard-tokens")
    assert tokens.locator(".rg-token").count() < words / 4
    assert page.evaluate("document.querySelectorAll('*').length") < 3000
    tokens.focus()
    page.keyboard.press("Home")
    page.wait_for_selector("regard-tokens [data-token='0'][aria-selected=true]")
    page.keyboard.press("End")
    page.wait_for_selector(f"regard-tokens [data-token='{words - 1}'][aria-selected=true]")
    page.get_by_role("button", name="zoom in").click()
    page.get_by_role("button", name="zoom in").click()
    page.wait_for_timeout(300)
    assert page.evaluate("document.querySelector('regard-matrix').tiles.kept.size") > 1


@pytest.mark.slow
def test_a_pinned_token_shows_what_attends_to_it(visit):
    page = visit("look?model=decoder&text=abcdef&token=0&side=key&view=lines")
    wait(page)
    assert page.locator(".rg-threads path").count() > 1  # every later token sees the first
    page.get_by_label("pinned token").select_option("query")
    until(page, "document.querySelectorAll('.rg-threads path').length === 1")


@pytest.mark.slow
def test_the_lines_that_make_a_view_are_copied(visit):
    page = visit(f"{VIEWS['text']}&layer=1&head=2")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    wait(page)
    page.get_by_role("group", name="save attention").get_by_role("button", name="Copy as Python").click()
    page.wait_for_selector("text=copied")
    lines = page.evaluate("navigator.clipboard.readText()")
    assert "layer=1" in lines
    assert "head=2" in lines
    compile(lines, "copied", "exec")
