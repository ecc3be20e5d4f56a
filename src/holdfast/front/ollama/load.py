"""The way of both generating endpoints: a request that asks nothing waits until the model is there,
all others are answered.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from holdfast.errors import UnknownModel
from holdfast.front.ollama.fields import OllamaGeneration, OllamaRequest
from holdfast.front.ollama.names import capabilities, learn_capabilities, served_model
from holdfast.front.server.body import parse, read_body
from holdfast.front.server.caller import caller_of, check_admin
from holdfast.front.server.generation import generate
from holdfast.front.server.services import Services
from holdfast.wire.requests import GenerationRequest

_COPILOT = "GitHubCopilotChat/"  # asks every model to think, and cannot be told not to


async def answered(request: Request, services: Services, kind: type[OllamaGeneration]) -> Response:
    """The answer to a request of this kind."""
    body = await read_body(request, limit_bytes=services.limits.max_body_bytes)
    asked = parse(kind, body)
    model_id = served_model(asked.model, services).id
    await learn_capabilities(model_id, services)
    is_copilots = request.headers.get("user-agent", "").startswith(_COPILOT)
    if is_copilots and asked.think and "thinking" not in capabilities(model_id, services):
        asked.think = None
    if asked.asks_nothing:
        return await _loaded(request, asked, services, model_id=model_id)
    # A model that is to be unloaded does not wait for a client that may come back.
    outlives_client = not _unloads(asked, request)
    answer = await generate(
        request,
        services,
        lambda _: asked.plan(services),
        body=body,
        outlives_client=outlives_client,
    )
    return with_unload(answer, asked, request, services)


def _unloads(asked: OllamaRequest, request: Request) -> bool:
    return asked.asks_to_unload and caller_of(request).is_admin


def with_unload(
    answer: Response, asked: OllamaRequest, request: Request, services: Services
) -> Response:
    """An answer behind which its model is let go of, if an administrator asks for that: of others
    it is a hint like any.
    """
    if not _unloads(asked, request):
        return answer
    model_id = served_model(asked.model, services).id
    return _Last(answer, lambda: services.control.let_go(model_id))


class _Last(Response):
    """An answer behind which its model is let go of."""

    def __init__(self, answer: Response, let_go: Callable[[], None]) -> None:
        super().__init__()
        self._answer, self._let_go = answer, let_go

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer; however it ends, the model is not needed any more."""
        try:
            await self._answer(scope, receive, send)
        finally:
            with contextlib.suppress(UnknownModel):  # it is gone from the catalog meanwhile
                self._let_go()


async def _loaded(
    request: Request, asked: OllamaGeneration, services: Services, *, model_id: str
) -> Response:
    """The answer when the model is there, or gone. To unload it takes an administrator."""
    if asked.asks_to_unload:
        check_admin(request)
        await services.control.unload(model_id)
    else:
        await services.encode(GenerationRequest(request_id="", model=model_id, prompt=" "))
    line = asked.form(services).line(
        done=True, done_reason="unload" if asked.asks_to_unload else "load"
    )
    return Response(msgspec.json.encode(line), media_type="application/json")
