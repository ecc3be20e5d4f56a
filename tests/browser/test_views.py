"""Each view at two widths, light and dark, by keyboard alone, checked by axe; offline, since
`visiting` refuses all other addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, expect

from tests.fakes.browser import Visitor, visiting
from tests.fakes.server_process import ServerProcess

VIEWS = ("Chat", "Now", "Memory", "Models", "Connect")
NARROW = 360
# every width and every color scheme, once
WINDOWS = ((NARROW, True), (1200, False))
TEXT = "Count the boats twice before the storm, and write the number on the wall.\n" * 20


@pytest.fixture(scope="module")
def used_server(scripted_server: ServerProcess) -> ServerProcess:
    """A server with sessions, and with prompts that missed the cache."""
    for day in ("Monday", "Tuesday"):
        body = {"model": "scripted", "prompt": f"{TEXT}Today is {day}.", "max_tokens": 1}
        headers = {"X-Session-ID": f"crew-{day}"}
        answer = httpx.post(
            f"{scripted_server.url}/v1/completions", json=body, headers=headers, timeout=60
        )
        assert answer.status_code == 200, answer.text
    return scripted_server


@pytest.fixture(
    params=WINDOWS,
    ids=["narrow dark", "wide light"],
)
def visitor(
    request: pytest.FixtureRequest, browser: Browser, used_server: ServerProcess
) -> Iterator[Visitor]:
    width, is_dark = request.param
    with visiting(browser, used_server.url, width=width, is_dark=is_dark) as visitor:
        visitor.open()
        yield visitor


def problems_of(visitor: Visitor) -> list[str]:
    """The findings of axe."""
    found = Axe().run(visitor.page).response["violations"]
    return [
        f"{each['id']}: {node['target']} {node['failureSummary']}"
        for each in found
        for node in each["nodes"]
    ]


def is_too_wide(visitor: Visitor) -> bool:
    """Whether the page can be scrolled sideways."""
    return bool(
        visitor.page.evaluate("document.documentElement.scrollWidth > document.body.clientWidth")
    )


def test_every_view_is_accessible_and_fits_its_window(visitor: Visitor) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    page.get_by_role("button", name="Stop").click()
    visitor.until_answered()
    visitor.ask("Show a table.")
    visitor.until_answered(2)
    for view in VIEWS:
        if view != "Chat":
            visitor.view(view)
            page.locator("main h2, main dl, main .card").first.wait_for()
        if view == "Memory":
            page.get_by_role("tree").wait_for()
            page.get_by_text("As a table").click()
            page.get_by_role("region", name="Cached parts of scripted").wait_for()
        if view == "Now":
            page.get_by_role("region", name="Steps of scripted").wait_for()
        assert problems_of(visitor) == [], view
        assert not is_too_wide(visitor), view


def test_every_view_is_reached_and_used_by_keyboard_alone(visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_label("Message").wait_for()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the view")).to_be_focused()
    for view in VIEWS[1:]:
        link = page.get_by_role("navigation", name="Views").get_by_role("link", name=view)
        while not link.evaluate("(link) => link === document.activeElement"):
            page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.get_by_role("heading", name=view, level=1).wait_for()
        expect(page.locator("#view")).to_be_focused()
        page.keyboard.press("Control+Home")
        page.reload()  # the focus begins at the top again
        page.get_by_role("heading", name=view, level=1).wait_for()
    page.goto(visitor.url)
    box = page.get_by_label("Message")
    box.wait_for()
    while not box.evaluate("(box) => box === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.type("Say many words.")
    page.keyboard.press("Enter")
    stop = page.get_by_role("button", name="Stop")
    stop.wait_for()
    while not stop.evaluate("(button) => button === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    visitor.until_answered()
