"""The server's own paths. Errors on them have OpenAI's form, which most of their callers know."""

from __future__ import annotations

from holdfast.http.admin import sessions_api
from holdfast.http.admin.start_page import front_page
from holdfast.http.admin.status import Health, health, metrics, openapi_document
from holdfast.http.openai.errors import ErrorBody, openai_error
from holdfast.http.server.dialect import Dialect, Operation
from holdfast.http.server.openapi import answers_of, text_answer

ADMIN = Dialect(
    name="The server's own",
    error=openai_error,
    error_shape=ErrorBody,
    operations=(
        *sessions_api.OPERATIONS,
        Operation(method="GET", path="/", handler=front_page, shape=text_answer("text/html", "text/plain"), needs_key=False),
        Operation(
            method="GET",
            path="/health",
            handler=health,
            shape=answers_of(Health, statuses=("200", "503")),
            summary="how the models are doing",
            needs_key=False,
        ),
        Operation(
            method="GET", path="/metrics", handler=metrics, shape=text_answer("text/plain"), summary="figures for Prometheus"
        ),
        Operation(method="GET", path="/openapi.json", handler=openapi_document, summary="every field of every path"),
    ),
)
