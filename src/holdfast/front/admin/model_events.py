"""GET /admin/models/events: loads, unloads and downloads as they happen.

The events have the shape of those of llama.cpp's `/models/sse`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.front.openai.answers import openai_error
from holdfast.front.server.answers import StreamFormat
from holdfast.front.server.dialect import operation
from holdfast.front.server.disconnect import unless_disconnected
from holdfast.front.server.openapi import endless_stream_of
from holdfast.front.server.problem import Problem
from holdfast.front.server.services import Services
from holdfast.front.server.sse import EventWriter

POLL_SECONDS = 0.25
_STATUS_WORDS = {  # llama.cpp's words where they differ from our states
    "ready": "loaded",
    "stopping": "unloading",
    "failed": "unloaded",
}


class ModelEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A change of one model.

    model_status: `data.status` is unloaded, loading, loaded or unloading. After a failed load it is
        unloaded, with `failed` true and the reason in `message`.
    model_remove: the model is no longer served.
    download_progress: `data` has the `done` and `total` bytes of each stage, `download` and
        `checking`.
    download_end: the download has ended. If it succeeded, a model_status of the model follows.
    """

    model: str
    event: Literal["model_status", "model_remove", "download_progress", "download_end"]
    data: dict[str, Any] = {}


class _Events(StreamFormat):
    """Server-sent events; comments keep the connection open."""

    def broken(self, problem: Problem) -> bytes:
        """The error as an event."""
        return b"data: %b\n\n" % msgspec.json.encode(openai_error(problem))


class ModelEventsResponse(Response):
    """Events until the client leaves or the server stops."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._statuses: dict[str, dict[str, Any]] = {}
        self._downloads: dict[str, dict[str, Any]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the state of all models, then every change."""
        writer = EventWriter(send, _Events(), self._frames())
        await unless_disconnected(receive, writer.run())

    async def _frames(self) -> AsyncIterator[bytes]:
        yield b""
        while not self._services.drain.is_on:
            for event in self._model_changes():
                yield _frame(event)
            for event in self._download_changes():
                yield _frame(event)
            await asyncio.sleep(POLL_SECONDS)

    def _model_changes(self) -> Iterator[ModelEvent]:
        before = self._statuses
        self._statuses = {}
        for model in self._services.statuses():
            status: dict[str, Any] = {"status": _STATUS_WORDS.get(model.state, model.state)}
            if model.state == "failed":
                status["failed"] = True
                status["message"] = model.failure
            self._statuses[model.id] = status
            if before.get(model.id) != status:
                yield ModelEvent(model=model.id, event="model_status", data=status)
        for name in before.keys() - self._statuses.keys():
            yield ModelEvent(model=name, event="model_remove")

    def _download_changes(self) -> Iterator[ModelEvent]:
        before = self._downloads
        self._downloads = {}
        for name, steps in self._services.library.progress().items():
            progress: dict[str, Any] = {}
            for step in steps:
                progress[step.stage] = {"done": step.done_bytes, "total": step.total_bytes}
            self._downloads[name] = progress
            if progress and before.get(name) != progress:
                yield ModelEvent(model=name, event="download_progress", data=progress)
        for name in before.keys() - self._downloads.keys():
            yield ModelEvent(model=name, event="download_end")


def _frame(event: ModelEvent) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(event)


@operation("GET", "/admin/models/events", endless_stream_of(ModelEvent), needs_admin=True)
async def follow_models(request: Request, services: Services) -> Response:
    """Follow loads, unloads and downloads of models, as server-sent events.

    The first events give the state of every model. The stream ends when the server stops.
    """
    return ModelEventsResponse(services)
