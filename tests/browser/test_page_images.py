"""Images on the page, with a real server and a tiny random vision model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, expect

from tests.fakes.browser import Visitor, visiting
from tests.fakes.images import png
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server
from tests.fakes.vision_models import write_vision_model

pytestmark = pytest.mark.slow

# the page reads no file until `releaseFiles` is called
_HOLD_FILES = """
() => {
  const read = FileReader.prototype.readAsDataURL;
  const released = new Promise((resolve) => (window.releaseFiles = resolve));
  FileReader.prototype.readAsDataURL = function (file) {
    released.then(() => read.call(this, file));
  };
}
"""


@pytest.fixture(scope="module")
def seeing(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = write_vision_model(tmp_path_factory.mktemp("seeing") / "model", "qwen2_5_vl")
    store = tmp_path_factory.mktemp("store")
    with running_server(str(folder), "--name", "seeing", "--store", str(store)) as server:
        yield server


@pytest.fixture
def viewer(browser: Browser, seeing: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, seeing.url) as visitor:
        visitor.open()
        visitor.page.get_by_text("Settings").click()
        visitor.page.get_by_label("Maximum answer length (tokens)").fill("8")
        yield visitor


def prompt_tokens(visitor: Visitor, answer: int) -> int:
    facts = visitor.page.get_by_role("article").nth(answer).locator(".facts").inner_text()
    return int(facts.split(" of ")[1].split()[0].replace(",", ""))


def test_images_are_attached_sent_shown_and_kept(viewer: Visitor, tmp_path: Path) -> None:
    page = viewer.page
    file = tmp_path / "cat.png"
    file.write_bytes(png(1, size=(64, 48)))
    page.get_by_label("Attach images").set_input_files(file)
    viewer.bring("paste", png(2, size=(64, 48)), png(3, size=(64, 48)))
    viewer.bring("drop", png(4, size=(64, 48)))
    attached = page.get_by_role("list", name="Attached images").get_by_role("img")
    expect(attached).to_have_count(4)
    page.get_by_role("button", name="Remove image 2").click()
    expect(attached).to_have_count(3)
    viewer.ask("What are these?")
    viewer.until_answered()
    expect(attached).to_have_count(0)
    shown = page.get_by_role("group", name="You").get_by_role("img")
    expect(shown).to_have_count(3)
    with_three = prompt_tokens(viewer, 0)
    assert with_three > 3 * 48

    page.reload()
    expect(shown).to_have_count(3)
    assert shown.first.evaluate("(image) => image.naturalWidth") == 64
    viewer.ask("And now?")
    viewer.until_answered(2)
    assert prompt_tokens(viewer, 1) > with_three
    cached = page.get_by_role("article").nth(1).locator(".facts").inner_text()
    assert int(cached.split(" · ")[-1].split()[0]) >= with_three


def test_an_image_alone_is_a_message_and_survives_text_edits(viewer: Visitor) -> None:
    page = viewer.page
    viewer.bring("paste", png(5, size=(64, 48)))
    expect(page.get_by_role("list", name="Attached images").get_by_role("img")).to_have_count(1)
    page.get_by_role("button", name="Send").click()
    viewer.until_answered()
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edited message").fill("What is this?")
    page.get_by_role("button", name="Send again").click()
    viewer.until_answered()
    question = page.get_by_role("group", name="You")
    expect(question).to_contain_text("What is this?")
    expect(question.get_by_role("img")).to_have_count(1)


def test_an_image_that_is_read_late_stays_with_its_conversation(viewer: Visitor) -> None:
    page = viewer.page
    page.evaluate(_HOLD_FILES)
    page.get_by_label("Message").fill("What is this?")
    viewer.bring("paste", png(9, size=(64, 48)))
    page.get_by_label("Message").press("Enter")
    page.get_by_role("link", name="New conversation").click()
    expect(page.get_by_label("Message")).to_have_value("")
    page.get_by_label("Message").fill("Another question")
    page.evaluate("() => releaseFiles()")
    attached = page.get_by_role("list", name="Attached images").get_by_role("img")
    expect(page.get_by_role("button", name="Send")).to_be_enabled()
    assert attached.count() == page.get_by_role("article").count() == 0
    page.get_by_role("link", name="What is this?").click()
    expect(page.get_by_label("Message")).to_have_value("What is this?")
    expect(attached).to_have_count(1)
    page.get_by_role("button", name="Send").click()
    viewer.until_answered()
    expect(page.get_by_role("group", name="You").get_by_role("img")).to_have_count(1)


def test_a_broken_image_is_reported_and_not_sent_again(viewer: Visitor) -> None:
    viewer.bring("paste", png(6)[:80])
    page = viewer.page
    viewer.ask("What is this?")
    expect(
        page.get_by_text("Image 1 of your message cannot be used: the image is damaged")
    ).to_be_visible()
    viewer.ask("And without it?")
    viewer.until_answered(2)
    page.get_by_role("button", name="Try again without this image").click()
    viewer.until_answered()
    expect(page.get_by_text("cannot be used")).to_have_count(0)


def test_images_cannot_be_attached_for_a_text_model(visitor: Visitor) -> None:
    page = visitor.page
    page.get_by_label("Message").wait_for()
    assert page.get_by_label("Attach images").count() == 0
    said = page.get_by_text("scripted reads text only.")
    visitor.bring("paste", png(7))
    expect(said).to_be_visible()
    assert (said.bounding_box() or {"height": 0})["height"] > 10
    assert page.get_by_role("list", name="Attached images").count() == 0
    page.reload()
    page.get_by_label("Message").wait_for()
    # outside the message form, the browser would open the file
    assert not visitor.bring("drop", png(7), place="h1")
    expect(said).to_be_visible()
    visitor.ask("Hello")
    expect(said).to_have_count(0)


def test_attached_images_are_not_sent_to_a_text_model(browser: Browser, tmp_path: Path) -> None:
    seeing = write_vision_model(tmp_path / "seeing", "qwen2_5_vl")
    reading = write_scripted(tmp_path / "reading", ("Yes.",))
    models = tmp_path / "models.toml"
    models.write_text(f"[models.seeing]\npath = '{seeing}'\n[models.reading]\npath = '{reading}'\n")
    with (
        running_server("--models", str(models), "--store", "off") as server,
        visiting(browser, server.url) as visitor,
    ):
        for name in ("seeing", "reading"):
            httpx.post(f"{server.url}/admin/models/{name}/load", timeout=60).raise_for_status()
        page = visitor.open()
        model = page.get_by_label("Model")
        model.select_option("seeing")
        page.get_by_label("Message").wait_for()
        visitor.bring("paste", png(8, size=(64, 48)))
        attached = page.get_by_role("list", name="Attached images").get_by_role("img")
        expect(attached).to_have_count(1)
        model.select_option("reading")
        expect(page.get_by_text("Remove the images, or choose a model")).to_be_visible()
        page.get_by_label("Message").fill("What is this?")
        page.get_by_label("Message").press("Enter")
        expect(page.get_by_role("button", name="Send")).to_be_disabled()
        page.get_by_role("button", name="Remove image 1").click()
        visitor.ask("What is this?")
        assert visitor.until_answered() == "Yes."
