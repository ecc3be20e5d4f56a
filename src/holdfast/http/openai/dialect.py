"""OpenAI's dialect, and the parts of its API that this version does not serve."""

from __future__ import annotations

from holdfast.http.openai.chat import create_chat_completion
from holdfast.http.openai.completions import create_completion
from holdfast.http.openai.errors import ErrorBody, openai_error
from holdfast.http.openai.models import get_model, list_models
from holdfast.http.server.dialect import Dialect

OPENAI = Dialect(
    name="OpenAI's API",
    error=openai_error,
    error_shape=ErrorBody,
    serves="OpenAI's chat completions and completions: /v1/chat/completions, /v1/completions, /v1/models",
    operations=(create_chat_completion, create_completion, list_models, get_model),
)
EMBEDDINGS = Dialect(name="OpenAI's Embeddings API", error=openai_error, prefixes=("/v1/embeddings",))
OTHER_PARTS = Dialect(
    name="This part of OpenAI's API",
    error=openai_error,
    prefixes=("/v1/audio", "/v1/images", "/v1/moderations", "/v1/files", "/v1/batches", "/v1/assistants", "/v1/threads"),
)
