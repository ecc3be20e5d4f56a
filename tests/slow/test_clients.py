"""Real clients, each in a separate environment, complete a tool loop and show a thought of the
bundled model.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.server_process import ServerProcess
from tools.clients import ALIASES, WAITING_MODEL, checked, scripts, waiting_scripts, waiting_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess(
        "--store", "off", "--name", "demo", "--set", f"server.model_aliases={ALIASES}"
    )
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.parametrize("script", scripts(), ids=lambda script: script.stem)
def test_a_client_calls_tools_and_thinks_streamed_and_whole(
    script: Path, server: ServerProcess
) -> None:
    found = list(checked(script, base_url=f"{server.url}/v1", model="demo"))
    assert [f"{each.check}: {each.problem}" for each in found if each.problem] == []
    assert "Traceback" not in server.log()


@pytest.mark.parametrize("script", waiting_scripts(), ids=lambda script: script.stem)
def test_a_client_waits_for_a_server_that_sends_keep_alives(script: Path) -> None:
    with waiting_server() as base_url:
        found = list(checked(script, base_url=base_url, model=WAITING_MODEL, waits=True))
    assert [f"{each.check}: {each.problem}" for each in found if each.problem] == []
