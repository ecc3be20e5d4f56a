"""Bad values of the fields shared by both endpoints are a 400 with the field and reach no worker."""

from __future__ import annotations

import json
import logging
from typing import Any

import pydantic
import pytest

from holdfast.config import LimitsSettings
from holdfast.front.openai.endpoints import ChatCompletionRequest, CompletionRequest
from holdfast.front.openai.fields import KNOWN
from holdfast.front.request import OutputFormat
from tests.fakes.http_clients import CHAT, COMPLETIONS, HELLO, chat_body, client_of, completion_body
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway

HUGE = 10**400
BAD_VALUES: dict[str, list[Any]] = {
    "model": [1, "", [], {}],
    "stream": ["true", 1, 0, []],
    "stream_options": [True, [], "usage"],
    "max_tokens": [-1, 1.5, "5", True, 2**31, HUGE, [], float("nan"), float("inf")],
    "n": [0, -1, 17, 10**9, 1.5, "2", True, HUGE, {}],
    "temperature": [-0.1, 2.1, "hot", True, HUGE, float("nan"), float("inf"), []],
    "top_p": [0, -0.5, 1.1, "1", float("nan"), True],
    "top_k": [-1, 1.5, "3", 2**31, True],
    "min_p": [-0.1, 1.1, "0", float("nan")],
    "presence_penalty": [-2.1, 2.1, "0", float("-inf")],
    "frequency_penalty": [-2.1, 2.1, "0", []],
    "repetition_penalty": [0, -1, 101, "1", float("nan")],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True, HUGE],
    "stop": [1, "", ["a", ""], ["a", 1], [None], {"a": 1}, ["x"] * 17],
    "ignore_eos": ["yes", 1],
    "logit_bias": [[], "1", 5],
    "user": [1, [], {}],
    "metadata": ["x", 1, []],
}


@pytest.mark.parametrize("field", BAD_VALUES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_a_bad_value_is_refused_with_the_fields_name(path: str, field: str) -> None:
    gateway = ScriptedGateway()
    status = 422 if field == "max_tokens" else 400  # see tests/front/server/test_problem.py
    async with client_of(gateway) as client:
        for value in BAD_VALUES[field]:
            body = (chat_body if path == CHAT else completion_body)(**{field: value})
            response = await client.post(path, content=json.dumps(body))
            assert response.status_code == status, (value, response.text)
            error = response.json()["error"]
            assert error["param"].split(".")[0] == field
            assert error["type"] == "invalid_request_error"
            assert field in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize(
    ("bias", "param"),
    [
        ({"a": 1}, "logit_bias.a"),
        ({"-1": 1}, "logit_bias.-1"),
        ({"7": 101}, "logit_bias.7"),
        ({"7": "x"}, "logit_bias.7"),
    ],
)
async def test_a_bad_logit_bias_is_named_down_to_the_token(
    bias: dict[str, Any], param: str
) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(logit_bias=bias))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


HOSTILE: dict[str, Any] = {
    "logit_bias": {f"x{place}": 1 for place in range(20_000)},
    "stop": [1] * 50_000,
    "messages": [1] * 50_000,
}


@pytest.mark.parametrize("field", HOSTILE)
def test_of_many_mistakes_in_a_field_the_first_is_reported(field: str) -> None:
    # Checking all took seconds and gigabytes.
    with pytest.raises(pydantic.ValidationError) as refusal:
        ChatCompletionRequest.model_validate_json(json.dumps(chat_body(**{field: HOSTILE[field]})))
    assert refusal.value.error_count() == 1


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETIONS, "prompt")])
async def test_a_missing_field_is_named(path: str, field: str) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(path, json={"model": MODEL})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        field,
        "missing_required_parameter",
    )


@pytest.mark.parametrize("given", [{}, {"model": None}])
@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {"messages": HELLO}), (COMPLETIONS, {"prompt": ["a", "b"]})]
)
async def test_without_a_model_the_first_one_answers(
    path: str, body: dict[str, Any], given: dict[str, Any]
) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(path, json={**body, **given})
    assert (response.status_code, response.json()["model"]) == (200, MODEL)
    assert {request.model for request in gateway.requests} == {MODEL}


async def test_an_empty_list_is_reported_as_empty() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json={"messages": []})
    assert response.json()["error"]["message"] == "`messages`: must not be empty"


async def test_a_logit_bias_on_anything_but_token_ids_is_refused() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(logit_bias={"the": 1}))
    error = response.json()["error"]
    assert (error["param"], error["message"]) == (
        "logit_bias.the",
        "`logit_bias.the`: the keys must be token ids, got 'the'",
    )


async def test_a_model_that_is_not_served_is_a_404() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json={"model": "gpt-4o", "messages": HELLO})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        404,
        "model",
        "model_not_found",
    )
    assert MODEL in error["message"]


async def test_stream_options_without_a_stream_are_refused() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(stream_options={"include_usage": True}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "stream_options")


async def test_every_field_except_the_prompt_may_be_null() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(**dict.fromkeys(BAD_VALUES)))
    assert response.status_code == 200


async def test_sampling_fields_reach_the_gateway_unchanged() -> None:
    gateway = ScriptedGateway()
    given = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "repetition_penalty": 1.1,
    }
    async with client_of(gateway) as client:
        await client.post(
            CHAT,
            json=chat_body(**given, seed=5, logit_bias={"12": -100}, ignore_eos=True, stop="x"),
        )
    sampling = gateway.request.sampling
    assert {name: getattr(sampling, name) for name in given} == given
    assert (sampling.seed, sampling.logit_bias) == (5, {12: -100})
    assert (gateway.request.ignore_eos, gateway.request.stop) == (True, ("x",))


async def test_omitted_sampling_fields_are_listed_for_the_models_defaults() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        await client.post(CHAT, json=chat_body(temperature=0, top_k=None))
    assert "temperature" not in gateway.request.unset_sampling
    assert {"top_k", "top_p", "min_p", "repetition_penalty"} <= set(gateway.request.unset_sampling)


@pytest.mark.parametrize("seed", [-2, -(2**63), 2**63 - 1, 0])
async def test_every_seed_is_mapped_below_2_to_the_63(seed: int) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        await client.post(CHAT, json=chat_body(seed=seed))
    assert gateway.request.sampling.seed is not None
    assert 0 <= gateway.request.sampling.seed < 2**63


async def test_the_limits_are_configurable() -> None:
    limits = LimitsSettings(max_choices=2, max_stop_strings=1, max_top_logprobs=3)
    bad: list[dict[str, Any]] = [
        {"n": 3},
        {"stop": ["a", "b"]},
        {"logprobs": True, "top_logprobs": 4},
    ]
    async with client_of(ScriptedGateway(), limits=limits) as client:
        for fields in bad:
            response = await client.post(CHAT, json=chat_body(**fields))
            assert (response.status_code, response.json()["error"]["param"]) == (
                400,
                list(fields)[-1],
            )


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


TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {}}}
REFUSED: list[tuple[str, Any]] = [
    ("audio", {"voice": "alloy", "format": "wav"}),
    ("modalities", ["text", "audio"]),
    ("web_search_options", {}),
    ("grammar", 'root ::= "x"'),
    ("guided_whitespace_pattern", " "),
    ("use_beam_search", True),
    ("min_tokens", 5),
    ("min_tokens", False),
    ("stop_token_ids", [1]),
    ("repeat_penalty", 1.1),
]
OF_CHATS: list[tuple[str, Any]] = [
    ("prediction", {"type": "content", "content": "x"}),
    ("tools", [TOOL]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "look_up"}}),
    ("functions", [{"name": "look_up"}]),
    ("function_call", {"name": "look_up"}),
    ("messages", [{"role": "user", "content": "x"}]),
    ("enable_thinking", True),
    ("reasoning_effort", "low"),
    ("thinking", {"type": "enabled"}),
    ("think", True),
    ("thinking_budget", 5),
    ("parallel_tool_calls", False),
    ("chat_template_kwargs", {"x": 1}),
]
OF_TEXTS: list[tuple[str, Any]] = [("prompt", "x"), ("echo", True), ("suffix", "x"), ("best_of", 2)]
HARMLESS: list[tuple[str, Any]] = [
    ("tools", []),
    ("tools", None),
    ("tool_choice", "none"),
    ("response_format", {"type": "text"}),
    ("response_format", None),
    ("modalities", ["text"]),
    ("min_tokens", 0),
    ("length_penalty", 1.0),
    ("parallel_tool_calls", True),
    ("user", "me"),
    ("metadata", {"a": "b"}),
    ("store", False),
    ("service_tier", "auto"),
    ("reasoning_effort", "low"),
    ("verbosity", "low"),
    ("prompt_cache_key", "k"),
    ("safety_identifier", "s"),
]


REFUSED_BY = [
    *((path, *case) for path in (CHAT, COMPLETIONS) for case in REFUSED),
    *((COMPLETIONS, *case) for case in OF_CHATS),
    *((CHAT, *case) for case in OF_TEXTS),
]


@pytest.mark.parametrize(("path", "field", "value"), REFUSED_BY)
async def test_a_field_that_requests_an_unsupported_feature_is_refused(
    path: str, field: str, value: Any
) -> None:
    gateway = ScriptedGateway()
    body = (chat_body if path == CHAT else completion_body)(**{field: value})
    async with client_of(gateway) as client:
        response = await client.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (
        400,
        field,
        "unsupported_parameter",
    )
    assert field in error["message"]
    assert gateway.requests == []


@pytest.mark.parametrize(("field", "value"), HARMLESS)
async def test_an_unsupported_field_without_a_request_is_accepted(field: str, value: Any) -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(CHAT, json=chat_body(**{field: value}))
    assert response.status_code == 200, response.text


async def test_an_unknown_field_is_ignored_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    async with client_of(ScriptedGateway()) as client:
        for _ in range(3):
            response = await client.post(CHAT, json=chat_body(frobnicate_this_test=1))
            assert response.status_code == 200
    assert caplog.text.count("frobnicate_this_test") == 1


def test_no_supported_field_is_among_the_refused() -> None:
    served = set(ChatCompletionRequest.model_fields) & set(CompletionRequest.model_fields)
    assert served & set(KNOWN) == set()
