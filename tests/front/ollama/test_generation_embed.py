from __future__ import annotations

import struct
from typing import Any

import ollama
import pytest

from tests.fakes.http_clients import client_of
from tests.fakes.ollama_bodies import asked
from tests.fakes.scripted_gateway import MODEL, ScriptedControl, ScriptedGateway

EMBED, OLDER = "/api/embed", "/api/embeddings"


@pytest.mark.parametrize(("given", "inputs"), [("one", ("one",)), (["one", "two"], ("one", "two"))])
async def test_each_text_gets_a_vector(given: Any, inputs: tuple[str, ...]) -> None:
    gateway = ScriptedGateway()
    response = await asked(
        gateway,
        EMBED,
        input=given,
        model=f"{MODEL}:latest",
        keep_alive="5m",
        options={"num_ctx": 512},
    )
    found = ollama.EmbedResponse(**response.json())
    (request,) = gateway.embedded
    assert (request.model, request.inputs, request.is_list, request.truncates) == (
        MODEL,
        inputs,
        len(inputs) > 1,
        True,
    )
    assert len(found.embeddings) == len(inputs)
    assert found.model == f"{MODEL}:latest"
    assert (found.total_duration or 0) >= (found.load_duration or 0) > 0
    assert response.json()["cached_tokens"] <= (found.prompt_eval_count or 0)


async def test_embedding_options_are_passed_on() -> None:
    gateway = ScriptedGateway()
    await asked(gateway, EMBED, input="x", truncate=False, dimensions=3)
    (request,) = gateway.embedded
    assert (request.truncates, request.dimensions) == (False, 3)


async def test_the_older_form_has_one_vector() -> None:
    gateway = ScriptedGateway()
    response = await asked(gateway, OLDER, prompt="one")
    (vector,) = await gateway.embed(gateway.embedded[0])
    assert list(response.json()) == ["embedding"]
    assert (
        struct.pack(f"{len(response.json()['embedding'])}f", *response.json()["embedding"])
        == vector.vector
    )
    assert gateway.embedded[0].input_field == "prompt"


async def test_a_salt_selects_a_tenant() -> None:
    gateway = ScriptedGateway()
    salts: list[dict[str, str]] = [{}, {"cache_salt": "pepper"}]
    for path in (EMBED, OLDER):
        for salt in salts:
            await asked(gateway, path, input="one", prompt="one", **salt)
    plain, salted = (request.tenant for request in gateway.embedded[:2])
    assert plain != salted
    assert [request.tenant for request in gateway.embedded[2:]] == [plain, salted]


@pytest.mark.parametrize("given", [{}, {"input": None}, {"input": ""}, {"input": []}])
async def test_without_a_text_the_model_is_only_loaded(given: dict[str, Any]) -> None:
    gateway = ScriptedGateway()
    whole = (await asked(gateway, EMBED, **given)).json()
    assert (whole["embeddings"], whole["prompt_eval_count"]) == ([], 0)
    older = await asked(gateway, OLDER, **({"prompt": ""} if given else {}))
    assert (older.status_code, older.json()) == (200, {"embedding": []})
    assert [request.inputs for request in gateway.embedded] == [(), ()]


async def test_an_empty_text_among_others_is_embedded() -> None:
    gateway = ScriptedGateway()
    await asked(gateway, EMBED, input=["one", ""])
    assert gateway.embedded[0].inputs == ("one", "")


async def test_an_unknown_model_is_answered_in_ollamas_words() -> None:
    response = await asked(ScriptedGateway(), EMBED, input="x", model="other")
    assert response.status_code == 404
    assert "try pulling it first" in response.json()["error"]


@pytest.mark.parametrize(
    ("address", "done"), [("127.0.0.1", [("let go", MODEL)]), ("192.0.2.1", [])]
)
@pytest.mark.parametrize(("path", "field"), [(EMBED, "input"), (OLDER, "prompt")])
async def test_an_administrator_may_unload_the_model_after_embedding(
    path: str, field: str, address: str, done: list[tuple[str, str]]
) -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control, address=address) as client:
        answered = await client.post(path, json={"model": MODEL, field: "x", "keep_alive": 0})
    assert (answered.status_code, control.done) == (200, done)
