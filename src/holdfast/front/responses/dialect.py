"""OpenAI's Responses API, which Codex and the newer SDKs speak."""

from __future__ import annotations

from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.responses.codex import CODEX_MODELS, is_codex
from holdfast.front.responses.conversations import CONVERSATIONS
from holdfast.front.responses.create import compact_response, count_input_tokens, create_response
from holdfast.front.responses.stored import STORED
from holdfast.front.server.dialect import Dialect

RESPONSES = Dialect(
    name="OpenAI's Responses API",
    error=openai_error,
    error_shape=ErrorBody,
    is_spoken=is_codex,
    models=CODEX_MODELS,
    prefixes=("/v1/responses", "/v1/conversations"),
    serves="OpenAI's Responses: /v1/responses, /v1/conversations",
    operations=(create_response, compact_response, count_input_tokens, *STORED, *CONVERSATIONS),
)
