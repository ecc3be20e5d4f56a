from __future__ import annotations

from typing import Any

import pytest

from holdfast.config import ServerSettings
from holdfast.front.responses.create import is_codex
from tests.fakes.http_clients import client_of
from tests.fakes.recorded_requests import CODEX
from tests.fakes.scripted_gateway import INFO, MODEL, ScriptedGateway

# Fields required by Codex's own type: it ignores a list in which one is missing.
REQUIRED = {
    "slug": str,
    "display_name": str,
    "supported_reasoning_levels": list,
    "shell_type": str,
    "visibility": str,
    "supported_in_api": bool,
    "priority": int,
    "base_instructions": str,
    "supports_reasoning_summaries": bool,
    "support_verbosity": bool,
    "truncation_policy": dict,
    "supports_parallel_tool_calls": bool,
    "experimental_supported_tools": list,
}


async def models(headers: dict[str, str], *, codex_models: bool) -> Any:
    async with client_of(
        ScriptedGateway(), server=ServerSettings(codex_models=codex_models)
    ) as client:
        return (await client.get("/v1/models?client_version=0.169.0", headers=headers)).json()


@pytest.mark.parametrize(
    ("headers", "meant"),
    [
        (CODEX[0]["headers"], True),
        ({"user-agent": "codex-tui/0.169.0 (Debian)"}, True),
        ({"user-agent": "OpenAI/Python 3.52.0"}, False),
        ({}, False),
    ],
)
def test_codex_is_recognized_by_its_headers(headers: dict[str, str], meant: bool) -> None:
    assert is_codex(headers) is meant


async def test_codex_gets_models_in_its_own_form_if_configured() -> None:
    got = await models(CODEX[0]["headers"], codex_models=True)
    (model,) = got["models"]
    assert {name: type(model[name]) for name in REQUIRED} == REQUIRED
    assert (model["slug"], model["context_window"]) == (MODEL, INFO.context_tokens)
    assert {"effort", "description"} == set(model["supported_reasoning_levels"][0])
    assert [card["id"] for card in got["data"]] == [MODEL]


async def test_others_and_codex_by_default_get_openais_list() -> None:
    assert "models" not in await models({}, codex_models=True)
    assert "models" not in await models(CODEX[0]["headers"], codex_models=False)
