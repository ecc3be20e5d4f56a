"""Ten thousand faulty requests for each protocol: each gets a documented answer, never an internal
error.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Iterator

import httpx
import pytest

from tests.fakes.fuzzed_protocols import PROTOCOLS, FuzzedProtocol
from tests.fakes.server_process import ServerProcess

pytestmark = pytest.mark.slow
BODIES, AT_ONCE = 10_000, 8
# a body without `max_tokens` whose text repeats one letter 300 times may be answered without end
BOUNDED = ("--context", "2048")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    server = ServerProcess("--store", "off", "--name", "demo", "--log-level", "error", *BOUNDED)
    server.wait_ready()
    httpx.post(
        f"{server.url}/admin/models/demo/pin"
    ).raise_for_status()  # Ollama's `keep_alive` would unload it and wait
    yield server
    assert server.stop() == 0, server.log()


@pytest.mark.timeout(120 + BODIES // 10)
@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_fuzzed_requests_are_answered_or_refused_by_name(
    protocol: FuzzedProtocol, server: ServerProcess
) -> None:
    fuzzer = protocol.fuzzer(11, model="demo")
    counted: collections.Counter[int] = collections.Counter()
    pid = server.model()["pid"]
    headers = {"content-type": "application/json", **dict(protocol.headers)}
    async with httpx.AsyncClient(base_url=server.url, timeout=300, headers=headers) as client:

        async def work(share: int) -> None:
            for _ in range(share):
                path, body = fuzzer.request()
                response = await client.post(path, content=body)
                counted[response.status_code] += 1
                protocol.check(response, body)

        await asyncio.gather(*(work(BODIES // AT_ONCE) for _ in range(AT_ONCE)))
    assert counted.total() == BODIES
    assert counted[200] > BODIES // 20, counted
    assert counted[400] > BODIES // 20, counted
    assert server.model()["pid"] == pid, "the worker was lost"
    assert "Traceback" not in server.log()
