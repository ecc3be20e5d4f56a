from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.http_clients import COMPLETIONS, client_of, completion_body
from tests.fakes.scripted_gateway import ScriptedGateway


async def test_too_many_answers_are_refused_before_any_is_submitted() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        refused = await client.post(COMPLETIONS, json=completion_body(prompt=["a"] * 256, n=16))
        assert gateway.requests == []
        taken = await client.post(
            COMPLETIONS, json=completion_body(prompt=["a"] * 16, n=16, stream=True)
        )
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert "256 prompts with 16 answers each" in refused.json()["error"]["message"]
    assert (taken.status_code, sum(request.choices for request in gateway.requests)) == (200, 256)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", ["hi"]),
        ("", [""]),
        (["hi"], ["hi"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [(1, 2)]),
        ([[1, 2], [3]], [(1, 2), (3,)]),
    ],
    ids=str,
)
async def test_all_four_kinds_of_prompt_are_understood(prompt: Any, expected: list[Any]) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(COMPLETIONS, json=completion_body(prompt=prompt))
    assert response.status_code == 200
    assert [request.prompt for request in gateway.requests] == expected


async def test_each_prompt_has_its_own_id_and_field() -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        await client.post(COMPLETIONS, json=completion_body(prompt=["a", "b"]))
    assert len({request.request_id for request in gateway.requests}) == 2
    assert [request.prompt_field for request in gateway.requests] == ["prompt.0", "prompt.1"]


async def accepted(**fields: Any) -> Any:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(COMPLETIONS, json=completion_body(**fields))
    assert response.status_code == 200, response.text
    return gateway.request


async def test_the_default_length_is_that_of_openai() -> None:
    assert (await accepted()).max_tokens == 16


async def test_a_prompt_can_be_scored_without_generating_anything() -> None:
    request = await accepted(echo=True, max_tokens=0, logprobs=3)
    assert (request.echo, request.max_tokens, request.want_logprobs, request.top_logprobs) == (
        True,
        0,
        True,
        3,
    )


async def test_logprobs_zero_returns_no_alternatives() -> None:
    request = await accepted(logprobs=0)
    assert (request.want_logprobs, request.top_logprobs) == (True, 0)


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 2, "n": 2},
        {"best_of": 1},
        {"suffix": ""},
        {"suffix": None},
        {"add_special_tokens": True},
    ],
)
async def test_fields_that_change_nothing_are_accepted(fields: dict[str, Any]) -> None:
    gateway = ScriptedGateway()
    async with client_of(gateway) as client:
        response = await client.post(COMPLETIONS, json=completion_body(**fields))
    assert response.status_code == 200


async def test_a_hundred_thousand_bad_ids_are_refused_at_the_first() -> None:
    async with client_of(ScriptedGateway()) as client:
        response = await client.post(COMPLETIONS, json=completion_body(prompt=[-1] * 100_000))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt.0")
