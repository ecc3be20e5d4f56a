"""schemathesis calls every documented operation: no internal errors, and every response matches its
description.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import httpx
import pytest

from holdfast.front.server.dialect import ENDLESS_MARK
from tests.fakes.server_process import ServerProcess
from tools.schemathesis import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--store", "off", "--name", "demo", "--log-level", "error")
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.timeout(900)
def test_every_operation_matches_its_description(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"].values()
    described = [operation for operations in paths for operation in operations.values()]
    ending = [operation for operation in described if ENDLESS_MARK not in operation]
    done = run(server.url)
    assert done.returncode == 0, done.stdout
    tested = re.search(r"Selected: (\d+)/(\d+)\s+Tested: (\d+)", done.stdout)
    assert tested is not None, done.stdout
    assert [int(number) for number in tested.groups()] == [len(ending), len(described), len(ending)]
    # The worker may be a new one, because unloading is among the operations; but none may have died.
    restarts = re.findall(
        r"^holdfast_worker_restarts_total\{.*\} (.+)$",
        httpx.get(f"{server.url}/metrics").text,
        re.M,
    )
    assert {float(number) for number in restarts} == {0.0}
    assert "Traceback" not in server.log()
