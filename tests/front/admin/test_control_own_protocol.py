"""A dialect defined only in this file is served by the real application: fields, streams, ends and
errors in its own form.

Its streams are lines: `> "text"` for new text, `. reason` for the end of a choice, `= read+written`
and `bye` at the end, `! code` for an error, `~` to keep the line open.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.config import LimitsSettings, ServerSettings, Settings
from holdfast.errors import GenerationFailed, QueueFull, WorkerUnavailable
from holdfast.front.application import DIALECTS
from holdfast.front.fleet.residency import Residency
from holdfast.front.fleet.slot import ModelFiles
from holdfast.front.output import ChoiceFinished, OutputEvent, TextDelta, TokenCounts
from holdfast.front.request import GenerationRequest
from holdfast.front.run.web import build_application
from holdfast.front.server import answers as server_answers
from holdfast.front.server.answers import AnswerFormat, GenerationPlan
from holdfast.front.server.context import RequestContext
from holdfast.front.server.dialect import Dialect, operation
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.generation import generation_response
from holdfast.front.server.http_server import HttpServer, listen, url_of
from holdfast.front.server.openapi import accepts
from holdfast.front.server.problem import Problem
from holdfast.front.server.request import parse
from holdfast.front.server.services import Services, first_model
from holdfast.wire.commands import WorkerSettings
from holdfast.wire.requests import SamplingParams
from tests.fakes.fake_models import catalog_over
from tests.fakes.http_clients import CHAT, Exchange, chat_body, client_of, served
from tests.fakes.scripted_gateway import (
    MODEL,
    PROMPT_TOKENS,
    ScriptedDirectory,
    ScriptedGateway,
    answer,
    model_status,
)
from tests.fakes.server_process import served_model_folder

SPEAK = "/toy/speak"


class Lines(AnswerFormat):
    stream_type = "text/x-lines"

    def keep_alive(self) -> bytes:
        return b"~\n"

    def delta_event(self, event: TextDelta) -> bytes:
        return b"> %b\n" % json.dumps(event.text).encode()

    def choice_end(self, event: ChoiceFinished) -> bytes:
        return b". %b\n" % event.finish_reason.encode()

    def stream_end(self, counts: TokenCounts, explanation: Explanation | None) -> bytes:
        return b"= %d+%d\nbye\n" % (counts.prompt_tokens, counts.completion_tokens)

    def error_event(self, problem: Problem) -> bytes:
        return b"! %b\n" % problem.code.encode()

    def complete_body(
        self, events: Iterable[OutputEvent], counts: TokenCounts, explanation: Explanation | None
    ) -> bytes:
        *deltas, end = events
        assert isinstance(end, ChoiceFinished)
        return json.dumps(
            {
                "spoken": "".join(each.text for each in deltas if isinstance(each, TextDelta)),
                "why": end.finish_reason,
                "read": counts.prompt_tokens,
            }
        ).encode()


class Wish(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    after: str = Field(min_length=1)
    by: str | None = None
    at_most: int = Field(8, ge=1)
    at_once: bool = False
    secret: str = ""

    @property
    def cache_salt(self) -> str:
        return self.secret

    def plan(self, context: RequestContext) -> GenerationPlan:
        request = GenerationRequest(
            request_id="toy",
            model=self.by or first_model(context.services),
            tenant=context.tenant,
            prompt=self.after,
            max_tokens=self.at_most,
            sampling=SamplingParams(temperature=0.0),
            prompt_field="after",
            streams=not self.at_once,
        )
        return [request], Lines()


@operation("POST", SPEAK, accepts(Wish), summary="a toy")
async def speak(request: Request, services: Services) -> Response:
    """Continue speaking."""
    return await generation_response(request, services, partial(parse, Wish))


def toy_error(problem: Problem) -> dict[str, Any]:
    return {"oops": problem.code, "about": problem.field, "said": problem.message}


TOY = Dialect(
    name="The toy's API",
    error=toy_error,
    prefixes=("/toy",),
    serves="the toy: /toy/speak",
    operations=(speak,),
)
TABLE = (*DIALECTS, TOY)


async def asked(
    gateway: ScriptedGateway | None = None,
    path: str = SPEAK,
    *,
    method: str = "POST",
    body: Any = None,
    **settings: Any,
) -> httpx.Response:
    limits = LimitsSettings(max_body_bytes=1024)
    async with client_of(
        gateway or ScriptedGateway(),
        server=ServerSettings(**settings),
        limits=limits,
        dialects=TABLE,
    ) as client:
        return await client.request(method, path, json=body or {"after": "once"})


async def test_its_stream_has_its_own_type_framing_counts_and_end() -> None:
    gateway = ScriptedGateway(script=answer("Hel", 'lo "☃"'))
    response = await asked(gateway, body={"after": "once", "at_most": 3, "secret": "s"})
    assert (response.status_code, response.headers["content-type"]) == (200, "text/x-lines")
    assert response.text == f'> "Hel"\n> "lo \\"\\u2603\\""\n. stop\n= {PROMPT_TOKENS}+2\nbye\n'
    assert (gateway.request.model, gateway.request.prompt, gateway.request.max_tokens) == (
        MODEL,
        "once",
        3,
    )
    assert gateway.request.tenant != ""


async def test_its_whole_answer_has_its_own_form() -> None:
    response = await asked(body={"after": "once", "at_once": True})
    assert response.json() == {"spoken": "Hello", "why": "stop", "read": PROMPT_TOKENS}


@pytest.mark.parametrize(
    ("body", "field", "code"),
    [
        ({"after": ""}, "after", "invalid_value"),
        ({"after": "x", "at_most": "5"}, "at_most", "invalid_type"),
        ({"after": "x", "messages": []}, "messages", "unknown_parameter"),
        ({"by": "x"}, "after", "missing_required_parameter"),
    ],
)
async def test_a_wrong_field_is_named_in_its_own_form(body: Any, field: str, code: str) -> None:
    response = await asked(body=body)
    assert (response.status_code, set(response.json())) == (400, {"oops", "about", "said"})
    assert (response.json()["about"], response.json()["oops"]) == (field, code)


async def test_it_formats_unknown_models_and_large_bodies_too() -> None:
    unknown = await asked(body={"after": "once", "by": "nobody"})
    large = await asked(body={"after": "x" * 2000})
    assert (unknown.status_code, unknown.json()["oops"], unknown.json()["about"]) == (
        404,
        "model_not_found",
        "model",
    )
    assert (large.status_code, large.json()["oops"]) == (413, "body_too_large")


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_full_queue_has_its_status_and_form(at_once: bool) -> None:
    full = ScriptedGateway(refusal=QueueFull(queued=9, limit=9, retry_after_seconds=3))
    response = await asked(full, body={"after": "once", "at_once": at_once})
    assert (response.status_code, response.headers["retry-after"], response.json()["oops"]) == (
        503,
        "3",
        "queue_full",
    )


async def test_the_guard_speaks_it_as_well() -> None:
    locked = await asked(api_key="sesame")
    async with client_of(ScriptedGateway(), dialects=TABLE) as client:
        misdirected = await client.post(SPEAK, json={}, headers={"host": "evil.example"})
    assert (locked.status_code, locked.json()["oops"], locked.headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    assert (misdirected.status_code, misdirected.json()["oops"]) == (421, "host_not_allowed")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/toy/sing", 404), ("GET", SPEAK, 405), ("POST", "/toy", 404)],
)
async def test_unknown_paths_and_methods_below_its_path_have_its_form(
    method: str, path: str, status: int
) -> None:
    response = await asked(path=path, method=method)
    assert (response.status_code, set(response.json())) == (status, {"oops", "about", "said"})
    if status == 404:
        assert "the toy: /toy/speak" in response.json()["said"]
    else:
        assert response.headers["allow"] == "POST"


async def test_an_internal_error_has_its_form() -> None:
    response = await asked(ScriptedGateway(refusal=RuntimeError("inner words")))
    assert (response.status_code, response.json()["oops"]) == (500, "internal_error")
    assert "inner words" not in response.text


async def test_an_error_within_its_stream_ends_it_in_its_form() -> None:
    gateway = ScriptedGateway()
    exchange = Exchange(gateway, dialects=TABLE)
    gateway.script = [*answer("Hel")[:1], exchange.first_body, GenerationFailed("the worker died")]
    await exchange.run(SPEAK, {"after": "once"})
    assert exchange.text == '> "Hel"\n! generation_failed\n'
    assert exchange.messages[-1]["more_body"] is False


async def test_a_server_stop_ends_its_stream_in_its_form() -> None:
    exchange = Exchange(
        ScriptedGateway(script=[*answer("Hel")[:1], asyncio.Event()]), dialects=TABLE
    )
    running = asyncio.create_task(exchange.run(SPEAK, {"after": "once"}))
    await exchange.first_body.wait()
    running.cancel()
    await running
    assert exchange.text == '> "Hel"\n! model_unavailable\n'


async def test_its_own_keep_alive_is_sent_during_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_answers, "HEADER_GRACE_SECONDS", 0.001)
    monkeypatch.setattr(server_answers, "KEEP_ALIVE_SECONDS", 0.001)
    loading = ScriptedDirectory(models=(model_status(state="loading"),))
    gateway = ScriptedGateway(
        accept_when=asyncio.Event(), refusal_at_last=WorkerUnavailable("still loading")
    )
    exchange = Exchange(gateway, directory=loading, dialects=TABLE)
    running = asyncio.create_task(exchange.run(SPEAK, {"after": "once"}))
    await exchange.first_body.wait()
    assert gateway.accept_when is not None
    gateway.accept_when.set()
    await running
    assert exchange.text.strip("~\n") == "! model_unavailable"
    assert exchange.text.startswith("~\n")


async def test_a_connection_ended_for_a_late_body_gets_its_form() -> None:
    settings = ServerSettings(port=0, shutdown_seconds=0, body_seconds=0.02)
    async with served(ScriptedGateway(), settings=settings, dialects=TABLE) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{" % SPEAK.encode()
        )
        got = await reader.read()
        writer.close()
    assert json.loads(got.partition(b"\r\n\r\n")[2])["oops"] == "request_timeout"


async def test_it_is_documented_and_listed_without_affecting_others() -> None:
    async with client_of(ScriptedGateway(), dialects=TABLE) as client:
        described = (await client.get("/openapi.json")).json()
        page = (await client.get("/")).text
        chat = await client.post(CHAT, json=chat_body())
        unserved = await client.post("/v1/audio/speech", json={})
        without_slash = await client.post("/v1/toy/speak/", json={"after": "once"})
    assert described["paths"][SPEAK]["post"]["description"] == "Continue speaking."
    assert "at_most" in described["components"]["schemas"]["Wish"]["properties"]
    assert SPEAK in page
    assert chat.json()["choices"][0]["message"]["content"] == "Hello"
    assert "the toy: /toy/speak" in unserved.json()["error"]["message"]
    assert without_slash.text.endswith("bye\n")


@pytest.mark.slow
async def test_it_is_served_over_a_real_worker(tmp_path: Path) -> None:
    settings = Settings(server=ServerSettings(port=0, shutdown_seconds=0))
    folder = served_model_folder()
    catalog = catalog_over("demo", at_start=["demo"])
    residency = Residency(
        catalog,
        settings.residency,
        fetch=lambda entry: ModelFiles(folder=folder),
        worker_of=lambda entry, files, share: WorkerSettings(
            folder=str(folder),
            model=replace(settings.model, name="demo"),
            scheduler=settings.scheduler,
            store=replace(settings.store, folder=""),
        ),
    )
    await residency.start()
    try:
        await residency.wait_ready()
        app = build_application(settings, residency, dialects=TABLE)
        with listen(settings.server) as listener:
            started = asyncio.Event()
            running = HttpServer(app, settings.server, on_started=started.set)
            serving = asyncio.create_task(running.serve(sockets=[listener]))
            await started.wait()
            async with httpx.AsyncClient(base_url=url_of(listener), timeout=60) as client:
                streamed = await client.post(SPEAK, json={"after": "Hello", "at_most": 4})
                whole = await client.post(
                    SPEAK, json={"after": "Hello", "at_most": 4, "at_once": True}
                )
                wrong = await client.post(SPEAK, json={"after": "x " * 100_000})
            running.should_exit = True
            await serving
    finally:
        await residency.stop()
    *lines, reason, _, end = streamed.text.splitlines()
    assert (
        "".join(json.loads(line.removeprefix("> ")) for line in lines)
        == whole.json()["spoken"]
        != ""
    )
    assert (reason.removeprefix(". "), end) == (whole.json()["why"], "bye")
    assert (wrong.status_code, wrong.json()["oops"], wrong.json()["about"]) == (
        400,
        "context_length_exceeded",
        "after",
    )
