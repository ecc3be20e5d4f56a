"""In every protocol, a wrong field is refused by name, and the request reaches no model."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import LimitsSettings
from holdfast.front.tokens import MAX_CHARACTERS
from tests.fakes.http_clients import (
    CHAT,
    COMPLETIONS,
    HELLO,
    MESSAGES,
    chat_body,
    client_of,
    completion_body,
    message_body,
)
from tests.fakes.ollama_bodies import WEATHER, directory_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

Refused = list[tuple[dict[str, Any], str]]  # fields, and the name of the wrong one
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
TEXT = {"type": "text", "text": "hello"}
USER = {"role": "user", "content": "x"}
EPHEMERAL = {"type": "ephemeral"}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


CLOCK = named("mcp__clock.now")
TOOLS = [WEATHER, CLOCK]
FUNCTION = {"name": "get_weather"}
OF_MESSAGES: list[tuple[Any, str]] = [
    ([], "messages"),
    (None, "messages"),
    ("hello", "messages"),
    ({}, "messages"),
    ([1], "messages.0"),
    (["hello"], "messages.0"),
    ([None], "messages.0"),
    ([{"content": "x"}], "messages.0.role"),
    ([{"role": "god", "content": "x"}], "messages.0.role"),
    ([{"role": 1, "content": "x"}], "messages.0.role"),
    ([{"role": "user"}], "messages.0.content"),
    ([{"role": "user", "content": None}], "messages.0.content"),
    ([{"role": "user", "content": 5}], "messages.0.content"),
    ([{"role": "user", "content": {"text": "x"}}], "messages.0.content"),
    ([{"role": "user", "content": [1]}], "messages.0.content.0"),
    ([{"role": "user", "content": ["x"]}], "messages.0.content.0"),
    ([{"role": "user", "content": [{}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages.0.content.0.text"),
    ([{"role": "user", "content": [{"type": "smell", "text": "x"}]}], "messages.0.content.0.type"),
    ([{"role": "user", "content": [TEXT, IMAGE]}], "messages.0.content.1.image_url"),
    ([{"role": "system", "content": [TEXT, IMAGE]}], "messages.0.content.1"),
    ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content.0"),
    (
        [{"role": "user", "content": [{"type": "image", "image": "0" * 64}]}],
        "messages.0.content.0.image",
    ),
    (
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
        "messages.0.content.0",
    ),
    ([{"role": "user", "content": [{"type": "file", "file": {}}]}], "messages.0.content.0"),
    (
        [{"role": "user", "content": "x"}, {"role": "tool", "content": None, "tool_call_id": "1"}],
        "messages.1.content",
    ),
    ([{"role": "user", "content": "x", "name": 1}], "messages.0.name"),
    ([{"role": "assistant", "tool_calls": "x"}], "messages.0.tool_calls"),
    ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls.0.function"),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}],
        "messages.0.tool_calls.0.function.name",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": 1}}]}],
        "messages.0.tool_calls.0.function.arguments",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "a"}}]}],
        "messages.0.tool_calls.0.type",
    ),
]
OF_TOOLS: Refused = [
    ({"tools": [WEATHER, {"type": "custom", "custom": {"name": "x"}}]}, "tools.1.type"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    ({"tools": [named("")]}, "tools.0.function.name"),
    ({"tools": [named("two words")]}, "tools.0.function.name"),
    ({"tools": [named("x" * 257)]}, "tools.0.function.name"),
    ({"tools": [named("<tool_call>")]}, "tools.0.function.name"),
    ({"tools": [CLOCK, CLOCK]}, "tools.1.function.name"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
        "tools.0.function.parameters",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]},
        "tools.0.function.strict",
    ),
    ({"tools": {}}, "tools"),
    ({"tools": ["f"]}, "tools.0"),
    ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": named("nobody")}, "tool_choice.function.name"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
    ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [], "tool_choice": named("weather")}, "tool_choice.function.name"),
    ({"functions": [FUNCTION], "tools": TOOLS}, "functions"),
    ({"functions": [FUNCTION, FUNCTION]}, "functions.1.name"),
    ({"functions": [FUNCTION], "function_call": {"name": "nobody"}}, "function_call.name"),
    ({"function_call": {"name": "get_weather"}}, "function_call.name"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]
OF_TRUNCATION: Refused = [
    ({"truncation": each}, "truncation") for each in ("end", "", 1, True, ["middle"], {})
]
OF_THINKING: Refused = [
    ({"reasoning_effort": "very"}, "reasoning_effort"),
    ({"reasoning_effort": True}, "reasoning_effort"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"budget_tokens": "5"}}, "thinking.budget_tokens"),
    ({"thinking": 5}, "thinking"),
    ({"think": []}, "think"),
    ({"thinking_budget": -2}, "thinking_budget"),
    ({"thinking_budget": 2**31}, "thinking_budget"),
    ({"thinking_budget": 1.5}, "thinking_budget"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"reasoning": "low"}, "reasoning"),
]
OF_FORMATS: Refused = [
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
]
OF_PROMPTS: list[tuple[Any, str]] = [
    (None, "prompt"),
    (5, "prompt"),
    ({}, "prompt"),
    (True, "prompt"),
    ([], "prompt"),
    ([[]], "prompt.0"),
    ([None], "prompt.0"),
    ([{}], "prompt.0"),
    ([True], "prompt.0"),
    ([1.5], "prompt.0"),
    ([-1], "prompt.0"),
    ([2**31], "prompt.0"),
    ([1, "a"], "prompt.1"),
    (["a", 1], "prompt.1"),
    (["a", ["b"]], "prompt.1"),
    ([[1], "a"], "prompt.1"),
    ([[1], []], "prompt.1"),
    ([[1], [2, -3]], "prompt.1.1"),
    ([[1, "x"]], "prompt.0.1"),
    (["a"] * 5, "prompt"),
]
OF_COMPLETIONS: Refused = [
    ({"best_of": 2}, "best_of"),
    ({"best_of": 0}, "best_of"),
    ({"suffix": "end"}, "suffix"),
    ({"logprobs": -1}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"echo": "yes"}, "echo"),
    ({"add_special_tokens": False}, "add_special_tokens"),
]
OF_EMBEDDINGS: Refused = [
    ({}, "input"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input.0"),
    ({"input": ["a", 1]}, "input.1"),
    ({"input": [1, "a"]}, "input.1"),
    ({"input": [[1], [-1]]}, "input.1.0"),
    ({"input": ["a"] * 4}, "input"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "input_type": "query"}, "input_type"),
    ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"input": "a", "model": ""}, "model"),
]
OF_RANKING: Refused = [
    ({"query": ""}, "query"),
    ({"query": {"text": ""}}, "query"),
    ({"query": 5}, "query"),
    ({"query": {"image": "x"}}, "query.text"),
    ({"documents": []}, "documents"),
    ({"documents": "one"}, "documents"),
    ({"documents": ["a", 5]}, "documents.1"),
    ({"documents": ["a", {"txt": "b"}]}, "documents.1.text"),
    ({"documents": ["a"] * 4}, "documents"),
    ({"top_n": 0}, "top_n"),
    ({"method": "guess"}, "method"),
    ({"max_tokens_per_doc": 100}, "max_tokens_per_doc"),
]
OF_ANTHROPIC: Refused = [
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"model": ""}, "model"),
    ({"temperature": 1.5}, "temperature"),
    ({"top_k": -1}, "top_k"),
    ({"stop_sequences": ["a", "b", "c"]}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop_sequences.0"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences.0"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"output_config": {"effort": "huge"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"cache_control": {"type": "eternal"}}, "cache_control.type"),
    (
        {"system": [{"type": "text", "text": "s", "cache_control": EPHEMERAL}] * 5},
        "cache_control",
    ),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
    ({"messages": [USER, {"role": "assistant", "content": "so "}]}, "messages.1.content"),
    (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
            ]
        },
        "messages.1.content",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
        "messages.0.content",
    ),
]
OF_RESPONSES: Refused = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input.0.content.0.image_url",
    ),
    ({"input": [{"type": "odd", "id": "x"}]}, "input.0.type"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"moderation": {"model": "x"}}, "moderation"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "x"}]}, "messages"),
    ({"n": 2}, "n"),
    ({"stop": "x"}, "stop"),
    ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_tool_calls": 0}, "max_tool_calls"),
    ({"top_logprobs": 10_000}, "top_logprobs"),
    *OF_TRUNCATION,
    ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ({"metadata": {"a": 5}}, "metadata.a"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"tools": [{"name": "f"}]}, "tools.0.type"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
]
OF_OLLAMA: Refused = [
    ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages.0.images"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages.0.content"),
    ({"messages": "hi"}, "messages"),
    ({"format": "yaml"}, "format"),
    ({"format": True}, "format"),
    ({"think": "hard"}, "think"),
    ({"think": 1}, "think"),
    ({"stream": "yes"}, "stream"),
    ({"keep_alive": "soon"}, "keep_alive"),
    ({"keep_alive": True}, "keep_alive"),
    ({"keep_alive": "5 m"}, "keep_alive"),
    ({"options": []}, "options"),
    ({"options": {"num_predict": -3}}, "options.num_predict"),
    ({"options": {"stop": ["a"] * 100}}, "options.stop"),
    ({"options": {"kv_bits": 8}}, "options.kv_bits"),
    ({"options": {"truncation": "middle"}}, "options.truncation"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 10_000}, "top_logprobs"),
    ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.function"),
    ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name"),
    ({"width": 512}, "width"),
    ({"template": "{{ .Prompt }}"}, "template"),
]
HI = {"model": MODEL, "messages": HELLO}
# path, the fields of a valid request, and its faults
REFUSED: list[tuple[str, dict[str, Any], Refused]] = [
    (CHAT, chat_body(), [({"messages": each}, field) for each, field in OF_MESSAGES]),
    (CHAT, chat_body(), [*OF_TOOLS, *OF_THINKING, *OF_FORMATS, *OF_TRUNCATION]),
    (COMPLETIONS, completion_body(), [({"prompt": each}, field) for each, field in OF_PROMPTS]),
    (COMPLETIONS, completion_body(), [*OF_COMPLETIONS, *OF_FORMATS]),
    ("/v1/embeddings", {}, OF_EMBEDDINGS),
    ("/v1/rerank", {"query": "what?", "documents": ["a", "b"]}, OF_RANKING),
    (MESSAGES, message_body(), [*OF_ANTHROPIC, *OF_TRUNCATION]),
    ("/v1/responses", {"input": "hello", "store": False}, OF_RESPONSES),
    ("/api/chat", HI, [*OF_OLLAMA, *OF_TRUNCATION]),
    (
        "/api/generate",
        {"model": MODEL, "prompt": "hello"},
        [({"suffix": "end"}, "suffix"), ({"template": "x"}, "template"), ({"steps": 4}, "steps")],
    ),
    (
        "/api/embed",
        {"model": MODEL},
        [
            ({"input": [1]}, "input.0"),
            ({"input": ["x"] * 5000}, "input"),
            ({"input": "x", "dimensions": 0}, "dimensions"),
        ],
    ),
    (
        "/api/embeddings",
        {"model": MODEL},
        [
            ({"prompt": 1}, "prompt"),
            ({"prompt": "x", "keep_alive": "soon"}, "keep_alive"),
        ],
    ),
    (
        "/tokenize",
        {},
        [
            ({}, "content"),
            ({"content": "a", "prompt": "b"}, "content"),
            ({"content": 5}, "content"),
            ({"content": "a" * (MAX_CHARACTERS + 1)}, "content"),
            ({"content": "a", "model": "nobody"}, "model"),
            ({"messages": []}, "messages"),
        ],
    ),
    (
        "/detokenize",
        {},
        [
            ({}, "tokens"),
            ({"tokens": ["a"]}, "tokens.0"),
            ({"tokens": [-1]}, "tokens.0"),
            ({"tokens": [5, 10**8]}, "tokens"),
            ({"tokens": [5], "model": "nobody"}, "model"),
        ],
    ),
    (
        "/apply-template",
        {},
        [
            ({}, "messages"),
            ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ],
    ),
]


def status_of(fields: dict[str, Any], field: str) -> int:
    if fields.get("model") == "nobody":
        return 404
    return 422 if field.startswith("max_tokens") else 400  # see tests/front/server/test_problem.py


def is_named(path: str, body: Any, field: str) -> bool:
    if path.startswith("/api/"):
        return f"`{field}" in body["error"]
    if path == MESSAGES:
        is_ours = body["error"]["type"] == "invalid_request_error"
        return is_ours and body["error"]["message"].startswith(f"`{field}`")
    return body["error"]["param"] == field


@pytest.mark.parametrize(("path", "valid", "refused"), REFUSED, ids=[path for path, *_ in REFUSED])
async def test_a_wrong_field_is_refused_by_name_and_reaches_no_model(
    path: str, valid: dict[str, Any], refused: Refused
) -> None:
    limits = LimitsSettings(max_inputs=3, max_batch_prompts=4, max_stop_strings=2, max_tools=2)
    gateway = ScriptedGateway()
    async with client_of(gateway, directory=directory_of(), limits=limits) as client:
        for fields, field in refused:
            response = await client.post(path, json={**valid, **fields})
            assert response.status_code == status_of(fields, field), (fields, response.text)
            assert is_named(path, response.json(), field), (fields, response.text)
    assert (gateway.requests, gateway.embedded, gateway.ranked) == ([], [], [])
