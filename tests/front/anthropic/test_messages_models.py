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


async def test_who_says_anthropics_version_gets_its_form_and_all_others_openais() -> None:
    own, usual = await got("/v1/models", VERSION), await got("/v1/models", {})
    assert (own.json()["data"][0]["type"], own.json()["has_more"], own.json()["first_id"]) == (
        "model",
        False,
        MODEL,
    )
    assert (usual.json()["object"], usual.json()["data"][0]["object"]) == ("list", "model")


async def test_so_it_is_with_one_model_and_with_what_is_not_there() -> None:
    one, none = await got(f"/v1/models/{MODEL}", VERSION), await got("/v1/models/nope", VERSION)
    assert (one.json()["id"], one.json()["max_input_tokens"]) == (MODEL, 2048)
    assert (none.status_code, none.json()["error"]["type"]) == (404, "not_found_error")
    assert (await got("/v1/models/nope", {})).json()["error"]["code"] == "model_not_found"


async def test_a_wrong_key_and_an_unknown_path_are_told_in_its_form_too() -> None:
    locked = await got("/v1/models", VERSION, server=ServerSettings(api_key="sesame"))
    assert (locked.status_code, locked.json()["error"]["type"]) == (401, "authentication_error")
    assert (await got("/v1/nowhere", VERSION)).json()["error"]["type"] == "not_found_error"


async def test_a_model_that_is_loading_has_no_length_yet() -> None:
    directory = ScriptedDirectory(models=(model_status(state="loading", info=None),))
    assert (await got("/v1/models", VERSION, directory=directory)).json()["data"][0][
        "max_input_tokens"
    ] is None


async def test_no_models_are_a_list_without_ends() -> None:
    response = await got("/v1/models", VERSION, directory=ScriptedDirectory(models=()))
    assert response.json() == {"data": [], "has_more": False, "first_id": None, "last_id": None}


@pytest.mark.parametrize("name", ["claude-sonnet-4-5", "claude-3-5-haiku-20241022"])
async def test_a_name_of_anthropics_is_the_first_models(name: str) -> None:
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
