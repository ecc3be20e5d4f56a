"""A server of several models, started with a file of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.models.demo import demo_folder
from tests.fakes.server_process import ServerProcess

pytestmark = pytest.mark.slow

QUESTION = [{"role": "user", "content": "Tell me something about the sea."}]


def ask(server: ServerProcess, **fields: Any) -> httpx.Response:
    body = {"messages": QUESTION, "max_tokens": 24, **fields}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)


def text(server: ServerProcess, **fields: Any) -> str:
    answer = ask(server, **fields).json()["choices"][0]["message"]["content"]
    assert isinstance(answer, str)
    return answer


def test_models_answer_by_name_and_alias_each_with_its_own_defaults_and_what_is_wrong_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "models.toml").write_text(
        f"[models.free]\npath = '{demo_folder()}'\nsampling = {{ temperature = 2.0 }}\n"
        f"[models.greedy]\npath = '{demo_folder()}'\naliases = ['gpt-4o']\nsampling = {{ temperature = 0.0 }}\n"
        f"[models.wrong]\npath = '{demo_folder()}'\ncontxt = 3\n[models.gone]\npath = 'none'\n"
    )
    server = ServerProcess("--models", str(tmp_path / "models.toml"))
    try:
        server.wait_ready()
        assert "model wrong is left out" in server.log()
        assert "unknown key contxt; did you mean context?" in server.log()
        assert "model gone is left out" in server.log()
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(card["id"], card["state"]) for card in listed] == [("free", "unloaded"), ("greedy", "unloaded")]
        answer = ask(server, model="gpt-4o").json()
        assert answer["model"] == "greedy"
        greedy = answer["choices"][0]["message"]["content"]
        assert text(server, model="greedy") == text(server, model="free", temperature=0) == greedy
        assert len({text(server, model="free", seed=seed) for seed in range(3)}) > 1
        unknown = ask(server, model="gready")
        assert (unknown.status_code, "did you mean greedy?" in unknown.json()["error"]["message"]) == (404, True)
    finally:
        server.stop()
