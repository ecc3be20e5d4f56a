from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from holdfast.front.telemetry.log_ring import LogRing
from tests.fakes.http_clients import Exchange, client_of, events_of
from tests.fakes.scripted_gateway import ScriptedGateway


def line(ring: LogRing, text: str, level: int = logging.INFO) -> None:
    ring.handle(logging.LogRecord("holdfast.tests", level, "", 0, text, None, None))


async def shown(query: dict[str, Any]) -> tuple[int, Any]:
    async with client_of(ScriptedGateway()) as client:
        ring = client._transport.app.state.services.telemetry.log_ring  # type: ignore[attr-defined]
        line(ring, "one", logging.DEBUG)
        line(ring, "two <script>", logging.WARNING)
        line(ring, "three", logging.ERROR)
        answered = await client.get("/admin/logs", params=query)
    return answered.status_code, answered.json()


@pytest.mark.parametrize(
    ("query", "texts"),
    [
        ({}, ["one", "two <script>", "three"]),
        ({"level": "warning"}, ["two <script>", "three"]),
        ({"text": "SCRIPT"}, ["two <script>"]),
        ({"after": 2}, ["three"]),
        ({"limit": 2}, ["two <script>", "three"]),
        ({"request_id": "none"}, []),
    ],
)
async def test_the_lines_are_shown_with_filters(query: dict[str, Any], texts: list[str]) -> None:
    status, found = await shown(query)
    assert status == 200
    assert [each["text"] for each in found["lines"]] == texts


@pytest.mark.parametrize(
    ("query", "param"),
    [({"level": "loud"}, "level"), ({"after": "-1"}, "after"), ({"limit": 0}, "limit")],
)
async def test_wrong_filters_are_refused(query: dict[str, Any], param: str) -> None:
    status, found = await shown(query)
    assert (status, found["error"]["param"]) == (400, param)


async def test_the_stream_has_the_kept_lines_and_those_that_follow() -> None:
    exchange = Exchange(ScriptedGateway())
    ring = exchange.app.state.services.telemetry.log_ring
    line(ring, "before", logging.WARNING)
    line(ring, "hidden")
    following = asyncio.create_task(
        exchange.run("/admin/logs/events", {}, method="GET", query="level=warning")
    )
    await exchange.until(lambda: "before" in exchange.text)
    line(ring, "hidden")
    line(ring, "after", logging.ERROR)
    await exchange.until(lambda: "after" in exchange.text)
    exchange.gone.set()
    await following
    lines = [each for event in events_of(exchange.text) for each in event["lines"]]
    assert [(each["number"], each["text"]) for each in lines] == [(1, "before"), (4, "after")]
    assert "hidden" not in json.dumps(lines)
