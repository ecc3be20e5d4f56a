"""/openapi.json: the description of all operations.

It is generated from the operations and from the types that check requests and encode answers: each
operation has a `Shape`, a part of the description that contains the types themselves in place of
their schemas.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct
from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from holdfast.front.server.access import KEY_HEADER_NAMES
from holdfast.front.server.dialect import DialectTable, Operation, Shape

_EVENT_STREAM = "text/event-stream"
_JSON_LINES = "application/x-ndjson"
_COMPONENTS = "#/components/schemas/{name}"
# a variable in a path: (1) its name, before the type that Starlette allows after a colon
_VARIABLE = re.compile(r"{(\w+)(?::\w+)?}")


def accepts(model: type[BaseModel], *, required: bool = True) -> Shape:
    """Describe the JSON body that an operation reads."""
    return {
        "requestBody": {"required": required, "content": {"application/json": {"schema": model}}}
    }


def query_shape(parameters: Mapping[str, tuple[Any, str]]) -> Shape:
    """Describe the optional query parameters of an operation: name → type and description."""
    return {
        "parameters": [
            {
                "name": name,
                "in": "query",
                "required": False,
                "description": description,
                "schema": value_type,
            }
            for name, (value_type, description) in parameters.items()
        ]
    }


def response_shape(schemas: Shape, *, statuses: Sequence[str] = ("200",)) -> Shape:
    """Describe the responses of an operation. schemas: the schema for each media type; for a
    stream, the schema of its events.
    """
    content = {
        media_type: {"schema": _schema_of(media_type, schema)}
        for media_type, schema in schemas.items()
    }
    response = {"description": "The answer", "content": content}
    return {"responses": dict.fromkeys(statuses, response)}


def _schema_of(media_type: str, schema: Any) -> Any:
    """The schema of a body. That of server-sent events describes each event, as validators and
    generators of clients expect before OpenAPI 3.2; that of lines of JSON describes the whole text.
    """
    if media_type == _EVENT_STREAM:
        data = {
            "type": "string",
            "description": "JSON that matches `contentSchema`; [DONE] at the end of some streams",
            "contentMediaType": "application/json",
            "contentSchema": schema,
        }
        properties = {"event": {"type": "string"}, "data": data}
        return {"type": "object", "required": ["data"], "properties": properties}
    if media_type == _JSON_LINES:
        return {
            "type": "string",
            "description": "Lines of JSON. Each matches `contentSchema`.",
            "contentMediaType": media_type,
            "contentSchema": schema,
        }
    return schema


def returns(
    *whole_types: type[Struct],
    chunk: type[Struct] | None = None,
    chunk_type: str = _EVENT_STREAM,
    statuses: Sequence[str] = ("200",),
) -> Shape:
    """Describe the answers of an operation.

    whole_types: the possible types of a JSON answer.
    chunk: the type of the events of a stream, if the operation can stream.
    """
    whole = whole_types[0] if len(whole_types) == 1 else {"anyOf": whole_types}
    schemas = {"application/json": whole}
    return response_shape(
        schemas if chunk is None else {**schemas, chunk_type: chunk}, statuses=statuses
    )


@lru_cache(maxsize=1)
def description(table: DialectTable, *, version: str) -> dict[str, Any]:
    """The OpenAPI description of everything that a server serves."""
    types: dict[str, type] = {}  # all types that the operations use, by name
    paths: dict[str, dict[str, Any]] = {}
    for dialect in table.dialects:
        error_response = response_shape({"application/json": dialect.error_shape or {}})[
            "responses"
        ]["200"]
        for each in dialect.operations:
            if each.shape:
                path = paths.setdefault(_VARIABLE.sub(r"{\1}", each.path), {})
                path[each.method.lower()] = _with_references(
                    _described(each, error_response), types
                )
    schemes: dict[str, Any] = {"key": {"type": "http", "scheme": "bearer"}}
    for name in KEY_HEADER_NAMES:
        schemes[name] = {"type": "apiKey", "in": "header", "name": name}
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


def _described(operation: Operation, error_response: Shape) -> dict[str, Any]:
    """The description of an operation, still with types in place of the schemas of bodies."""
    name = getattr(operation.handler, "__name__", operation.path)
    parameters: list[Any] = [
        {"name": each, "in": "path", "required": True, "schema": str}
        for each in _VARIABLE.findall(operation.path)
    ]
    parameters += operation.shape.get("parameters", ())
    parameters = [
        {**each, "schema": TypeAdapter(each["schema"]).json_schema()} for each in parameters
    ]
    path_in_words = re.sub(r"\W", "_", _VARIABLE.sub(r"{\1}", operation.path))
    return {
        "summary": name.replace("_", " ").title(),
        "description": (operation.handler.__doc__ or "").strip(),
        "operationId": f"{name}{path_in_words}_{operation.method.lower()}",
        **operation.shape,
        "parameters": parameters,
        "responses": {**operation.shape.get("responses", {}), "default": error_response},
    }


def _with_references(node: Any, types: dict[str, type]) -> Any:
    """The description with a reference in place of each type. The types are added to `types`."""
    if node is str:
        return {"type": "string"}
    if isinstance(node, type):
        known_type = types.setdefault(node.__name__, node)
        assert known_type is node, f"two types are called {node.__name__}"
        return {"$ref": _COMPONENTS.format(name=node.__name__)}
    if isinstance(node, Mapping):
        return {key: _with_references(value, types) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [_with_references(value, types) for value in node]
    return node


def _schemas(types: Mapping[str, type]) -> dict[str, Any]:
    """The schemas of all types by name: requests are pydantic models, and answers are structs."""
    requests = [(model, "validation") for model in types.values() if issubclass(model, BaseModel)]
    answers = [model for model in types.values() if not issubclass(model, BaseModel)]
    _, request_schemas = models_json_schema(
        requests,  # type: ignore[arg-type]
        ref_template=_COMPONENTS.replace("{name}", "{model}"),
    )
    _, answer_schemas = msgspec.json.schema_components(answers, ref_template=_COMPONENTS)
    return {**request_schemas.get("$defs", {}), **answer_schemas}
