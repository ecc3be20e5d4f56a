"""OpenAI's dialect, and the parts of its API that this version does not serve."""

from __future__ import annotations

from holdfast.http.openai.chat import ChatCompletionRequest, create_chat_completion
from holdfast.http.openai.completions import CompletionRequest, create_completion
from holdfast.http.openai.errors import ErrorBody, openai_error
from holdfast.http.openai.models import ModelCard, ModelList, get_model, list_models
from holdfast.http.openai.shapes import ChatCompletion, ChatCompletionChunk, Completion
from holdfast.http.server.dialect import Dialect, Operation
from holdfast.http.server.openapi import answers_of, request_of

OPENAI = Dialect(
    name="OpenAI's API",
    error=openai_error,
    error_shape=ErrorBody,
    serves="OpenAI's chat completions and completions: /v1/chat/completions, /v1/completions, /v1/models",
    operations=(
        Operation(
            method="POST",
            path="/v1/chat/completions",
            handler=create_chat_completion,
            shape={**request_of(ChatCompletionRequest), **answers_of(ChatCompletion, chunk=ChatCompletionChunk)},
            summary="conversations, as OpenAI's",
        ),
        Operation(
            method="POST",
            path="/v1/completions",
            handler=create_completion,
            shape={**request_of(CompletionRequest), **answers_of(Completion, chunk=Completion)},
            summary="raw text, as OpenAI's",
        ),
        Operation(method="GET", path="/v1/models", handler=list_models, shape=answers_of(ModelList), summary="what is served"),
        Operation(method="GET", path="/v1/models/{model_id:path}", handler=get_model, shape=answers_of(ModelCard)),
    ),
)
RESPONSES = Dialect(name="OpenAI's Responses API", error=openai_error, prefixes=("/v1/responses",))
EMBEDDINGS = Dialect(name="OpenAI's Embeddings API", error=openai_error, prefixes=("/v1/embeddings",))
OTHER_PARTS = Dialect(
    name="This part of OpenAI's API",
    error=openai_error,
    prefixes=("/v1/audio", "/v1/images", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads"),
)
