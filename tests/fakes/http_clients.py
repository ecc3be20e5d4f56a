"""Ways to talk to the HTTP application: in memory, and through a real port."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import httpx

from holdfast.config import LimitsSettings, LogSettings, ServerSettings
from holdfast.front.application import DIALECTS, create_application
from holdfast.front.fleet.library import Library
from holdfast.front.server.access import KeyRing
from holdfast.front.server.dialect import Dialect
from holdfast.front.server.http_server import HttpServer, ServerCertificate, listen, url_of
from holdfast.front.server.services import Services
from tests.fakes.scripted_gateway import (
    MODEL,
    ScriptedControl,
    ScriptedDirectory,
    ScriptedGateway,
    ScriptedSessions,
    scripted_services,
)

NOTHING_DRAFTED = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "hello"}]


def client_of(
    gateway: ScriptedGateway,
    *,
    sessions: ScriptedSessions | None = None,
    directory: ScriptedDirectory | None = None,
    server: ServerSettings | None = None,
    limits: LimitsSettings | None = None,
    log: LogSettings | None = None,
    control: ScriptedControl | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    keys: KeyRing | None = None,
    address: str = "127.0.0.1",
) -> httpx.AsyncClient:
    services = scripted_services(
        gateway, sessions=sessions, directory=directory, server=server, limits=limits, log=log
    )
    access = replace(services.access, keys=keys or services.access.keys)
    models = replace(services.models, control=control or services.models.control)
    services = replace(services, access=access, models=models)
    app = create_application(services, dialects=dialects)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app, client=(address, 1)), base_url="http://127.0.0.1:8321"
    )


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, **fields}


def completion_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "hello", **fields}


def message_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 100, "messages": HELLO, **fields}


@asynccontextmanager
async def client_over(services: Services) -> AsyncIterator[httpx.AsyncClient]:
    """An in-memory client of the application; ends everything that runs."""
    transport = httpx.ASGITransport(create_application(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8321") as client:
        yield client
    await services.answers.resumable.close()
    await services.answers.responses.close()


async def response_in(client: httpx.AsyncClient, response_id: str, *statuses: str) -> Any:
    """A stored response, as soon as it has one of these statuses."""
    while True:
        found = (await client.get(f"{RESPONSES}/{response_id}")).json()
        if found["status"] in statuses:
            return found
        await asyncio.sleep(0.001)


async def accepted_chat(**fields: Any) -> Any:
    """The request that reaches the model for a chat request with these fields."""
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json=chat_body(**fields))
    assert response.status_code == 200, response.text
    return gateway.request


async def refused_chat(**fields: Any) -> tuple[int, str]:
    """Status code and `param` of the error, whose message contains the parameter too."""
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(CHAT, json=chat_body(**fields))
    assert gateway.requests == []
    error = response.json()["error"]
    assert error["param"] in error["message"]
    return response.status_code, error["param"]


def named_events_of(text: str) -> list[tuple[str, Any]]:
    """The events of a stream with named events: name and data.

    Asserts that there are only such events.
    """
    *events, rest = text.split("\n\n")
    assert rest == ""
    pairs = [event.split("\n") for event in events]
    assert all(name.startswith("event: ") and data.startswith("data: ") for name, data in pairs)
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in pairs
    ]


def events_of(text: str) -> list[Any]:
    """The data of a stream's events; the last one, [DONE], as a string."""
    lines = [
        event.removeprefix("data: ") for event in text.split("\n\n") if event.startswith("data: ")
    ]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


@asynccontextmanager
async def served(
    gateway: ScriptedGateway,
    *,
    settings: ServerSettings | None = None,
    dialects: Sequence[Dialect] = DIALECTS,
    certificate: ServerCertificate | None = None,
    directory: ScriptedDirectory | None = None,
    keys: KeyRing | None = None,
) -> AsyncIterator[str]:
    """The application on a free loopback port, with the real server and its relevant options."""
    settings = settings or ServerSettings(port=0, shutdown_seconds=0, reconnect_seconds=0)
    services = scripted_services(gateway, server=settings, directory=directory)
    access = replace(services.access, keys=keys or services.access.keys)
    services = replace(services, access=access)
    app = create_application(services, dialects=dialects)
    with listen(settings) as listener:
        started = asyncio.Event()
        running = HttpServer(app, settings, on_started=started.set, certificate=certificate)
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        await started.wait()
        try:
            yield url_of(listener, scheme=settings.scheme)
        finally:
            running.should_exit = True
            await serving


@contextmanager
def served_on_a_thread(
    *,
    settings: ServerSettings,
    certificate: ServerCertificate | None = None,
    directory: ScriptedDirectory | None = None,
    keys: KeyRing | None = None,
) -> Iterator[str]:
    """The same for synchronous tests; the model answers with nothing."""
    listening: queue.Queue[str] = queue.Queue()
    stop = threading.Event()

    async def serve() -> None:
        serving = served(
            ScriptedGateway([]),
            settings=settings,
            certificate=certificate,
            directory=directory,
            keys=keys,
        )
        async with serving as url:
            listening.put(url)
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        yield listening.get(timeout=60)
    finally:
        stop.set()
        thread.join()


class Exchange:
    """One request to the application without a client in between: every message is visible, and the
    client can leave.
    """

    def __init__(
        self,
        gateway: ScriptedGateway,
        *,
        server: ServerSettings | None = None,
        sessions: ScriptedSessions | None = None,
        directory: ScriptedDirectory | None = None,
        library: Library | None = None,
        control: ScriptedControl | None = None,
        dialects: Sequence[Dialect] = DIALECTS,
    ) -> None:
        services = scripted_services(
            gateway,
            server=server,
            sessions=sessions,
            directory=directory,
            library=library,
            control=control,
        )
        self.app = create_application(services, dialects=dialects)
        self.messages: list[Any] = []
        self.leaves_behind = b""  # the client leaves after this
        self.first_body = asyncio.Event()
        self.gone = asyncio.Event()
        self._written = asyncio.Event()

    @property
    def text(self) -> str:
        """All written text."""
        return b"".join(message.get("body", b"") for message in self.messages).decode()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def writes(self) -> list[bytes]:
        """The bodies as passed to the socket."""
        return [message["body"] for message in self.messages if message.get("body")]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for messages until a condition holds."""
        while not condition():
            self._written.clear()
            await self._written.wait()

    async def run(
        self,
        path: str,
        body: dict[str, Any],
        *,
        method: str = "POST",
        headers: Mapping[str, str] | None = None,
        address: str = "127.0.0.1",
        query: str = "",
        upload_breaks_off: bool = False,
    ) -> None:
        raw = json.dumps(body).encode()
        unread = [{"type": "http.request", "body": raw, "more_body": upload_breaks_off}]
        given = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"), *given],
            "client": (address, 1),
            "server": ("127.0.0.1", 8321),
        }

        async def receive() -> Any:
            if unread:
                return unread.pop()
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            self.messages.append(message)
            self._written.set()
            if message.get("body"):
                self.first_body.set()
            if self.leaves_behind and self.leaves_behind in message.get("body", b""):
                asyncio.get_running_loop().call_soon(self.gone.set)

        await self.app(scope, receive, send)
