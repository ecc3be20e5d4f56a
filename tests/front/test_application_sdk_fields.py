"""Every field of the SDKs' requests is known: used, accepted without effect, or refused."""

from __future__ import annotations

import pytest
from anthropic.types.beta import message_create_params as beta_messages
from openai.types import completion_create_params, embedding_create_params
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import response_create_params
from pydantic import BaseModel

from holdfast.front.anthropic.messages import MessagesRequest
from holdfast.front.openai.endpoints import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingsRequest,
)
from holdfast.front.responses.fields import ResponseRequest
from holdfast.front.server import fields
from tests.fakes.http_clients import CHAT, COMPLETIONS, MESSAGES, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, answer

REQUESTS: dict[str, tuple[type, type[BaseModel]]] = {
    CHAT: (chat_create_params.CompletionCreateParamsBase, ChatCompletionRequest),
    COMPLETIONS: (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, EmbeddingsRequest),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase, ResponseRequest),
    MESSAGES: (beta_messages.MessageCreateParamsBase, MessagesRequest),
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_no_field_of_the_sdks_is_unknown(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    of_sdk, ours = REQUESTS[path]
    needed = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    needed |= {"prompt": "x", "input": "x"}
    needed = {name: value for name, value in needed.items() if name in ours.model_fields}
    unknown: list[str] = []
    monkeypatch.setattr(fields, "log_once", lambda message, name: unknown.append(name))
    for name in set(of_sdk.__annotations__) - set(ours.model_fields):
        async with client_of(ScriptedGateway(script=answer("x"))) as client:
            response = await client.post(path, json={**needed, name: {"odd": "value"}})
        # ignored, or refused by its name
        assert response.status_code == 200 or f"`{name}`" in response.text, response.text
    assert not unknown
