"""A conversation in the page survives what happens to the worker, the server and the connection."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.fakes.browser import Visitor, visiting
from tests.fakes.cut_connection import relayed
from tests.fakes.page_script import ANSWERS, LONG
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server


@pytest.fixture(scope="module")
def model(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, written after the browser was found."""
    return write_scripted(tmp_path_factory.mktemp("scripted") / "model", ANSWERS)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    store = tmp_path_factory.mktemp("store")
    options = ("--name", "scripted", "--store", str(store), "--speculation", "off")
    with pytest.MonkeyPatch.context() as patch:
        # with kernels, long answers would end before the test can act
        patch.setenv("HOLDFAST_KERNELS", "0")
        with running_server(str(model), *options) as server:
            yield server


@pytest.fixture
def visitor(browser: Browser, server: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, server.url) as visitor:
        visitor.open()
        yield visitor


def ask_for_much(visitor: Visitor) -> None:
    visitor.ask("Say many words.")
    visitor.page.get_by_role("article").get_by_text("word20 ").wait_for()


def check_whole(visitor: Visitor) -> None:
    """The page has one question and one complete answer, even after a reload."""
    page = visitor.page
    for _ in range(2):
        visitor.until_answered()
        # events that arrive together are rendered a moment later
        expect(page.get_by_role("article").locator("markdown-text")).to_have_text(LONG)
        expect(page.get_by_role("group", name="You")).to_have_count(1)
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.get_by_role("article")).not_to_contain_text("1 of 2")
        page.reload()


def test_an_answer_survives_the_death_of_its_worker(
    visitor: Visitor, server: ServerProcess
) -> None:
    ask_for_much(visitor)
    pid = server.model()["pid"]
    os.kill(pid, signal.SIGKILL)
    check_whole(visitor)
    assert server.model()["pid"] != pid


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_answer_survives_a_restart_of_the_server(
    visitor: Visitor, server: ServerProcess, number: signal.Signals
) -> None:
    ask_for_much(visitor)
    server.restart(number)
    check_whole(visitor)


@pytest.mark.slow
def test_a_reopened_page_finds_its_answer_after_a_server_restart(
    visitor: Visitor, server: ServerProcess
) -> None:
    ask_for_much(visitor)
    address = visitor.page.url
    visitor.page.goto("about:blank")
    server.restart(signal.SIGTERM)
    visitor.page.goto(address)
    check_whole(visitor)


def test_an_answer_survives_a_lost_connection(browser: Browser, server: ServerProcess) -> None:
    with (
        relayed(server.url) as relay,
        visiting(browser, relay.url) as visitor,
    ):
        visitor.open()
        ask_for_much(visitor)
        relay.cut()
        visitor.page.get_by_text("The connection is lost").wait_for()
        relay.mend()
        check_whole(visitor)


@pytest.mark.slow
def test_a_finished_conversation_continues_after_a_server_restart(
    visitor: Visitor, server: ServerProcess
) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    visitor.until_answered()
    server.restart(signal.SIGTERM)
    visitor.ask("And now?")
    visitor.until_answered(2)
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("article").last).to_contain_text("Ferry")
    assert server.model()["state"] == "ready"
