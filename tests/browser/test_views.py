"""The views: what the Memory view shows of cached prompts, their users and misses; each view at two
widths, light and dark, by keyboard alone, checked by axe; offline, since `visiting` refuses all
other addresses.
"""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.fakes.browser import Visitor, check_accessible, check_fits, visiting
from tests.fakes.server_process import ServerProcess
from tests.fakes.slow import slow

VIEWS = ("Chat", "Now", "Memory", "Models", "Connect")
NARROW_AND_DARK, WIDE_AND_LIGHT = (360, True), (1200, False)
HEAD = "You help at the harbour. Count the boats twice, and write the number on the wall.\n" * 40
MODEL = "scripted"


@pytest.fixture(scope="module")
def used_server(scripted_server: ServerProcess) -> ServerProcess:
    """A server that has cached a forking prompt of two sessions; the second missed the cache."""
    for day in ("Monday", "Tuesday"):
        prompt = f"{HEAD}Today is {day}.\n{HEAD[:1600]}"
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
        headers = {"X-Session-ID": f"crew-{day}"}
        url = f"{scripted_server.url}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
    return scripted_server


@pytest.fixture
def memory(browser: Browser, used_server: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, used_server.url) as visitor:
        visitor.open("/page/memory")
        visitor.page.get_by_role("tree").wait_for()
        yield visitor


def test_the_picture_shows_shared_prefixes_branches_and_users(memory: Visitor) -> None:
    tree = memory.page.get_by_role("tree", name=f"Cached prompts of {MODEL}")
    head, *branches = tree.get_by_role("treeitem").all()
    assert head.get_attribute("aria-level") == "1"
    assert "used by crew-Tuesday, crew-Monday" in (head.get_attribute("aria-label") or "")
    labels = [branch.get_attribute("aria-label") or "" for branch in branches]
    assert any("used by crew-Monday" in label for label in labels)
    assert any("used by crew-Tuesday" in label for label in labels)
    boxes = [part.bounding_box() for part in (head, *branches)]
    first = boxes[0]
    assert first is not None
    for box in boxes[1:]:
        assert box is not None
        assert box["x"] >= first["x"] + first["width"] - 1
        assert box["y"] + box["height"] <= first["y"] + first["height"] + 1
        assert box["height"] > 20
        assert box["width"] >= 12


def test_the_keyboard_moves_through_the_picture(memory: Visitor) -> None:
    page = memory.page
    items = page.get_by_role("treeitem")
    chosen = page.get_by_label("Chosen part")
    # the shared prefix is the largest part
    expect(chosen).to_contain_text("crew-Tuesday, crew-Monday")
    items.first.focus()
    page.keyboard.press("ArrowRight")
    expect(items.nth(1)).to_be_focused()
    expect(chosen).to_contain_text("crew-")
    page.keyboard.press("End")
    expect(items.last).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(items.first).to_be_focused()
    expect(page.locator("[role=treeitem][tabindex='0']")).to_have_count(1)
    expect(chosen).to_contain_text("crew-Tuesday, crew-Monday")


def test_the_picture_is_also_a_table(memory: Visitor) -> None:
    page = memory.page
    page.get_by_text("As a table").click()
    rows = page.get_by_role("region", name=f"Cached parts of {MODEL}").get_by_role("row")
    expect(rows.first).to_be_visible()
    expect(rows).to_have_count(page.get_by_role("treeitem").count() + 1)
    expect(rows.nth(1)).to_contain_text("crew-Tuesday, crew-Monday")


def test_a_miss_says_which_line_of_the_prompt_changed(memory: Visitor) -> None:
    page = memory.page
    miss = page.get_by_role("listitem").filter(has_text="Line 41 of the prompt changed.").first
    expect(miss).to_contain_text("crew-Tuesday")
    change = miss.get_by_role("region", name="What changed")
    assert change.get_by_role("deletion").inner_text() == "Today is Monday."
    assert change.get_by_role("insertion").inner_text() == "Today is Tuesday."


def test_cache_tiers_and_written_bytes_are_shown(memory: Visitor) -> None:
    tiers = memory.page.get_by_label(f"Cache tiers of {MODEL}")
    for name in ("Live states", "Blocks in RAM", "Blocks on disk", "Written today"):
        expect(tiers).to_contain_text(name)
    memory.page.get_by_text("blocks with").wait_for()


def test_a_session_is_forked(memory: Visitor) -> None:
    page = memory.page
    row = page.get_by_role("row").filter(has_text="crew-Monday").first
    row.get_by_role("button", name="Fork").click()
    expect(page.get_by_text("forked from crew-Monday")).to_be_visible()


@pytest.fixture
def visitor(
    request: pytest.FixtureRequest, browser: Browser, used_server: ServerProcess
) -> Iterator[Visitor]:
    """A visitor with the window of the test's parameter: its width, and whether it is dark."""
    width, is_dark = request.param
    with visiting(browser, used_server.url, width=width, is_dark=is_dark) as visitor:
        visitor.open()
        yield visitor


# every width and every color scheme, once
@pytest.mark.parametrize("visitor", [NARROW_AND_DARK, *slow((WIDE_AND_LIGHT,))], indirect=True)
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
        check_accessible(page)
        check_fits(page)
    navigation = page.get_by_role("navigation", name="Views")
    assert navigation.evaluate("(nav) => nav.scrollWidth <= nav.clientWidth")
    for link in navigation.get_by_role("link").all():
        box = link.bounding_box()
        assert box is not None
        assert 0 <= box["x"] < box["x"] + box["width"] <= page.evaluate("innerWidth")


@pytest.mark.parametrize("visitor", [WIDE_AND_LIGHT, *slow((NARROW_AND_DARK,))], indirect=True)
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
