"""/admin/logs: the latest lines of the server's log, and those that follow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, TypedDict

import msgspec
from msgspec import Struct
from pydantic import Field, NonNegativeInt
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.openai.answer import EventFormat
from holdfast.front.server.dialect import ENDLESS_MARK, operation
from holdfast.front.server.generation import FollowingResponse
from holdfast.front.server.openapi import query_shape, response_shape, returns
from holdfast.front.server.request import choice_in, json_response, number_in
from holdfast.front.server.services import Services
from holdfast.front.telemetry.log_ring import LEVELS, MOST_LINES, LevelName, LogLine

POLL_SECONDS = 0.5
_MOST_LINE_NUMBER = (1 << 63) - 1
_LINES_PER_EVENT = 500
_FILTER_PARAMETERS = {
    "level": (LevelName, "The lowest level to show; default: debug, all that the server logs."),
    "request_id": (str, "Show only lines of this request, or that contain its id."),
    "text": (str, "Show only lines that contain this text, in any case."),
    "after": (NonNegativeInt, "Show only lines after the one with this number."),
}


class LogLines(Struct, frozen=True, kw_only=True):
    """Lines of the log, the oldest first."""

    lines: list[LogLine]


class _Filter(TypedDict):
    """Which lines to show: the arguments of `LogRing.lines`, except for `after`."""

    level: LevelName
    request_id: str
    text: str


def _filter_in(query: Mapping[str, str]) -> _Filter:
    """The filter that a query asks for, by default all lines."""
    return _Filter(
        level=choice_in(query, "level", LEVELS, LEVELS[0]),
        request_id=query.get("request_id", ""),
        text=query.get("text", ""),
    )


def _after_in(query: Mapping[str, str]) -> int:
    """The number after which lines are shown; 0 for all lines."""
    return number_in(query, "after", 0, _MOST_LINE_NUMBER) or 0


@operation(
    "GET",
    "/admin/logs",
    query_shape(
        {
            **_FILTER_PARAMETERS,
            "limit": (
                Annotated[int, Field(ge=1, le=MOST_LINES)],
                "Show only this many lines, the latest ones; default: all that are kept.",
            ),
        }
    ),
    returns(LogLines),
    needs_admin=True,
)
async def show_logs(request: Request, services: Services) -> Response:
    """Show the latest lines of the log. The server keeps up to 2,000 lines in memory, its own
    and those of its workers.
    """
    query = request.query_params
    lines = services.telemetry.log_ring.lines(after=_after_in(query), **_filter_in(query))
    limit = number_in(query, "limit", 1, MOST_LINES) or MOST_LINES
    return json_response(LogLines(lines=lines[-limit:]))


@operation(
    "GET",
    "/admin/logs/events",
    query_shape(_FILTER_PARAMETERS),
    response_shape({"text/event-stream": LogLines}),
    {ENDLESS_MARK: True},
    needs_admin=True,
)
async def follow_logs(request: Request, services: Services) -> Response:
    """Follow the log, as server-sent events.

    The first events have the lines that are kept. The stream ends when the server stops.
    """
    query = request.query_params
    events = _events(services, _filter_in(query), after=_after_in(query))
    return FollowingResponse(events, EventFormat())


async def _events(services: Services, line_filter: _Filter, *, after: int) -> AsyncIterator[bytes]:
    """Yield the lines that are kept and then all new ones, until the server stops."""
    yield b""  # so that the response begins at once
    ring = services.telemetry.log_ring
    while not services.access.drain.is_on:
        latest_number = ring.latest_number
        lines = ring.lines(after=after, **line_filter) if latest_number > after else []
        for start in range(0, len(lines), _LINES_PER_EVENT):
            event = LogLines(lines=lines[start : start + _LINES_PER_EVENT])
            yield b"data: %b\n\n" % msgspec.json.encode(event)
        after = max(after, latest_number, lines[-1].number if lines else 0)
        await asyncio.sleep(POLL_SECONDS)


OPERATIONS = (show_logs, follow_logs)
