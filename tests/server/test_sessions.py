"""Sessions of a real server, through OpenAI's client, HTTP and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click.testing
import httpx
import msgspec
import openai
import pytest

from holdfast.worker.prefix.chain import Branch, ChainBlock
from holdfast.worker.sessions.session_file import SessionFile, write_session
from tests.fakes.command_line import invoked
from tests.fakes.server_process import ServerProcess

STORY = (
    "The harbour master counted the boats twice before the storm, and wrote the number on the "
    "wall. " * 12
)


def complete(server: ServerProcess, prompt: str, *, tenant: str, session: str) -> Any:
    headers = {"X-Holdfast-Tenant": tenant, "X-Session-ID": session}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    response = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def ask(
    server: ServerProcess, method: str, path: str, *, tenant: str, status: int = 200, **more: Any
) -> Any:
    headers = {"X-Holdfast-Tenant": tenant}
    response = httpx.request(
        method, f"{server.url}/v1/sessions{path}", headers=headers, timeout=60, **more
    )
    assert response.status_code == status, response.text
    return response


def run(server: ServerProcess, *arguments: str, tenant: str, code: int = 0) -> click.testing.Result:
    result = invoked(["sessions", *arguments, "--url", server.url, "--tenant", tenant])
    assert result.exit_code == code, result.output
    return result


def shown(server: ServerProcess, *arguments: str, tenant: str) -> Any:
    return json.loads(run(server, *arguments, "--json", tenant=tenant).stdout)


def test_openais_client_can_name_its_session(
    server: ServerProcess,
) -> None:
    tenant = "sdk"
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", default_headers={"X-Holdfast-Tenant": tenant}
    ) as client:
        asks: dict[str, dict[str, Any]] = {
            "by header": {"extra_headers": {"X-Session-ID": "by header"}},
            "by field": {"extra_body": {"session_id": "by field"}},
            "by key": {"prompt_cache_key": "by key"},
        }
        for more in asks.values():
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": STORY}], max_tokens=4, **more
            )
    found = {
        session["id"]: session for session in ask(server, "GET", "", tenant=tenant).json()["data"]
    }
    assert set(found) == set(asks)
    assert all(
        session["requests"] == 1 and session["kept_tokens"] == session["tokens"] > 200
        for session in found.values()
    )


def test_a_session_grows_forks_and_closes(server: ServerProcess) -> None:
    tenant = "life"
    assert (
        ask(server, "POST", "", tenant=tenant, json={"id": "a", "metadata": {"who": "me"}}).json()[
            "tokens"
        ]
        == 0
    )
    ask(server, "POST", "", tenant=tenant, json={"id": "a"}, status=409)
    complete(server, STORY, tenant=tenant, session="a")
    first = ask(server, "GET", "/a", tenant=tenant).json()
    complete(server, STORY + "Then it rained.", tenant=tenant, session="a")
    grown = ask(server, "GET", "/a", tenant=tenant).json()
    assert (grown["requests"], grown["metadata"]) == (2, {"who": "me"})
    assert grown["tokens"] > first["tokens"]

    fork = ask(server, "POST", "/a/fork", tenant=tenant, json={"id": "b", "pinned": True}).json()
    assert (fork["tokens"], fork["forked_from"], fork["pin_state"]) == (
        grown["tokens"],
        "a",
        "kept",
    )
    ask(server, "GET", "/a", tenant="somebody else", status=404)
    assert ask(server, "DELETE", "/a?forget=true", tenant=tenant).json()["deleted"] is True
    ask(server, "GET", "/a", tenant=tenant, status=404)
    kept = ask(server, "GET", "/b", tenant=tenant).json()
    assert kept["kept_tokens"] == kept["tokens"] == grown["tokens"]  # the fork depends on it
    ask(server, "DELETE", "/b?forget=true", tenant=tenant)
    assert cached(complete(server, STORY, tenant=tenant, session="c")) == 0


def test_a_session_moves_between_servers_as_a_file(
    server: ServerProcess, strict_server: ServerProcess, tmp_path: Path
) -> None:
    other = strict_server
    before = complete(server, STORY, tenant="from", session="moving")
    file = tmp_path / "moving.session"
    assert "wrote" in run(server, "export", "moving", str(file), tenant="from").stdout
    assert (
        "already exists" in run(server, "export", "moving", str(file), tenant="from", code=2).stderr
    )
    came = shown(other, "import", str(file), "--id", "moved", tenant="to")
    assert (came["id"], came["kept_tokens"]) == ("moved", came["tokens"])
    assert "already" in run(other, "import", str(file), "--id", "moved", tenant="to", code=2).stderr
    after = complete(other, STORY, tenant="to", session="moved")
    assert cached(after) == after["usage"]["prompt_tokens"] - 1
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert cached(complete(other, STORY, tenant="nobody", session="x")) == 0

    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    refusal = ask(
        other, "POST", "/import?id=bad", tenant="to", content=bytes(content), status=400
    ).json()
    assert refusal["error"]["code"] == "session_file_damaged"
    assert ask(other, "POST", "/import?id=empty", tenant="to", content=b"", status=400).json()[
        "error"
    ]["code"]


def test_a_forged_file_is_refused_and_changes_no_other_session(
    server: ServerProcess, tmp_path: Path
) -> None:
    complete(server, STORY, tenant="owner", session="kept")
    (tmp_path / "whole").write_bytes(ask(server, "GET", "/kept/export", tenant="owner").content)
    file = SessionFile(tmp_path / "whole", most_tokens=10**6)
    manifest = file.manifest
    first = file.block(manifest.blocks[0][0])
    file.close()
    before = ask(server, "GET", "/kept", tenant="owner").json()
    own = first.block.tokens
    twice = Branch(
        blocks=tuple(ChainBlock(first.key, own, own * (number + 1)) for number in range(4000))
    )
    once = Branch(blocks=(ChainBlock(first.key, own, own),))
    forged = msgspec.structs.replace(first, parts=first.parts[:-1])
    for branch, content in ((twice, first), (once, forged)):
        write_session(
            tmp_path / "forged", msgspec.structs.replace(manifest, branches=(branch,)), [content]
        )
        body = (tmp_path / "forged").read_bytes()
        refusal = ask(
            server, "POST", "/import?id=forged", tenant="thief", content=body, status=400
        ).json()
        assert refusal["error"]["code"] == "session_file_damaged"
    assert ask(server, "GET", "", tenant="thief").json()["data"] == []
    assert ask(server, "GET", "/kept", tenant="owner").json() == before


def test_the_cli_opens_pins_forks_and_closes_sessions(server: ServerProcess) -> None:
    tenant = "cli"
    assert "no sessions" in run(server, "ls", tenant=tenant).stdout
    opened = shown(server, "open", "one two", "--ttl", "12h", tenant=tenant)
    assert opened["expires_at"] - opened["last_used_at"] == 12 * 3600
    complete(server, STORY, tenant=tenant, session="one two")
    assert "one two" in run(server, "ls", tenant=tenant).stdout
    assert "pinned       yes" in run(server, "pin", "one two", tenant=tenant).stdout
    assert "pinned" not in run(server, "unpin", "one two", tenant=tenant).stdout
    fork = shown(server, "fork", "one two", "--ttl", "never", tenant=tenant)
    assert (fork["forked_from"], fork["expires_at"]) == ("one two", None)
    assert [session["id"] for session in shown(server, "ls", tenant=tenant)] == [
        fork["id"],
        "one two",
    ]
    named = {"metadata": {"name": "the harbour"}}  # as on the page
    ask(server, "PATCH", "/one%20two", tenant=tenant, json=named)
    assert "the harbour" in run(server, "ls", tenant=tenant).stdout
    shown_one = run(server, "show", "one two", tenant=tenant).stdout
    assert "metadata     name=the harbour" in shown_one
    assert "forked from  one two" in run(server, "show", fork["id"], tenant=tenant).stdout
    assert "closed" in run(server, "close", fork["id"], "--forget", tenant=tenant).stdout
    assert "no session" in run(server, "show", fork["id"], tenant=tenant, code=2).stderr
    assert "--ttl" in run(server, "open", "x", "--ttl", "soon", tenant=tenant, code=2).stderr


def test_a_missing_server_is_named(tmp_path: Path) -> None:
    result = invoked(["sessions", "ls", "--url", "http://127.0.0.1:9"])
    assert result.exit_code == 2
    assert "no answer from http://127.0.0.1:9" in result.stderr


@pytest.mark.parametrize("forget", [True, False])
def test_a_session_can_be_closed_during_its_first_stream(
    server: ServerProcess, forget: bool
) -> None:
    tenant = f"closed in the middle, {forget}"
    headers = {"X-Holdfast-Tenant": tenant, "X-Session-ID": "gone"}
    body = {
        "messages": [{"role": "user", "content": STORY}],
        "max_tokens": 300,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    lines: list[str] = []
    with httpx.stream(
        "POST", f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=60
    ) as stream:
        assert stream.status_code == 200
        for line in stream.iter_lines():
            lines.append(line)
            if len(lines) == 5:
                query = "?forget=true" if forget else ""
                assert ask(server, "DELETE", f"/gone{query}", tenant=tenant).json()["deleted"]
    assert "data: [DONE]" in lines
    assert ask(server, "GET", "", tenant=tenant).json()["data"] == []
    ask(server, "GET", "/gone", tenant=tenant, status=404)
    again = httpx.post(
        f"{server.url}/v1/chat/completions",
        json=body | {"stream": False, "max_tokens": 2},
        headers={"X-Holdfast-Tenant": tenant},
        timeout=60,
    )
    assert (cached(again.json()) == 0) is forget
    assert ask(server, "GET", "", tenant=tenant).json()["data"] == []
