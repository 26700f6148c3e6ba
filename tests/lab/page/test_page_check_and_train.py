"""The views Check & price and Train, and the frame around all views, in a real browser."""

from __future__ import annotations

import time
import xml.etree.ElementTree as ElementTree

import pytest

PHONE, DESK = (390, 844), (1440, 900)


def sideways(page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - window.innerWidth")


@pytest.mark.slow
@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_a_model_is_priced_and_a_slider_changes_the_price(visit, size):
    page = visit("check?model=decoder&tokens=64", size)
    page.wait_for_selector("regard-chart[data-ready]")
    assert sideways(page) <= 0
    before = page.locator("table").first.inner_text()
    slider = page.get_by_role("slider", name="length")
    slider.focus()
    page.keyboard.press("End")
    deadline = time.monotonic() + 30
    while page.locator("table").first.inner_text() == before:
        assert time.monotonic() < deadline
        page.wait_for_timeout(50)
    assert "tokens=4099" in page.evaluate("location.hash")
    with page.expect_download() as download:
        page.get_by_role("group", name="save cost").get_by_role("button", name="SVG").click()
    assert len(list(ElementTree.fromstring(download.value.path().read_text()).iter())) > 8


@pytest.mark.slow
def test_devices_have_a_price_and_an_address(visit):
    page = visit("check?model=decoder&devices=4&strategy=ddp")
    page.wait_for_selector("text=One step on 4 devices")
    assert page.get_by_label("strategy").input_value() == "ddp"


@pytest.mark.slow
def test_laws_arrive_one_by_one_and_the_search_can_be_stopped(visit):
    page = visit("check?model=decoder")
    page.wait_for_selector("regard-chart[data-ready]")
    page.get_by_role("button", name="Check the laws").click()
    page.wait_for_selector("td .holds", timeout=90_000)
    stop = page.get_by_role("button", name="Stop")
    if stop.is_visible():
        stop.click()
    assert page.get_by_role("button", name="Check the laws").is_visible()
    assert page.locator(".progress:visible").count() == 0


@pytest.mark.slow
def test_without_a_run_the_page_says_how_to_make_one(visit):
    page = visit("train", PHONE)
    page.wait_for_selector(".error")
    assert "regard train" in page.get_by_role("alert").inner_text()
    assert sideways(page) <= 0


@pytest.mark.slow
def test_views_are_links_and_remember_what_they_showed(visit):
    page = visit("play?figure=key")
    page.wait_for_selector("regard-key[data-ready]")
    page.get_by_role("link", name="Check & price").click()
    page.wait_for_selector("h1:has-text('Is it right')")
    page.go_back()
    page.wait_for_selector("regard-key:visible")
    assert page.get_by_role("link", name="Play").get_attribute("aria-current") == "page"
    assert page.title() == "Play · Regard lab"


@pytest.mark.slow
def test_the_theme_is_chosen_and_kept(visit):
    page = visit("play?figure=scale", scheme="light")
    page.wait_for_selector("regard-softmax[data-ready]")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    toggle = page.locator("#theme")
    toggle.click()
    toggle.click()
    assert toggle.inner_text() == "Dark"
    assert page.evaluate(paper) != light
    page.reload()
    page.wait_for_selector("regard-softmax[data-ready]")
    assert page.locator("#theme").inner_text() == "Dark"
    assert page.evaluate(paper) != light


@pytest.mark.slow
def test_a_stopped_server_is_an_error_of_the_page(visit):
    page = visit("play?expression=Causal()&tokens=16", refused=9)
    page.wait_for_selector("regard-pattern[data-ready]")
    page.context.route("**/api/pattern", lambda route: route.abort())
    page.locator("input.code").first.fill("Full()")
    page.wait_for_selector(".error")
    assert "cannot be reached" in page.get_by_role("alert").inner_text()
    page.context.unroute("**/api/pattern")
    page.locator("input.code").first.fill("Window(1, 1)")
    page.wait_for_selector("code:has-text('Window(1, 1)')")
    assert page.get_by_role("alert").count() == 0


@pytest.mark.slow
def test_a_pattern_that_cannot_be_read_is_refused_in_the_page(visit):
    page = visit("play?expression=__import__('os')&tokens=16", refused=1)
    page.wait_for_selector(".error")
    assert page.locator("input.code").first.get_attribute("aria-invalid") == "true"
