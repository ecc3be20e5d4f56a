"""Any JSON on any of Ollama's paths gets an answer in its form, never an internal error."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.front.application import create_application
from tests.fakes.ollama_bodies import CHAT, GENERATE, HELLO, WEATHER, directory_of
from tests.fakes.scripted_gateway import MODEL, ScriptedGateway, answer, scripted_services

PATHS = (CHAT, GENERATE, "/api/embed", "/api/embeddings", "/api/show", "/api/pull")
NEEDED: dict[str, Any] = {"model": MODEL, "messages": HELLO, "prompt": "hi", "input": "hi"}
FIELDS = (
    "model name messages prompt input stream format options think tools keep_alive raw system "
    "suffix template context images "
    "logprobs top_logprobs truncate shift dimensions holdfast"
).split()
KEYS = (
    "role content images tool_calls tool_name thinking function name arguments type num_predict "
    "temperature top_k seed stop "
    "repeat_penalty repeat_last_n num_ctx explain"
).split()
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from([MODEL, "user", "tool", "json", "5m", "high", 40.0, -1, "\ud83d"])
)
values = st.recursive(
    scalars | st.just([WEATHER]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=10,
)
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=5)
APP = create_application(
    scripted_services(ScriptedGateway(script=answer("x")), directory=directory_of())
)


@settings(max_examples=30)
@given(path=st.sampled_from(PATHS), body=bodies | values, valid=st.booleans())
async def test_arbitrary_json_causes_no_internal_error(path: str, body: Any, valid: bool) -> None:
    if valid and isinstance(body, dict):
        body = NEEDED | body
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(APP), base_url="http://localhost"
    ) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404, 422), response.text
    for line in response.text.splitlines():
        assert isinstance(json.loads(line), dict)
    if response.status_code != 200:
        assert list(response.json()) == ["error", "advice"]
