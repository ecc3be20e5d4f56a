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
from tests.fakes.server_process import ServerProcess


@pytest.fixture(scope="module")
def model(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, written after the browser was found."""
    return write_scripted(tmp_path_factory.mktemp("scripted") / "model", ANSWERS)


class Servers:
    """One server after the other on the same port, with the same store."""

    def __init__(self, model: Path, store: Path) -> None:
        self._arguments = (str(model), "--name", "scripted", "--store", str(store))
        self._arguments += ("--speculation", "off")
        self.server = self._started(0)

    def _started(self, port: int) -> ServerProcess:
        server = ServerProcess(*self._arguments, port=port)
        server.wait_ready()
        return server

    def restart(self, number: signal.Signals) -> None:
        """End the server with a signal, and start the next one."""
        port = int(self.server.url.rpartition(":")[2])
        self.server.stop(number)
        self.server = self._started(port)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    with pytest.MonkeyPatch.context() as patch:
        # with kernels, long answers would end before the test can act
        patch.setenv("HOLDFAST_KERNELS", "0")
        servers = Servers(model, tmp_path_factory.mktemp("store"))
        yield servers
        assert servers.server.stop() == 0, servers.server.log()


@pytest.fixture
def visitor(browser: Browser, servers: Servers) -> Iterator[Visitor]:
    with visiting(browser, servers.server.url) as visitor:
        visitor.open()
        yield visitor


def ask_for_much(visitor: Visitor) -> None:
    visitor.ask("Say many words.")
    visitor.page.get_by_role("article").get_by_text("word20 ").wait_for()


def check_whole(visitor: Visitor) -> None:
    """The page has one question and one whole answer, also after a reload."""
    page = visitor.page
    for _ in range(2):
        visitor.until_answered()
        # what comes at once is drawn a moment later
        expect(page.get_by_role("article").locator("markdown-text")).to_have_text(LONG)
        expect(page.get_by_role("group", name="You")).to_have_count(1)
        expect(page.get_by_role("article")).to_have_count(1)
        expect(page.get_by_role("article")).not_to_contain_text("1 of 2")
        page.reload()


def test_an_answer_survives_the_death_of_its_worker(visitor: Visitor, servers: Servers) -> None:
    ask_for_much(visitor)
    pid = servers.server.model()["pid"]
    os.kill(pid, signal.SIGKILL)
    check_whole(visitor)
    assert servers.server.model()["pid"] != pid


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_answer_survives_a_restart_of_the_server(
    visitor: Visitor, servers: Servers, number: signal.Signals
) -> None:
    ask_for_much(visitor)
    servers.restart(number)
    check_whole(visitor)


@pytest.mark.slow
def test_a_closed_page_finds_its_answer_after_a_restart_of_the_server(
    visitor: Visitor, servers: Servers
) -> None:
    ask_for_much(visitor)
    address = visitor.page.url
    visitor.page.goto("about:blank")
    servers.restart(signal.SIGTERM)
    visitor.page.goto(address)
    check_whole(visitor)


def test_an_answer_survives_a_lost_connection(browser: Browser, servers: Servers) -> None:
    with (
        relayed(servers.server.url) as relay,
        visiting(browser, relay.url) as visitor,
    ):
        visitor.open()
        ask_for_much(visitor)
        relay.cut()
        visitor.page.get_by_text("The connection is lost").wait_for()
        relay.mend()
        check_whole(visitor)


@pytest.mark.slow
def test_a_finished_conversation_goes_on_after_a_restart_of_the_server(
    visitor: Visitor, servers: Servers
) -> None:
    page = visitor.page
    visitor.ask("Say many words.")
    visitor.until_answered()
    servers.restart(signal.SIGTERM)
    visitor.ask("And now?")
    visitor.until_answered(2)
    expect(page.get_by_role("article")).to_have_count(2)
    expect(page.get_by_role("article").last).to_contain_text("Ferry")
    assert servers.server.model()["state"] == "ready"
