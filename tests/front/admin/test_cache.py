from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.config import LogSettings, ServerSettings
from holdfast.front.output import ChoiceFinished, DivergentTexts
from holdfast.front.request import GenerationRequest
from holdfast.front.server.access import KeyRing, named_key, write_keys
from holdfast.front.server.explanation import Explanation
from holdfast.front.server.misses import RecentMisses
from holdfast.front.telemetry.request_log import RequestRecord
from holdfast.wire.cache_map import CacheMap, CachePart, CacheTree
from holdfast.wire.events import CacheOutcome, CacheReport, Divergence, FinishReason
from tests.fakes.http_clients import client_of
from tests.fakes.scripted_gateway import MODEL, ScriptedControl, ScriptedGateway

CHAT = "/v1/chat/completions"
KEY, ALICE, ROOT = ({"x-api-key": key} for key in ("sesame", "alice", "root"))
PART = CachePart(
    tree=0,
    parent=None,
    start=0,
    tokens=8,
    blocks=1,
    bytes=64,
    live_tokens=8,
    ram_tokens=0,
    disk_tokens=0,
    saved_tokens=0,
    below_tokens=0,
    sessions=("s",),
    session_count=1,
)


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    """An ordinary key and an admin key."""
    named = [
        named_key(name, name, is_admin=name == "root", priority="interactive", max_requests=None)
        for name in ("alice", "root")
    ]
    write_keys(tmp_path / "keys.json", named)
    return KeyRing(str(tmp_path / "keys.json"))


def missed() -> ScriptedGateway:
    """A gateway whose prompts diverge from the cache at token 3 and lose further tokens."""
    end = ChoiceFinished(
        index=0,
        reason=FinishReason.STOP,
        prompt_tokens=407,
        completion_tokens=1,
        cache_report=CacheReport(
            outcome=CacheOutcome.DIVERGED,
            ram_tokens=3,
            unused_tokens=300,
            divergence=Divergence(position=3, stored_token_id=1, prompt_token_id=2),
        ),
        divergent=DivergentTexts(before="day is ", stored="Monday", prompt="Tuesday"),
    )
    return ScriptedGateway([end])


async def chat(client: httpx.AsyncClient, text: str, **more: Any) -> None:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    answer = await client.post(CHAT, json=body, **more)
    assert answer.status_code == 200, answer.text


async def test_the_parts_of_the_cache_are_shown_by_model() -> None:
    tree = CacheTree(is_own=True, form="native", adapter="", tokens=8)
    found = CacheMap(call_id="x", trees=(tree,), hidden_trees=3, parts=(PART,), blocks=1)
    control = ScriptedControl(maps={MODEL: found})
    async with client_of(ScriptedGateway(), control=control) as client:
        shown = (await client.get("/admin/cache")).json()
    (model,) = shown["models"]
    assert model["hidden_trees"] == 3
    assert (model["model"], model["blocks"], model["is_complete"]) == (MODEL, 1, True)
    assert model["parts"][0]["sessions"] == ["s"]
    assert (model["trees"][0]["kv_bits"], model["trees"][0]["tokens"]) == ("native", 8)
    assert control.questions[0].sees_all


@pytest.mark.parametrize("path", ["/admin/cache", "/admin/misses"])
async def test_a_model_that_is_not_served_is_unknown(path: str) -> None:
    async with client_of(missed()) as client:
        await chat(client, "The day is Monday.")
        assert (await client.get(path, params={"model": MODEL})).status_code == 200
        refused = await client.get(path, params={"model": "nope"})
    assert refused.status_code == 404
    assert "model 'nope' does not exist on this server" in refused.json()["error"]["message"]


async def test_ordinary_keys_ask_for_their_own_tenant_only(keys: KeyRing) -> None:
    control = ScriptedControl()
    async with client_of(ScriptedGateway(), control=control, keys=keys) as client:
        await client.get("/admin/cache", headers=ALICE)
        await client.get("/admin/cache", headers=ROOT)
    ordinary, admin = control.questions
    assert (ordinary.sees_all, admin.sees_all) == (False, True)
    assert ordinary.tenant != admin.tenant


async def test_strangers_without_keys_see_neither_cache_nor_misses() -> None:
    async with client_of(missed(), address="192.168.1.9") as client:
        await chat(client, "a secret")
        answers = [await client.get(path) for path in ("/admin/cache", "/admin/misses")]
    assert [answer.status_code for answer in answers] == [403, 403]


async def test_a_miss_is_explained_with_the_line_that_changed() -> None:
    async with client_of(missed()) as client:
        await chat(client, "The day is Monday.")
        await chat(client, "The day is Tuesday.")
        last, first = (await client.get("/admin/misses")).json()["misses"]
    assert last["change"] == {
        "kind": "changed",
        "summary": "Line 1 of message 1 (user) changed.",
        "place": "line 1 of message 1 (user)",
        "before": "",
        "cached": "The day is Monday.",
        "now": "The day is Tuesday.",
    }
    assert (last["prompt_tokens"], last["cached_tokens"], last["reason"]) == (407, 3, "diverged")
    assert last["difference"]["position"] == 3
    assert "Tuesday" in last["explanation"]
    assert last["shows_texts"]
    assert first["change"] is None


async def test_streamed_answers_are_noted_as_well() -> None:
    async with client_of(missed()) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": True}
        await client.post(CHAT, json=body)
        assert len((await client.get("/admin/misses")).json()["misses"]) == 1


async def test_the_texts_of_a_miss_are_shown_only_to_their_owner(keys: KeyRing) -> None:
    async with client_of(missed(), keys=keys) as client:
        for text in ("Monday's secret", "Tuesday's secret"):
            await chat(client, text, headers=ALICE)
        await chat(client, "mine", headers=ROOT)
        own = (await client.get("/admin/misses", headers=ALICE)).json()["misses"]
        salted = await client.get("/admin/misses?cache_salt=x", headers=ALICE)
        everything = await client.get("/admin/misses", headers=ROOT)
    assert len(own) == 2
    assert own[0]["change"]["now"] == "Tuesday's secret"
    for miss in (*salted.json()["misses"], *everything.json()["misses"][1:]):
        assert "secret" not in str(miss)
        assert "Tuesday" not in str(miss)
    shown = everything.json()["misses"]
    assert [miss["shows_texts"] for miss in shown] == [True, False, False]
    assert shown[1]["explanation"].endswith("at token 3.")


async def test_admins_see_the_texts_if_prompts_are_logged(keys: KeyRing) -> None:
    async with client_of(missed(), keys=keys, log=LogSettings(content=True)) as client:
        await chat(client, "a secret", headers=ALICE)
        (miss,) = (await client.get("/admin/misses", headers=ROOT)).json()["misses"]
    assert miss["shows_texts"]


@pytest.mark.parametrize("key", [KEY, ALICE])
async def test_tenants_of_one_key_do_not_see_each_others_texts(
    key: dict[str, str], keys: KeyRing
) -> None:
    tenant = {"x-holdfast-tenant": "a"}
    server = ServerSettings(api_key="sesame")
    async with client_of(missed(), server=server, keys=keys) as client:
        body = {"messages": [{"role": "user", "content": "a secret"}], "session_id": "diary"}
        await client.post(CHAT, json={"model": MODEL, **body}, headers={**key, **tenant})
        others = (await client.get("/admin/misses", headers=key)).json()["misses"]
        own = (await client.get("/admin/misses", headers={**key, **tenant})).json()["misses"]
    assert [miss["shows_texts"] for miss in (*others, *own)] == [False, True]
    names = ("session_id", "client", "path")
    assert [others[0][name] for name in names] == ["", "", ""]
    assert [own[0][name] for name in names] == ["diary", "127.0.0.1", CHAT]


async def test_admins_see_whose_misses_they_are(keys: KeyRing) -> None:
    async with client_of(missed(), keys=keys) as client:
        await chat(client, "a secret", headers=ALICE)
        (miss,) = (await client.get("/admin/misses", headers=ROOT)).json()["misses"]
    assert not miss["shows_texts"]
    assert (miss["client"], miss["path"]) == ("127.0.0.1", CHAT)


async def test_misses_are_noted_after_answers_off_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, may_end = threading.Event(), threading.Event()
    records: list[RequestRecord] = []
    note = RecentMisses.add_answer

    def slow(
        found: RecentMisses,
        request: GenerationRequest,
        explanation: Explanation,
        record: RequestRecord,
    ) -> None:
        records.append(record)
        begun.set()
        may_end.wait(60)
        note(found, request, explanation, record)

    monkeypatch.setattr(RecentMisses, "add_answer", slow)
    async with client_of(missed()) as client:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
        asked = asyncio.create_task(client.post(CHAT, json=body))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        active = (await client.get("/admin/requests")).json()["requests"]
        ended = records[0].ended  # the time of the log does not include the note
        may_end.set()
        await asked
        assert len((await client.get("/admin/misses")).json()["misses"]) == 1
    assert active == []
    assert ended is not None
    assert records[0].ended == ended
