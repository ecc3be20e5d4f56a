"""Ollama's official client with a real server and the bundled model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import ollama
import openai
import pytest

from holdfast.models.download import demo_folder
from tests.fakes.hub import running_hub
from tests.fakes.server_process import ServerProcess

MODEL = "demo"
KELP = "coast/kelp-small"
HELLO = [{"role": "user", "content": "Hello"}]
GREEDY = {"temperature": 0, "num_predict": 60}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def get_weather(city: str) -> str:
    """Get the weather of a city.

    Args:
        city: The city.
    """
    return "18 degrees and clear" if city == "Oslo" else "unknown"


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url)
    yield client
    client._client.close()


def test_the_client_finds_the_server_and_its_model(
    client: ollama.Client, server: ServerProcess
) -> None:
    (listed,) = client.list().models
    (running,) = client.ps().models
    assert listed.model == running.model == f"{MODEL}:latest"
    assert set(client.show(MODEL).capabilities or ()) >= {"completion", "tools", "thinking"}
    assert (
        httpx.get(server.url, headers={"user-agent": "ollama-python/0.6.3"}, timeout=60).text
        == "Ollama is running"
    )


def test_streamed_and_whole_answers_are_equal(client: ollama.Client) -> None:
    whole = client.chat(f"{MODEL}:latest", HELLO, options=GREEDY)
    lines = list(client.chat(MODEL, HELLO, options=GREEDY, stream=True))
    assert whole.message.content
    assert "".join(line.message.content or "" for line in lines) == whole.message.content
    assert (lines[-1].done_reason, lines[-1].eval_count) == (whole.done_reason, whole.eval_count)
    said = client.generate(MODEL, "Hello", options=GREEDY)
    assert said.response == whole.message.content
    assert (
        (said.total_duration or 0)
        >= (said.prompt_eval_duration or 0) + (said.eval_duration or 0)
        > 0
    )


def test_a_tool_call_and_its_result_are_exchanged(client: ollama.Client) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
    called = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY).message
    assert called.tool_calls is not None
    (call,) = called.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Oslo"})
    result = get_weather(**call.function.arguments)
    messages += [called, {"role": "tool", "tool_name": call.function.name, "content": result}]
    final = client.chat(MODEL, messages, tools=[get_weather], options=GREEDY, stream=True)
    assert "18 degrees" in "".join(line.message.content or "" for line in final)


def test_the_next_turn_prefills_only_new_text(client: ollama.Client, server: ServerProcess) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "What is 21 + 34, as seen by a client of Ollama?"}
    ]
    first = client.chat(MODEL, messages, think=True, options=GREEDY)
    messages += [first.message, {"role": "user", "content": "Hello"}]
    body = {
        "model": MODEL,
        "messages": [
            message if isinstance(message, dict) else message.model_dump() for message in messages
        ],
    }
    second = httpx.post(
        f"{server.url}/api/chat", json={**body, "stream": False, "options": GREEDY}, timeout=60
    ).json()
    assert first.prompt_eval_count is not None
    assert second["cached_tokens"] >= first.prompt_eval_count - 1
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as others:
        usage = others.chat.completions.create(
            model=MODEL, messages=messages[:1], max_tokens=1
        ).usage
    assert usage is not None
    assert usage.prompt_tokens == first.prompt_eval_count


def test_continuing_from_a_context_prefills_only_new_text(
    client: ollama.Client, server: ServerProcess
) -> None:
    first = client.generate(MODEL, "What is 33 + 44, says a generated prompt?", options=GREEDY)
    body = {
        "model": MODEL,
        "prompt": "Hello",
        "context": first.context,
        "stream": False,
        "options": GREEDY,
    }
    second = httpx.post(f"{server.url}/api/generate", json=body, timeout=60).json()
    assert first.prompt_eval_count is not None
    assert second["prompt_eval_count"] > first.prompt_eval_count
    assert second["cached_tokens"] >= first.prompt_eval_count - 1


def test_texts_are_embedded(client: ollama.Client) -> None:
    found = client.embed(MODEL, ["one", "another"], dimensions=8)
    older = client.embeddings(MODEL, "one")
    assert [len(vector) for vector in found.embeddings] == [8, 8]
    assert sum(number * number for number in older.embedding) == pytest.approx(1, abs=1e-3)


def test_thinking_is_separate_from_the_answer(client: ollama.Client) -> None:
    sum_of = [{"role": "user", "content": "What is 12 + 30?"}]
    thought = client.chat(MODEL, sum_of, think=True, options=GREEDY).message
    plain = client.chat(MODEL, sum_of, think=False, options=GREEDY).message
    assert (bool(thought.thinking), bool(plain.thinking)) == (True, False)
    assert "42" in (thought.content or "")
    assert "<think>" not in f"{thought.content}{plain.content}"


@pytest.mark.slow
@pytest.mark.parametrize("think", [True, False, None])
@pytest.mark.parametrize("stream", [True, False])
def test_a_format_is_followed_in_every_thinking_mode(
    client: ollama.Client, think: Any, stream: bool
) -> None:
    for form in (PERSON, "json"):
        answer: Any = client.chat(
            MODEL,
            [{"role": "user", "content": "What is 12 + 30?"}],
            format=form,
            think=think,
            stream=stream,
            options={"temperature": 0, "num_predict": 400},
        )
        parts = list(answer) if stream else [answer]
        text = "".join(part.message.content or "" for part in parts)
        if parts[-1].done_reason == "stop":
            jsonschema.validate(json.loads(text), PERSON if form is PERSON else {"type": "object"})
        assert text.lstrip().startswith("{")
        assert "<think>" not in text


def test_errors_have_ollamas_messages(client: ollama.Client) -> None:
    with pytest.raises(
        ollama.ResponseError, match='model "nobody" not found, try pulling it first'
    ) as missing:
        client.chat("nobody", HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="maximum context length"):
        list(client.chat(MODEL, [{"role": "user", "content": "word " * 40_000}], stream=True))


def test_models_can_be_loaded_and_released(client: ollama.Client) -> None:
    assert client.chat(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert next(iter(client.generate(MODEL, stream=True))).done_reason == "load"
    assert client.ps().models


@pytest.mark.slow
def test_models_are_pulled_used_and_deleted_without_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {file.name: file.read_bytes() for file in demo_folder().iterdir() if file.is_file()}
    (tmp_path / "models.toml").write_text(f"[models.first]\npath = '{demo_folder()}'\n")
    with running_hub() as hub:
        hub.repositories[KELP], hub.lfs_files = files, {"model.safetensors"}
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HOLDFAST_CATALOG_HUB_CACHE", "true")
        server = ServerProcess("--models", str(tmp_path / "models.toml"))
        try:
            server.wait_ready()
            client = ollama.Client(host=server.url)
            told = list(client.pull(f"hf.co/{KELP}", stream=True))
            assert told[-1].status == "success"
            *_, last = [progress for progress in told if progress.digest]
            assert last.completed == last.total
            assert (last.total or 0) > len(files["model.safetensors"])
            assert [model.model for model in client.list().models] == [
                "first:latest",
                f"{KELP}:latest",
            ]
            assert client.chat(KELP, HELLO, options=GREEDY).message.content
            with pytest.raises(ollama.ResponseError, match="is not in the Hub's cache"):
                client.delete("first")
            assert client.delete(KELP).status == "success"  # it was already loaded
            assert [model.model for model in client.list().models] == ["first:latest"]
            with pytest.raises(ollama.ResponseError, match="not found, try pulling it first"):
                client.chat(KELP, HELLO)
            with pytest.raises(ollama.ResponseError, match="no model coast/none on the Hub"):
                client.pull("coast/none")
            client._client.close()
        finally:
            assert server.stop() == 0, server.log()
