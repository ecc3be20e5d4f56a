"""The server's own paths. Errors on them have OpenAI's form, which most of their callers know."""

from __future__ import annotations

from holdfast.front.admin import sessions
from holdfast.front.admin.models import (
    change_limits,
    follow_models,
    load_model,
    pin_model,
    unload_model,
)
from holdfast.front.admin.requests import cancel_request, list_requests
from holdfast.front.admin.start_page import front_page, head_of_front_page
from holdfast.front.admin.status import health, metrics, openapi_document, show_store
from holdfast.front.openai.answers import ErrorBody, openai_error
from holdfast.front.server.dialect import Dialect

OPERATIONS = (
    list_requests,
    cancel_request,
    show_store,
    follow_models,
    load_model,
    unload_model,
    pin_model,
    change_limits,
)
ADMIN = Dialect(
    name="The server's own",
    error=openai_error,
    error_shape=ErrorBody,
    prefixes=("/health", "/metrics", "/openapi.json", "/v1/sessions", "/admin"),
    operations=(
        *sessions.OPERATIONS,
        front_page,
        head_of_front_page,
        health,
        metrics,
        openapi_document,
        *OPERATIONS,
    ),
)
