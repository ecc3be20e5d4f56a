"""OpenAI's dialect, and the parts of its API that this version does not serve."""

from __future__ import annotations

from holdfast.front.openai.chat import create_chat_completion
from holdfast.front.openai.completions import create_completion
from holdfast.front.openai.control import control_chat_completion
from holdfast.front.openai.embeddings import create_embedding
from holdfast.front.openai.errors import ErrorBody, openai_error
from holdfast.front.openai.models import OPENAI_MODELS
from holdfast.front.server.dialect import Dialect

OPENAI = Dialect(
    name="OpenAI's API",
    error=openai_error,
    error_shape=ErrorBody,
    serves="OpenAI's /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/models",
    operations=(
        create_chat_completion,
        control_chat_completion,
        create_completion,
        create_embedding,
    ),
    models=OPENAI_MODELS,
)
OTHER_PARTS = Dialect(
    name="This part of OpenAI's API",
    error=openai_error,
    prefixes=(
        "/v1/audio",
        "/v1/images",
        "/v1/moderations",
        "/v1/files",
        "/v1/batches",
        "/v1/assistants",
        "/v1/threads",
    ),
)
