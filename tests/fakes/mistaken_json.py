"""Faulty calls in JSON, how they are read, and the named repairs.

Tools: `get_weather` with `city` and `days`, `write_file` with `path` and `text`.
"""

from __future__ import annotations

from typing import Any, Final

TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "parameters": {"properties": {"city": {}, "days": {}}}},
    },
    {
        "type": "function",
        "function": {"name": "write_file", "parameters": {"properties": {"path": {}, "text": {}}}},
    },
]
ROM: Final = {"city": "Rom"}

MISTAKEN_CALLS: Final[list[tuple[str, tuple[str, ...]]]] = [
    (
        '<tool_call>{"name": "get_weather", "parameters": {"city": "Rom"}}</tool_call>',
        ("arguments_key",),
    ),
    (
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"Rom\\"}"}</tool_call>',
        ("encoded_twice",),
    ),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}', ("unclosed_call",)),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}', ("unclosed_call",)),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom',
        ("unclosed_value", "unclosed_call"),
    ),
    ('<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}</tool_call>', ()),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}}</tool_call>',
        ("extra_bracket",),
    ),
    ('{"name": "get_weather", "arguments": {"city": "Rom"}}', ()),
    ('```json\n{"name": "get_weather", "arguments": {"city": "Rom"}}\n```', ()),
    (
        "<tool_call>{'name': 'get_weather', 'arguments': {'city': 'Rom'}}</tool_call>",
        ("single_quotes",),
    ),
    (
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Rom",}}</tool_call>',
        ("trailing_comma",),
    ),
    ('<tool_call>{"name": "get_weather", "arguments": {city: "Rom"}}</tool_call>', ("bare_key",)),
    ('<tool_call>{"arguments": {"city": "Rom"}, "name": "get_weather"}</tool_call>', ()),
    ('<tool_call>{"name": "Get-Weather", "arguments": {"city": "Rom"}}</tool_call>', ("name",)),
    (
        '<tool_call>{"type": "function", "name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>',
        (),
    ),
    (
        '<tool_call>{"function": {"name": "get_weather", "arguments": {"city": "Rom"}}}</tool_call>',
        (),
    ),
    (
        '<tool_call>{"function": "get_weather", "arguments": {"city": "Rom"}}</tool_call>',
        ("name_key",),
    ),
    ('<tool_call><tool_call>{"name": "get_weather", "arguments": {"city": "Rom"}}</tool_call>', ()),
    ('<tool_call>[{"name": "get_weather", "arguments": {"city": "Rom"}}]</tool_call>', ()),
]
"""In Hermes' syntax: each asks for the weather of Rom."""

MISTAKEN_ARGUMENTS: Final[list[tuple[str, dict[str, Any], tuple[str, ...]]]] = [
    ('{"a": True, "b": None}', {"a": True, "b": None}, ("python_literal",)),
    ('{"a": "x\ny"}', {"a": "x\ny"}, ("raw_control_character",)),
    ('{"a": "say "hi" to"}', {"a": 'say "hi" to'}, ("inner_quote",)),
    ('{"a": "it\\\'s"}', {"a": "it's"}, ("bad_escape",)),
    ('{"a": "C:\\dir"}', {"a": "C:\\dir"}, ("bad_escape",)),
    ('{"a": 1 "b": 2}', {"a": 1, "b": 2}, ("missing_comma",)),
    ('{"a": [1, 2}', {"a": [1, 2]}, ("missing_bracket",)),
    ('{"a": tomorrow}', {"a": "tomorrow"}, ("bare_string",)),
    ("{a 1}", {"a": 1}, ("bare_key", "missing_colon")),
    ('{"a": }', {"a": None}, ("missing_value",)),
    ("{'a': 'say \"hi\"'}", {"a": 'say "hi"'}, ("single_quotes",)),
    ('{"a": 1,, "b": 2}', {"a": 1, "b": 2}, ("extra_comma",)),
]
"""Of a call in any syntax with JSON arguments."""

OTHER_FORMS: Final[list[tuple[str, str, tuple[str, ...]]]] = [
    (
        "mistral_v13",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rom"}, "id": "abcdefghi"}]',
        (),
    ),
    ("mistral_v13", '[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{"city": "Rom"}', ()),
    ("mistral_v3", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rom"}', ()),
    ("mistral_v13", '[TOOL_CALLS]get_weather{"city": "Rom"}', ()),
    ("mistral_v13", '[TOOL_CALLS]get_weather and so[ARGS]{"city": "Rom"}', ()),
    ("llama3_json", '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Rom"}}', ()),
    (
        "llama3_json",
        '{"type": "function", "name": "get_weather", "parameters": {"city": "Rom"}}',
        (),
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{"city": "Rom"}<|tool_call_end|>',
        (),
    ),
    (
        "kimi_k2",
        '<|tool_call_begin|>0<|tool_call_argument_begin|>{"city": "Rom"}<|tool_call_end|>',
        ("inferred_name",),
    ),
    (
        "deepseek_v3",
        '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rom"}<｜tool▁call▁end｜>',
        (),
    ),
    (
        "command_r_plus",
        'Action:\n```json\n[{"tool_name": "get_weather", "parameters": {"city": "Rom"}}]\n```',
        (),
    ),
    ("phi4", 'functools[{"name": "get_weather", "arguments": {"city": "Rom"}}]', ()),
]
"""Of other families: each asks for the weather of Rom."""
