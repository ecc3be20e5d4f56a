"""The description at /openapi.json, made from the operations and the very types that check requests
and encode answers.

Where a schema is meant, a shape has the type itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from holdfast.front.server.dialect import DialectTable, Operation, Shape
from holdfast.front.server.keys import KEY_HEADER_NAMES
from holdfast.wire.sessions import LONGEST_SESSION_ID

ENDLESS_MARK = "x-endless"  # in the description of an operation whose answer does not end by itself
_COMPONENTS = "#/components/schemas/{name}"
_FILE = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")
_QUERY: dict[str, dict[str, Any]] = {
    "id": {
        "description": "A name for the session.",
        "schema": {
            "type": "string",
            "minLength": 1,
            "maxLength": LONGEST_SESSION_ID,
            "pattern": "^[^/]+$",
        },
    },
    "model": {
        "description": "The model whose sessions are meant; the first if not given.",
        "schema": {"type": "string"},
    },
    "limit": {
        "description": "At most so many.",
        "schema": {"type": "integer", "minimum": 1, "maximum": 1000},
    },
    "forget": {"description": "Delete what was read in it.", "schema": {"type": "boolean"}},
    "cache_salt": {
        "description": "The salt of the session's requests.",
        "schema": {"type": "string"},
    },
}


def request_of(model: type[BaseModel], *, required: bool = True) -> Shape:
    """Shape of an operation that reads a body."""
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": model}}}
    }


def query_of(*names: str) -> Shape:
    """Shape of an operation that reads its query; all of it may be left out."""
    return {
        "parameters": [
            _QUERY[name] | {"name": name, "in": "query", "required": False} for name in names
        ]
    }


def file_request() -> Shape:
    """Shape of an operation that takes a file."""
    return {"requestBody": {"required": True, "content": _FILE}}


def file_answer() -> Shape:
    """Shape of an operation that gives a file."""
    return {"responses": {"200": {"description": "The file", "content": _FILE}}}


def text_answer(*media_types: str) -> Shape:
    """Shape of an operation that gives text."""
    content = {media_type: {"schema": {"type": "string"}} for media_type in media_types}
    return {"responses": {"200": {"description": "The text", "content": content}}}


def endless_stream_of(event: type[msgspec.Struct]) -> Shape:
    """Shape of an operation that sends events until its client leaves.

    The mark tells programs that call every described operation not to wait for the end of this one.
    """
    content = {"text/event-stream": {"schema": event}}
    return {
        "responses": {"200": {"description": "The events", "content": content}},
        ENDLESS_MARK: True,
    }


def answers_of(
    whole: type[msgspec.Struct],
    *,
    chunk: type[msgspec.Struct] | None = None,
    chunk_type: str = "text/event-stream",
    statuses: tuple[str, ...] = ("200",),
) -> Shape:
    """Shape of an operation by its whole answer, which comes with these statuses, and the events of
    a stream of that type.
    """
    content: dict[str, Any] = {"application/json": {"schema": whole}}
    if chunk is not None:
        content[chunk_type] = {"schema": chunk}
    return {
        "responses": {
            status: {"description": "The answer", "content": content} for status in statuses
        }
    }


def either_of(*wholes: type[msgspec.Struct]) -> Shape:
    """Shape of an operation whose answer has the form of the client's protocol."""
    content = {"application/json": {"schema": {"anyOf": list(wholes)}}}
    return {"responses": {"200": {"description": "The answer", "content": content}}}


@lru_cache(maxsize=1)
def description(table: DialectTable, *, version: str) -> dict[str, Any]:
    """The whole description of what a server serves."""
    types: dict[str, type] = {}
    paths: dict[str, dict[str, Any]] = {}
    for dialect in table.dialects:
        failure = {
            "description": "An error",
            "content": {"application/json": {"schema": dialect.error_shape or {}}},
        }
        for operation in dialect.operations:
            if operation.shape:
                described = _referring(_described(operation, failure), types)
                paths.setdefault(_VARIABLE.sub(r"{\1}", operation.path), {})[
                    operation.method.lower()
                ] = described
    schemes = {"key": {"type": "http", "scheme": "bearer"}} | {
        name: {"type": "apiKey", "in": "header", "name": name} for name in KEY_HEADER_NAMES
    }
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast",
            "summary": "Language models with MLX, for agents; OpenAI-compatible.",
            "version": version,
        },
        "paths": paths,
        "components": {"schemas": _schemas(types), "securitySchemes": schemes},
        "security": [{}, *({name: []} for name in schemes)],
    }


def _described(operation: Operation, failure: Shape) -> dict[str, Any]:
    handler, variables = operation.handler, _VARIABLE.findall(operation.path)
    name = getattr(handler, "__name__", operation.path)
    in_path = [
        {
            "name": variable,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "title": _title(variable)},
        }
        for variable in variables
    ]
    parameters = [*in_path, *operation.shape.get("parameters", ())]
    place = re.sub(r"\W", "_", _VARIABLE.sub(r"{\1}", operation.path))
    return {
        "summary": _title(name),
        "description": (handler.__doc__ or "").strip(),
        "operationId": f"{name}{place}_{operation.method.lower()}",
        **operation.shape,
        **({"parameters": parameters} if parameters else {}),
        "responses": {**operation.shape.get("responses", {}), "default": failure},
    }


def _title(name: str) -> str:
    return name.replace("_", " ").title()


def _referring(node: Any, types: dict[str, type]) -> Any:
    """A description in which references stand for types, which are collected."""
    if isinstance(node, type):
        assert types.setdefault(node.__name__, node) is node, (
            f"two types of one name: {node.__name__}"
        )
        return {"$ref": _COMPONENTS.format(name=node.__name__)}
    if isinstance(node, Mapping):
        return {key: _referring(value, types) for key, value in node.items()}
    return [_referring(value, types) for value in node] if isinstance(node, list | tuple) else node


def _schemas(types: Mapping[str, type]) -> dict[str, Any]:
    requests = [(model, "validation") for model in types.values() if issubclass(model, BaseModel)]
    answers = [model for model in types.values() if not issubclass(model, BaseModel)]
    _, taken = models_json_schema(requests, ref_template=_COMPONENTS.replace("{name}", "{model}"))  # type: ignore[arg-type]
    _, given = msgspec.json.schema_components(answers, ref_template=_COMPONENTS)
    return {**taken.get("$defs", {}), **given}
