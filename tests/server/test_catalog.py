"""A server with a file of several models."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.models.download import demo_folder
from tests.fakes.server_process import ServerProcess, until

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Tell me something about the sea."}]


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"messages": QUESTION, "max_tokens": 24, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def text(server: ServerProcess, **fields: Any) -> str:
    answer = ask(server, **fields).json()["choices"][0]["message"]["content"]
    assert isinstance(answer, str)
    return answer


def test_catalog_models_are_served_and_bad_entries_skipped(
    tmp_path: Path,
) -> None:
    (tmp_path / "models.toml").write_text(
        f"[models.free]\npath = '{demo_folder()}'\nsampling = {{ temperature = 2.0 }}\n"
        f"[models.greedy]\npath = '{demo_folder()}'\naliases = ['gpt-4o']\nsampling = {{ "
        "temperature = 0.0 }\n"
        f"[models.wrong]\npath = '{demo_folder()}'\ncontxt = 3\n[models.gone]\npath = 'none'\n"
    )
    server = ServerProcess("--models", str(tmp_path / "models.toml"))
    try:
        server.wait_ready()
        assert "model wrong is left out" in server.log()
        assert "unknown key contxt; did you mean context?" in server.log()
        assert "model gone is left out" in server.log()
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(card["id"], card["state"]) for card in listed] == [
            ("free", "unloaded"),
            ("greedy", "unloaded"),
        ]
        answer = ask(server, model="gpt-4o").json()
        assert answer["model"] == "greedy"
        greedy = answer["choices"][0]["message"]["content"]
        assert text(server, model="greedy") == text(server, model="free", temperature=0) == greedy
        assert len({text(server, model="free", seed=seed) for seed in range(3)}) > 1
        unknown = ask(server, model="gready")
        assert (
            unknown.status_code,
            "did you mean greedy?" in unknown.json()["error"]["message"],
        ) == (404, True)
    finally:
        server.stop()


def test_sighup_reloads_the_catalog_and_ignores_a_broken_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "models.toml"
    table = "[models.{name}]\nid = 'holdfast-demo'\n{more}\n"
    file.write_text(
        table.format(name="first", more="")
        + table.format(name="second", more="aliases = ['other']")
    )
    server = ServerProcess("--models", str(file))

    def hang_up(told: str) -> None:
        server.process.send_signal(signal.SIGHUP)
        until(lambda: told in server.log(), told)

    def listed() -> dict[str, str]:
        cards = httpx.get(f"{server.url}/v1/models").json()["data"]
        return {card["id"]: card["state"] for card in cards}

    try:
        server.wait_ready()
        greedy = text(server, model="other", temperature=0)
        assert ask(server, model="first").status_code == 200
        body = {
            "model": "first",
            "prompt": "Once",
            "max_tokens": 2000,
            "stream": True,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            changed = table.format(
                name="second", more="aliases = ['gpt-4o']\nsampling = { temperature = 0.0 }"
            )
            file.write_text(
                changed
                + table.format(name="third", more="")
                + table.format(name="wrong", more="contxt = 1")
            )
            hang_up(
                "the catalog is reloaded: added: third; removed: first; changed, effective at "
                "the next load: second; left out: wr"
            )
            assert list(listed()) == ["second", "third"]
            assert (
                ask(server, model="first").status_code,
                ask(server, model="other").status_code,
            ) == (404, 404)
            assert ask(server, model="third").json()["model"] == "third"
            events = [line for line in lines if line.startswith("data: {")]
        assert '"finish_reason":"length"' in events[-1] or '"finish_reason":"length"' in events[-2]
        until(
            lambda: "model first is unloaded" in server.log(),
            "it is unloaded as soon as nobody uses it",
        )
        assert httpx.post(f"{server.url}/admin/models/second/unload", timeout=60).status_code == 200
        assert {text(server, model="gpt-4o", seed=seed) for seed in range(3)} == {greedy}
        file.write_text("[models.second\n")
        hang_up("the catalog is not reloaded: ")
        assert list(listed()) == ["second", "third"]
        assert ask(server).json()["model"] == "second"
    finally:
        server.stop()
