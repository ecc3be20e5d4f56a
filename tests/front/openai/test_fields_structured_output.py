from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.request import OutputFormat
from tests.fakes.http_clients import CHAT, COMPLETIONS, chat_body, client_of, completion_body
from tests.fakes.scripted_gateway import ScriptedGateway

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}}


async def posted(path: str, **fields: Any) -> tuple[Any, ScriptedGateway]:
    gateway = ScriptedGateway()
    body = (chat_body if path == CHAT else completion_body)(**fields)
    async with client_of(gateway) as client:
        return await client.post(path, json=body), gateway


def of_schema(field: str, schema: Any = SCHEMA) -> OutputFormat:
    return OutputFormat(kind="json_schema", schema=schema, field=field)


ASKED: list[tuple[dict[str, Any], OutputFormat | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, OutputFormat(kind="json_object")),
    (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        of_schema("response_format.schema"),
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
            }
        },
        of_schema("response_format.json_schema.schema"),
    ),
    (
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        of_schema("response_format.schema"),
    ),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json": SCHEMA}}, of_schema("structured_outputs.json")),
    (
        {"structured_outputs": {"json": '{"type": "null"}'}},
        of_schema("structured_outputs.json", {"type": "null"}),
    ),
    (
        {"structured_outputs": {"json_object": True}},
        OutputFormat(kind="json_object", field="structured_outputs.json_object"),
    ),
    (
        {"structured_outputs": {"regex": "a+", "disable_any_whitespace": False}},
        OutputFormat(kind="regex", pattern="a+", field="structured_outputs.regex"),
    ),
    ({"guided_json": SCHEMA}, of_schema("guided_json")),
    ({"guided_json": {}}, of_schema("guided_json", {})),
    ({"guided_regex": "a+"}, OutputFormat(kind="regex", pattern="a+", field="guided_regex")),
    (
        {"guided_grammar": 'start: "x"'},
        OutputFormat(kind="lark", pattern='start: "x"', field="guided_grammar"),
    ),
    (
        {"guided_choice": ["yes", "no"]},
        OutputFormat(kind="choice", choices=("yes", "no"), field="guided_choice"),
    ),
    ({"guided_choice": [], "guided_regex": "", "guided_json": None, "guided_grammar": ""}, None),
]


@pytest.mark.parametrize(("fields", "form"), ASKED)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_all_spellings_of_an_output_format_are_equal(
    path: str, fields: dict[str, Any], form: OutputFormat | None
) -> None:
    response, gateway = await posted(path, **fields)
    assert response.status_code == 200, response.text
    assert gateway.request.output_format == form


async def test_a_schema_keeps_the_order_of_its_keys() -> None:
    _, gateway = await posted(CHAT, guided_json=SCHEMA)
    schema = gateway.request.output_format.schema  # type: ignore[union-attr]
    assert list(schema["properties"]) == ["b", "a"]  # type: ignore[index,arg-type]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "guided_regex": "x"}, "guided_regex"),
        ({"structured_outputs": {"regex": "x", "choice": ["x"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "5"}, "guided_json"),
        ({"guided_json": "[" * 100_000}, "guided_json"),
        ({"guided_json": 5}, "guided_json"),
        ({"guided_regex": ["x"]}, "guided_regex"),
        ({"guided_choice": "x"}, "guided_choice"),
        ({"guided_choice": [5]}, "guided_choice.0"),
        ({"guided_choice": ["x"] * 5000}, "guided_choice"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_unenforceable_schema_is_refused_by_name(
    path: str, fields: dict[str, Any], field: str
) -> None:
    response, gateway = await posted(path, **fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert gateway.requests == []
