"""POST /v1/chat/completions/control: ends the thought of an answer that is being made, as
llama.cpp's server does.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from holdfast.front.server.body import json_response, parse, read_body
from holdfast.front.server.caller import caller_of
from holdfast.front.server.dialect import operation
from holdfast.front.server.openapi import answers_of, request_of
from holdfast.front.server.services import Services


class ControlRequest(BaseModel):
    """What an answer under way is to do."""

    model_config = ConfigDict(strict=True)

    id: str = Field(
        description="The id of the answer, as its stream or its head says it; of any protocol."
    )
    action: Literal["reasoning_end"] = Field(
        description="reasoning_end: the thought ends now, and the answer begins."
    )
    model: str | None = Field(None, description="Accepted, without effect.")


class ControlAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Whether it is done; `message` says why not."""

    success: bool = msgspec.field()
    message: str = ""


@operation(
    "POST", "/v1/chat/completions/control", request_of(ControlRequest), answers_of(ControlAnswer)
)
async def control_chat_completion(request: Request, services: Services) -> Response:
    """End the thought of an answer that is being made. An answer that has ended is left as it is."""
    asked = parse(
        ControlRequest, await read_body(request, limit_bytes=services.limits.max_body_bytes)
    )
    found = services.active.answering(asked.id, key=caller_of(request).key_name)
    if found is None or found.thinker is None:
        return json_response(
            ControlAnswer(success=False, message="no answer with this id is being made")
        )
    if not found.thinker.end_thoughts():
        reason = "this model has no token that ends a thought"
        return json_response(ControlAnswer(success=False, message=reason))
    return json_response(ControlAnswer(success=True))
