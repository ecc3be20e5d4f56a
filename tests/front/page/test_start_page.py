from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import shlex
from typing import Any

import httpx
import pytest

from holdfast.config import ServerSettings
from tests.fakes.http_clients import CHAT, client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedDirectory, ScriptedGateway, model_status

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


async def page(
    headers: dict[str, str], *, directory: ScriptedDirectory | None = None, **settings: Any
) -> httpx.Response:
    async with client_of(
        ScriptedGateway(), directory=directory, server=ServerSettings(page=False, **settings)
    ) as client:
        return await client.get("/", headers=headers)


async def test_browsers_get_a_page_and_others_plain_text() -> None:
    shown, lines = await page(BROWSER), await page({"accept": "*/*"})
    assert shown.headers["content-type"] == "text/html; charset=utf-8"
    assert lines.headers["content-type"] == "text/plain; charset=utf-8"
    for text in (shown.text, lines.text):
        for word in (
            MODEL,
            "ready",
            "2,048 tokens",
            "0.1.0",
            "http://127.0.0.1:8321",
            CHAT,
            "/openapi.json",
            "README.md",
        ):
            assert word in text, word


async def test_the_page_contains_no_scripts_or_external_resources() -> None:
    response = await page(BROWSER)
    policy = response.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    (style,) = re.findall(r"<style>(.*?)</style>", response.text, re.DOTALL)
    assert base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() in policy
    assert not re.search(r"<script|\ssrc=|<link|style=|url\(|@import", response.text)
    assert "color-scheme: light dark" in style


async def test_the_shown_example_works() -> None:
    text = (await page({})).text
    words = shlex.split(
        text[text.index("curl") : text.index("\n\n", text.index("curl"))].replace("\\\n", " ")
    )
    headers = dict(word.split(": ", 1) for flag, word in itertools.pairwise(words) if flag == "-H")
    async with client_of(ScriptedGateway()) as client:
        answered = await client.post(
            words[1], headers=headers, content=words[words.index("-d") + 1]
        )
    assert answered.json()["choices"][0]["message"]["content"] == "Hello"
    assert json.loads(words[-1])["messages"]


async def test_without_the_key_models_are_hidden() -> None:
    for headers in (BROWSER, {}):
        locked = await page(headers, api_key="sesame")
        opened = await page({**headers, "x-api-key": "sesame"}, api_key="sesame")
        assert (locked.status_code, opened.status_code) == (200, 200)
        assert MODEL not in locked.text
        assert MODEL in opened.text
        assert "$HOLDFAST_SERVER_API_KEY" in locked.text
        assert "sesame" not in opened.text


@pytest.mark.parametrize(
    "host", ["localhost:8321", "192.168.1.5:8321", "[fe80::1]:80", "mac.local"]
)
async def test_the_address_is_the_one_the_client_used(host: str) -> None:
    shown = await page({"host": host}, host="0.0.0.0", allowed_hosts=("mac.local",))
    assert f"curl http://{host}/v1" in shown.text.replace("'", "")


async def test_a_foreign_host_is_misdirected_here_too() -> None:
    assert (await page({**BROWSER, "host": "evil.example"})).status_code == 421


async def test_names_are_escaped() -> None:
    directory = ScriptedDirectory(models=(model_status(id="<b>&x", state="loading", info=None),))
    shown = (await page(BROWSER, directory=directory)).text
    assert "&lt;b&gt;&amp;x" in shown
    assert "<b>" not in shown


async def test_a_server_without_models_says_so() -> None:
    assert "models\n  none\n" in (await page({}, directory=ScriptedDirectory(models=()))).text


@pytest.mark.parametrize(
    "headers",
    [
        {"user-agent": "ollama-python/0.6.3 (x86_64 linux) Python/3.11"},
        {"user-agent": "ollama/0.30.0 (arm64 darwin) Go/1.24"},
        # a browser extension
        {"user-agent": "Mozilla/5.0 (X11; Linux x86_64) Chrome/140.0", "accept": "*/*"},
    ],
)
async def test_ollamas_clients_get_their_expected_greeting(headers: dict[str, str]) -> None:
    assert (await page(headers)).text == "Ollama is running"
    as_a_page = await page({**headers, "accept": BROWSER["accept"]})
    assert as_a_page.text.startswith("<!doctype html>")


async def test_the_existence_of_a_server_needs_no_key() -> None:
    async with client_of(ScriptedGateway(), server=ServerSettings(api_key="sesame")) as client:
        response = await client.head("/")
    assert (response.status_code, response.text) == (200, "")
