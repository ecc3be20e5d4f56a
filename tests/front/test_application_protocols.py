"""One conversation with the same tools, as each protocol's clients send it: the model reads the
same tokens.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from holdfast.config import LimitsSettings
from holdfast.front.application import create_application
from holdfast.front.prompt.prepare import prepare
from holdfast.front.request import GenerationRequest
from holdfast.front.server.services import Services
from tests.fakes.client_places import control_tokens, controls_of
from tests.fakes.family_bundles import bundle_of
from tests.fakes.family_templates import FAMILY_TEMPLATES
from tests.fakes.http_clients import HELLO, client_of
from tests.fakes.ollama_bodies import directory_of
from tests.fakes.scripted_client import model_info
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, answer, scripted_services

SYSTEM, QUESTION, THOUGHT, SAID, THANKS = (
    "Be brief.",
    "How is the world?",
    "I need both.",
    "I will look.",
    "Thank you.",
)
FUNCTIONS: list[dict[str, Any]] = [
    {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Where"},
                "days": {"type": "integer"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    },
    {
        "name": "clock",
        "description": "Tells the time.",
        "parameters": {
            "type": "object",
            "properties": {"zone": {"type": "string"}},
            "required": [],
        },
    },
]
CALLS: list[dict[str, Any]] = [
    {"id": "call_a", "name": "weather", "input": {"city": "Zürich", "days": 2}, "result": "sunny"},
    {"id": "call_b", "name": "clock", "input": {}, "result": "noon"},
]


def conversation(answer: dict[str, Any], results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages around an answer with calls and their results."""
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        answer,
        *results,
        {"role": "user", "content": THANKS},
    ]


def chat_body(*, strict: bool | None, thinks: bool, seal: Any) -> dict[str, Any]:
    calls = [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call["input"])},
        }
        for call in CALLS
    ]
    answer = {
        "role": "assistant",
        "content": SAID,
        "reasoning_content": THOUGHT,
        "tool_calls": calls,
    }
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": call["result"]} for call in CALLS
    ]
    return {
        "messages": conversation(answer, results),
        "tools": [{"type": "function", "function": {**each, **wish(strict)}} for each in FUNCTIONS],
        "enable_thinking": thinks,
    }


def responses_body(*, strict: bool | None, thinks: bool, seal: Any) -> dict[str, Any]:
    thought = {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }
    calls = [
        {
            "type": "function_call",
            "call_id": call["id"],
            "name": call["name"],
            "arguments": json.dumps(call["input"]),
        }
        for call in CALLS
    ]
    results = [
        {"type": "function_call_output", "call_id": call["id"], "output": call["result"]}
        for call in CALLS
    ]
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": SAID, "annotations": []}],
    }
    asked = {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": QUESTION}],
    }
    return {
        "instructions": SYSTEM,
        "input": [asked, thought, said, *calls, *results, {"role": "user", "content": THANKS}],
        "tools": [{"type": "function", **each, **wish(strict)} for each in FUNCTIONS],
        "reasoning": {"enabled": thinks},
    }


def messages_body(*, strict: bool | None, thinks: bool, seal: Any) -> dict[str, Any]:
    calls = [
        {"type": "tool_use", "id": call["id"], "name": call["name"], "input": call["input"]}
        for call in CALLS
    ]
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": call["result"]}
        for call in CALLS
    ]
    thought = {"type": "thinking", "thinking": THOUGHT, "signature": seal.sign(THOUGHT)}
    return {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": [thought, {"type": "text", "text": SAID}, *calls]},
            {"role": "user", "content": [*results, {"type": "text", "text": THANKS}]},
        ],
        "tools": [
            {
                "name": each["name"],
                "description": each["description"],
                "input_schema": each["parameters"],
                **wish(strict),
            }
            for each in FUNCTIONS
        ],
        "thinking": {"type": "enabled" if thinks else "disabled"},
    }


def ollama_body(*, strict: bool | None, thinks: bool, seal: Any) -> dict[str, Any]:
    calls = [
        {"id": call["id"], "function": {"name": call["name"], "arguments": call["input"]}}
        for call in CALLS
    ]
    results = [
        {
            "role": "tool",
            "tool_name": call["name"],
            "tool_call_id": call["id"],
            "content": call["result"],
        }
        for call in CALLS
    ]
    answer = {"role": "assistant", "content": SAID, "thinking": THOUGHT, "tool_calls": calls}
    return {
        "messages": conversation(answer, results),
        "tools": [{"type": "function", "function": {**each, **wish(strict)}} for each in FUNCTIONS],
        "think": thinks,
    }


def wish(strict: bool | None) -> dict[str, bool]:
    return {} if strict is None else {"strict": strict}


BODIES = {
    "/v1/chat/completions": chat_body,
    "/v1/responses": responses_body,
    "/v1/messages": messages_body,
    "/api/chat": ollama_body,
}


async def request_of(
    services: Services, gateway: ScriptedGateway, path: str, body: dict[str, Any]
) -> GenerationRequest:
    transport = httpx.ASGITransport(create_application(services), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        response = await client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    return gateway.requests[-1]


async def requests(*, thinks: bool) -> dict[str, GenerationRequest]:
    """The conversation by protocol; each has another value for strict tools."""
    gateway = ScriptedGateway()
    services = scripted_services(gateway, directory=directory_of())
    return {
        path: await request_of(
            services, gateway, path, body(strict=strict, thinks=thinks, seal=services.access.seal)
        )
        for (path, body), strict in zip(BODIES.items(), (None, True, False, True), strict=True)
    }


def read(request: GenerationRequest, name: str) -> tuple[int, ...]:
    """The tokens that the model reads of a request."""
    prepared = prepare(
        request, bundle_of(name), info=model_info(context_tokens=100_000), limits=LimitsSettings()
    )
    return tuple(prepared.sequences[0].prompt_token_ids)


@pytest.mark.parametrize("thinks", [True, False])
async def test_the_model_reads_the_same_tokens_in_every_protocol(thinks: bool) -> None:
    asked = await requests(thinks=thinks)
    for name in FAMILY_TEMPLATES:
        prompts = {path: read(request, name) for path, request in asked.items()}
        assert prompts == dict.fromkeys(BODIES, prompts["/v1/chat/completions"]), name
        text = bundle_of(name).tokenizer.decode(
            list(prompts["/v1/responses"]), skip_special_tokens=False
        )
        assert "strict" not in text


RESULT = {"call_a": "sunny", "call_b": "noon", "call_z": "strange"}
# a conversation of questions, calls and results
ORDERED = ("ask", "calls", "call_a", "call_b", "ask")
DISORDER = {
    "swapped": (("ask", "calls", "call_b", "call_a", "ask"), ORDERED),
    "late": (("ask", "calls", "call_b", "ask", "call_a"), ORDERED),
    "an unknown one": (
        ("ask", "calls", "call_z", "call_a", "call_b", "ask"),
        ("ask", "calls", "call_a", "call_b", "call_z", "ask"),
    ),
    "only the second, and an unknown one": (
        ("ask", "calls", "call_z", "call_b", "ask"),
        ("ask", "calls", "call_b", "call_z", "ask"),
    ),
}


def chat_message(step: str) -> dict[str, Any]:
    if step == "ask":
        return {"role": "user", "content": QUESTION}
    if step == "calls":
        return {**chat_body(strict=None, thinks=False, seal=None)["messages"][2], "content": ""}
    return {"role": "tool", "tool_call_id": step, "content": RESULT[step]}


def ollama_message(step: str) -> dict[str, Any]:
    if step == "calls":
        return {**ollama_body(strict=None, thinks=False, seal=None)["messages"][2], "content": ""}
    return chat_message(step)


def response_items(step: str) -> list[dict[str, Any]]:
    if step == "ask":
        return [{"role": "user", "content": QUESTION}]
    if step == "calls":
        items = responses_body(strict=None, thinks=False, seal=None)["input"]
        return [each for each in items if each.get("type") in ("reasoning", "function_call")]
    return [{"type": "function_call_output", "call_id": step, "output": RESULT[step]}]


def messages_turn(step: str, seal: Any) -> dict[str, Any]:
    if step == "ask":
        return {"role": "user", "content": QUESTION}
    if step == "calls":
        turn = messages_body(strict=None, thinks=False, seal=seal)["messages"][1]
        return {**turn, "content": [each for each in turn["content"] if each["type"] != "text"]}
    result = {"type": "tool_result", "tool_use_id": step, "content": RESULT[step]}
    return {"role": "user", "content": [result]}


def in_protocols(steps: tuple[str, ...], seal: Any) -> dict[str, dict[str, Any]]:
    bodies = {path: body(strict=None, thinks=False, seal=seal) for path, body in BODIES.items()}
    bodies["/v1/chat/completions"]["messages"] = [chat_message(step) for step in steps]
    bodies["/api/chat"]["messages"] = [ollama_message(step) for step in steps]
    bodies["/v1/messages"]["messages"] = [messages_turn(step, seal) for step in steps]
    bodies["/v1/responses"]["input"] = [item for step in steps for item in response_items(step)]
    for field, path in (("instructions", "/v1/responses"), ("system", "/v1/messages")):
        del bodies[path][field]
    return bodies


@pytest.mark.parametrize("case", DISORDER)
async def test_results_follow_their_calls_in_every_protocol(case: str) -> None:
    gateway = ScriptedGateway()
    services = scripted_services(gateway, directory=directory_of())
    expected: dict[str, GenerationRequest] = {}
    asked: dict[str, GenerationRequest] = {}
    for steps, found in zip(DISORDER[case], (asked, expected), strict=True):
        for path, body in in_protocols(steps, services.access.seal).items():
            found[path] = await request_of(services, gateway, path, body)
    for name in ("qwen3", "mistral_v11", "gemma4", "apertus", "llama3"):
        wanted = read(expected["/v1/chat/completions"], name)
        for path, request in asked.items():
            assert read(request, name) == wanted, (name, path)
            assert read(expected[path], name) == wanted, (name, path)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/responses", {"input": "hello"}),
        ("/api/chat", {"messages": HELLO, "options": {}}),
        ("/api/generate", {"prompt": "hello", "options": {}}),
    ],
)
@pytest.mark.parametrize("seed", [-1, -2, 0, 7, None])
async def test_a_seed_of_minus_one_is_random_and_others_are_fixed(
    path: str, body: dict[str, Any], seed: int | None
) -> None:
    """As in llama.cpp, vLLM and Ollama. A request without a seed gets a random one later."""
    gateway = ScriptedGateway(script=answer("x"))
    given = {"seed": seed}
    sent = {**body, "options": given} if "options" in body else {**body, **given}
    async with client_of(gateway) as client:
        response = await client.post(path, json={"model": MODEL, "stream": False, **sent})
    assert response.status_code == 200, response.text
    assert (gateway.request.sampling.seed is None) == (seed in (-1, None))


SAID_BY_CLIENTS = (
    *(SYSTEM, QUESTION, SAID, THANKS, "sunny", "noon", "Tells the weather.", "Where"),
    *("Zürich", "Z\\u00fcrich"),  # in arguments, also as JSON
)


def with_text(value: Any, text: str) -> Any:
    """The body of a request, with a text appended to every string that the client writes."""
    if isinstance(value, str):
        for said in SAID_BY_CLIENTS:
            value = value.replace(said, f"{said} {text}")
        return value
    if isinstance(value, dict):
        return {key: with_text(each, text) for key, each in value.items()}
    return [with_text(each, text) for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
async def test_no_text_becomes_a_control_token_in_any_protocol(path: str) -> None:
    gateway = ScriptedGateway()
    services = scripted_services(gateway, directory=directory_of())
    body = BODIES[path](strict=None, thinks=True, seal=services.access.seal)
    neutral = await request_of(services, gateway, path, with_text(body, "text"))
    for name in ("qwen3", "deepseek_v31", "gemma4", "kimi_k2", "minimax_m3"):
        bundle = bundle_of(name)
        controls = [text for text in controls_of(bundle) if '"' not in text]
        asked = await request_of(services, gateway, path, with_text(body, "".join(controls)))
        found = [control_tokens(bundle, read(request, name)) for request in (asked, neutral)]
        assert found[0] == found[1]
        assert sum(found[0].values()) > 5, "the template's own"
