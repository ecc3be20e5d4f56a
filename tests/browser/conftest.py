"""One browser, and one server with a scripted model, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.fakes.browser import Visitor, running_browser, visiting
from tests.fakes.page_script import ANSWERS, MARKUP
from tests.fakes.scripted_model import write_scripted
from tests.fakes.server_process import ServerProcess, running_server, slow_steps


@pytest.fixture(scope="module")  # not longer: its event loop keeps others from running
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def scripted_server(
    browser: Browser, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server whose model gives the answers of `page_script`, and whose store has a folder that
    looks like markup; requested after the browser, so that it does not start where the tests are
    skipped.
    """
    folder = write_scripted(tmp_path_factory.mktemp("scripted") / "model", ANSWERS)
    store = tmp_path_factory.mktemp("store") / MARKUP
    options = ("--name", "scripted", "--store", str(store), "--speculation", "off")
    options += ("--allowed-hosts", "harbour.example")
    with running_server(str(folder), *options, environ=slow_steps()) as server:
        yield server


@pytest.fixture
def visitor(browser: Browser, scripted_server: ServerProcess) -> Iterator[Visitor]:
    with visiting(browser, scripted_server.url) as visitor:
        visitor.open()
        yield visitor
