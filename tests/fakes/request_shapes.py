"""Requests in the shapes that agents and SDKs send, with short texts: one table per protocol, by
path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Shapes = Mapping[str, Sequence[dict[str, Any]]]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
REPORT = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "type": "object",
    "properties": {"x": {"type": "string", "enum": ["a", "b"]}, "ok": {"type": "boolean"}},
    "required": ["x", "ok"],
}
PATCH_GRAMMAR = 'start: "*** Begin Patch" LF\n%import common.LF'
WEATHER = {"name": "get_weather", "description": "Weather", "parameters": CITY}
ARGUMENTS = '{"city": "Rome"}'


def user(text: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


COMPLETIONS: Shapes = {
    "/v1/completions": (
        {
            "prompt": "Once upon",
            "max_tokens": 1,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        {
            "prompt": ["a", "b"],
            "max_tokens": 1,
            "n": 2,
            "best_of": 2,
            "logprobs": 2,
            "echo": True,
            "stop": ["x"],
        },
        {
            "prompt": [5, 6, 7],
            "max_tokens": 1,
            "seed": 1,
            "top_p": 0.9,
            "logit_bias": {"5": 1},
            "suffix": None,
            "user": "u",
        },
        {
            "prompt": [[5], [6, 7]],
            "max_tokens": 1,
            "response_format": {"type": "json_object"},
            "presence_penalty": 1,
        },
        {
            "prompt": "a",
            "max_tokens": 1,
            "structured_outputs": {"json": CITY},
            "cache_salt": "s",
            "session_id": "s",
        },
    )
}

_EPHEMERAL = {"type": "ephemeral"}
_TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Rome"}}
_CLAUDE_TOOLS = [
    {
        "name": "Placeholder",
        "description": "Later",
        "input_schema": {"type": "object", "properties": {}},
        "defer_loading": True,
    },
    {
        "name": "get_weather",
        "description": "Weather",
        "input_schema": CITY,
        "cache_control": _EPHEMERAL,
        "strict": False,
    },
]
_CLAUDE_CODE = {
    "max_tokens": 1,
    "stream": True,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=1;"},
        {
            "type": "text",
            "text": "You are brief.",
            "cache_control": {"type": "ephemeral", "ttl": "1h"},
        },
    ],
    "messages": [
        user(
            [
                {"type": "text", "text": "<system-reminder>x</system-reminder>"},
                {"type": "text", "text": "read it"},
            ]
        ),
        {
            "role": "system",
            "content": [{"type": "text", "text": "Mind it.", "cache_control": _EPHEMERAL}],
        },
    ],
    "tools": _CLAUDE_TOOLS,
    "metadata": {"user_id": '{"device_id": "d", "session_id": "s"}'},
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
}
_CLAUDE_RESULT = {
    "max_tokens": 1,
    "messages": [
        user("Weather?"),
        {
            "role": "assistant",
            "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, _TOOL_USE],
        },
        user(
            [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "text", "text": "sunny"}],
                }
            ]
        ),
    ],
    "tools": _CLAUDE_TOOLS,
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}
MESSAGES: Shapes = {
    "/v1/messages": (
        {
            "max_tokens": 1,
            "messages": [user()],
            "stream": True,
            "temperature": 0,
            "top_k": 5,
            "top_p": 0.9,
        },
        {
            "max_tokens": 1,
            "messages": [
                user([{"type": "text", "text": "a"}]),
                {"role": "assistant", "content": "b"},
                user("c"),
            ],
        },
        {
            "max_tokens": 1,
            "messages": [user(), {"role": "assistant", "content": "{"}],
            "stop_sequences": ["e"],
            "system": "x",
        },
        {
            "max_tokens": 1,
            "messages": [user()],
            "tools": _CLAUDE_TOOLS,
            "tool_choice": {"type": "tool", "name": "get_weather"},
        },
        {
            "max_tokens": 1,
            "messages": [user()],
            "output_config": {"format": {"type": "json_schema", "schema": REPORT}},
        },
        {
            "max_tokens": 1030,
            "messages": [user()],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "service_tier": "auto",
        },
        {
            "max_tokens": 1,
            "messages": [user()],
            "tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}],
        },
        _CLAUDE_CODE,
        _CLAUDE_RESULT,
    ),
    "/v1/messages/count_tokens": (
        {"messages": [user("hello there")], "system": "be brief"},
        {name: value for name, value in _CLAUDE_RESULT.items() if name != "max_tokens"},
    ),
}

_FUNCTION = {"type": "function", "strict": False, **WEATHER}
_FORMAT = {"type": "json_schema", "name": "response", "schema": REPORT, "strict": True}
_INPUT = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
_CODEX = {
    "instructions": "Be brief.",
    "input": [
        {
            "type": "message",
            "id": "msg_1",
            "role": "developer",
            "content": [{"type": "input_text", "text": "x"}],
        },
        _INPUT,
    ],
    "tools": [
        _FUNCTION,
        {"type": "namespace", "name": "mcp__a", "description": "A", "tools": [_FUNCTION]},
        {
            "type": "custom",
            "name": "patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": PATCH_GRAMMAR},
        },
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low", "format": _FORMAT},
    "client_metadata": {"session_id": "s"},
}
_RESPONSES_RESULT = {
    "input": [
        user("Weather?"),
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [{"type": "summary_text", "text": "hm"}],
            "encrypted_content": "eA==",
        },
        {
            "type": "function_call",
            "call_id": "call_1",
            "name": "get_weather",
            "arguments": ARGUMENTS,
        },
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [{"type": "input_text", "text": "sunny"}],
        },
        {"type": "custom_tool_call", "call_id": "call_2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": "done"},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "It is.", "annotations": []}],
        },
        _INPUT,
    ],
    "tools": _CODEX["tools"],
}
RESPONSES: Shapes = {
    "/v1/responses": (
        {
            "input": "Hi",
            "max_output_tokens": 1,
            "temperature": 0,
            "metadata": {"a": "b"},
            "truncation": "auto",
        },
        {
            "input": [user([{"type": "input_text", "text": "Hi"}])],
            "stream": True,
            "stream_options": {"include_obfuscation": False},
        },
        {
            "input": [user("p")],
            "text": {"format": _FORMAT},
            "top_logprobs": 2,
            "service_tier": "auto",
            "user": "u",
        },
        {
            "input": "Hi",
            "tools": [_FUNCTION],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "max_tool_calls": 1,
        },
        {
            "input": "Hi",
            "previous_response_id": "resp_1",
            "background": False,
            "truncation": "disabled",
        },
        {"input": "Hi", "conversation": {"id": "conv_1"}, "store": True, "safety_identifier": "s"},
        _CODEX,
        _RESPONSES_RESULT,
    ),
    "/v1/responses/input_tokens": ({"input": "Hi", "instructions": "Be brief."}, _RESPONSES_RESULT),
    "/v1/conversations": ({"items": [_INPUT], "metadata": {"a": "b"}}, {}),
}

_OLLAMA_TOOL = {"type": "function", "function": WEATHER}
_OPTIONS = {
    "num_predict": 1,
    "temperature": 0,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "num_ctx": 4096,
}
_OLLAMA_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}],
}
OLLAMA: Shapes = {
    "/api/chat": (
        {"messages": [user()], "options": _OPTIONS, "keep_alive": "5m"},
        {
            "messages": [user()],
            "stream": False,
            "think": True,
            "format": REPORT,
            "options": {"repeat_penalty": 1.1, "mirostat": 0},
        },
        {
            "messages": [user()],
            "stream": False,
            "format": "json",
            "keep_alive": -1,
            "logprobs": True,
            "top_logprobs": 2,
        },
        {
            "messages": [{"role": "system", "content": "x"}, user("Weather?")],
            "tools": [_OLLAMA_TOOL],
            "stream": True,
        },
        {
            "messages": [
                user("?"),
                _OLLAMA_CALL,
                {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
            ],
            "tools": [_OLLAMA_TOOL],
            "stream": False,
        },
        {"messages": [], "keep_alive": 0},
    ),
    "/api/generate": (
        {"prompt": "Hi", "stream": False, "options": _OPTIONS, "system": "x", "think": "low"},
        {
            "prompt": "Hi",
            "raw": True,
            "suffix": "",
            "template": "",
            "context": [5, 6],
            "format": "json",
        },
        {"prompt": "", "keep_alive": "10m"},
    ),
    "/api/embed": (
        {"input": ["a", "b"], "truncate": True, "dimensions": 8, "options": {}},
        {"input": "a", "keep_alive": 5},
    ),
    "/api/embeddings": ({"prompt": "a", "options": {}},),
    "/api/show": ({"verbose": True}, {"name": "demo", "system": ""}),
    "/api/pull": ({"stream": False, "insecure": False},),
}

EMBEDDINGS: Shapes = {
    "/v1/embeddings": (
        {"input": "a", "encoding_format": "float", "user": "u"},
        {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 8},
        {"input": [5, 6, 7]},
        {"input": [[5], [6, 7]], "dimensions": 16},
    )
}
RERANK: Shapes = {
    "/v1/rerank": (
        {"query": "weather", "documents": ["sunny", "a cat"], "top_n": 1, "return_documents": True},
        {
            "query": "weather",
            "documents": [{"text": "sunny"}, {"text": "x"}],
            "max_chunks_per_doc": 1,
        },
    )
}
TOKENS: Shapes = {
    "/tokenize": (
        {"prompt": "Hello there", "add_special_tokens": True, "return_token_strs": True},
        {"content": "Hello", "with_pieces": True, "add_special": True, "parse_special": False},
        {"messages": [user()], "add_generation_prompt": True, "tools": [_OLLAMA_TOOL]},
    ),
    "/detokenize": ({"tokens": [5, 6, 7]},),
    "/apply-template": (
        {
            "messages": [user(), user("b")],
            "tools": [_OLLAMA_TOOL],
            "chat_template_kwargs": {"x": 1},
        },
    ),
}
