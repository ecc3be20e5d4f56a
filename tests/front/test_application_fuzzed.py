"""A small sample of the slow tests' ten thousand requests with injected faults: answered or refused
as documented.
"""

from __future__ import annotations

import collections

import pytest

from tests.fakes.fuzzed_protocols import PROTOCOLS, FuzzedProtocol
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

BODIES = 60


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=lambda protocol: protocol.name)
async def test_fuzzed_requests_are_answered_or_refused_by_name(protocol: FuzzedProtocol) -> None:
    fuzzer = protocol.fuzzer(5, model=MODEL)
    counted: collections.Counter[int] = collections.Counter()
    async with client_of(ScriptedGateway()) as client:
        for _ in range(BODIES):
            path, body = fuzzer.request()
            response = await client.post(
                path,
                content=body,
                headers={"content-type": "application/json", **dict(protocol.headers)},
            )
            counted[response.status_code] += 1
            protocol.check(response, body)
    assert counted[200] > BODIES // 20, counted
    assert counted[400] > BODIES // 20, counted
