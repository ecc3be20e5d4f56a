from __future__ import annotations

from typing import Any

import anthropic
import pytest

from holdfast.config import ServerSettings
from tests.fakes.http_clients import client_of, served
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway, model_status

VERSION = {"anthropic-version": "2023-06-01"}


async def got(path: str, headers: dict[str, str], **options: Any) -> Any:
    async with client_of(ScriptedGateway(), **options) as client:
        return await client.get(path, headers=headers)


async def test_anthropics_version_header_selects_its_models_list() -> None:
    own, usual = await got("/v1/models", VERSION), await got("/v1/models", {})
    assert (own.json()["data"][0]["type"], own.json()["has_more"], own.json()["first_id"]) == (
        "model",
        False,
        MODEL,
    )
    assert (usual.json()["object"], usual.json()["data"][0]["object"]) == ("list", "model")


async def test_a_single_or_missing_model_has_that_form_too() -> None:
    one, none = await got(f"/v1/models/{MODEL}", VERSION), await got("/v1/models/nope", VERSION)
    assert (one.json()["id"], one.json()["max_input_tokens"]) == (MODEL, 2048)
    assert (none.status_code, none.json()["error"]["type"]) == (404, "not_found_error")
    assert (await got("/v1/models/nope", {})).json()["error"]["code"] == "model_not_found"


async def test_wrong_keys_and_unknown_paths_have_its_form_too() -> None:
    locked = await got("/v1/models", VERSION, server=ServerSettings(api_key="sesame"))
    assert (locked.status_code, locked.json()["error"]["type"]) == (401, "authentication_error")
    assert (await got("/v1/nowhere", VERSION)).json()["error"]["type"] == "not_found_error"


async def test_the_length_of_a_loading_model_is_null() -> None:
    directory = ScriptedDirectory(models=(model_status(state="loading", info=None),))
    assert (await got("/v1/models", VERSION, directory=directory)).json()["data"][0][
        "max_input_tokens"
    ] is None


async def test_an_empty_models_list_has_null_ids() -> None:
    response = await got("/v1/models", VERSION, directory=ScriptedDirectory(models=()))
    assert response.json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("name", ["claude-sonnet-4-5", "claude-3-5-haiku-20241022"])
async def test_anthropics_model_names_return_the_first_model(name: str) -> None:
    assert (await got(f"/v1/models/{name}", VERSION)).json()["id"] == MODEL


async def test_the_official_client_lists_models() -> None:
    async with (
        served(ScriptedGateway()) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="k") as client,
    ):
        assert [(model.id, model.lifecycle) async for model in client.models.list()] == [
            (MODEL, "active")
        ]
        assert (await client.models.retrieve(MODEL)).created_at.year == 2023
