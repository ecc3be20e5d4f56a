"""Official clients send images to a real server with a tiny random vision model."""

from __future__ import annotations

import base64
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import psutil
import pytest

from holdfast.files import caches_folder
from tests.fakes.images import data_url, png
from tests.fakes.server_process import ServerProcess, children_running, running_server, until
from tests.fakes.slow import slow
from tests.fakes.vision_models import write_vision_model

CAT, DOG = png(1, size=(64, 48)), png(2, size=(48, 64))
MODEL = "seeing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_model(tmp_path_factory.mktemp("model") / MODEL, "qwen2_5_vl")


@pytest.fixture(scope="module")
def seeing(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    store = tmp_path_factory.mktemp("seeing") / "store"
    with running_server(str(folder), "--store", str(store)) as server:
        yield server
        readers = image_processes(server)
        assert readers, "no image was sent"
    assert not [each for each in readers if each.is_running()]


def image_processes(server: ServerProcess) -> list[psutil.Process]:
    """The processes that decode images."""
    return children_running("image_worker", psutil.Process(server.model()["pid"]))


def image(data: bytes) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def user(*parts: Any) -> Any:
    texts = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": texts}


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def asked(url: str, *messages: Any, tenant: str = "") -> Any:
    """A greedy answer of OpenAI's client: its text and its usage."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=list(messages),
            max_tokens=8,
            temperature=0,
            extra_body={"cache_salt": tenant} if tenant else {},
        )
    return answer.choices[0].message.content, answer.usage


def cached(usage: Any) -> int:
    return int(usage.prompt_tokens_details.cached_tokens)


def test_openais_client_sends_images_that_are_prefilled_once(
    seeing: ServerProcess,
) -> None:
    first = user("What is this?", image(CAT))
    text, usage = asked(seeing.url, first, tenant="openai")
    assert cached(usage) == 0
    again, repeated = asked(seeing.url, first, tenant="openai")
    assert again == text
    assert cached(repeated) == repeated.prompt_tokens - 1
    without_tenant, same = asked(seeing.url, first)
    assert (without_tenant, same.prompt_tokens) == (text, usage.prompt_tokens)
    second = (first, {"role": "assistant", "content": text}, user("And this?", image(DOG)))
    _, later = asked(seeing.url, *second, tenant="openai")
    assert cached(later) >= usage.prompt_tokens
    other, elsewhere = asked(seeing.url, user("What is this?", image(DOG)), tenant="openai")
    assert cached(elsewhere) < usage.prompt_tokens - 10
    assert other != text


def test_openais_client_streams_and_uses_responses_with_images(seeing: ServerProcess) -> None:
    expected, _ = asked(seeing.url, user("What is this?", image(CAT)))
    with openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client:
        chunks = client.chat.completions.create(
            model=MODEL,
            messages=[user("What is this?", image(CAT))],
            max_tokens=8,
            temperature=0,
            stream=True,
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        parts: Any = [
            {"type": "input_text", "text": "What is this?"},
            {"type": "input_image", "image_url": data_url(CAT), "detail": "auto"},
        ]
        first = client.responses.create(
            model=MODEL,
            input=[{"role": "user", "content": parts}],
            max_output_tokens=8,
            temperature=0,
        )
        second = client.responses.create(
            model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=8
        )
    assert text == first.output_text == expected
    assert second.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens  # type: ignore[union-attr]


def test_anthropics_client_sends_and_counts_images(seeing: ServerProcess) -> None:
    expected, usage = asked(seeing.url, user("What is this?", image(CAT)))
    source = {
        "type": "base64",
        "media_type": "image/png",
        "data": base64.b64encode(CAT).decode(),
    }
    content: Any = [
        {"type": "text", "text": "What is this?"},
        {"type": "image", "source": source},
    ]
    messages: Any = [{"role": "user", "content": content}]
    with anthropic.Anthropic(base_url=seeing.url, api_key="none", max_retries=0) as client:
        counted = client.messages.count_tokens(model=MODEL, messages=messages)
        answer = client.messages.create(
            model=MODEL, max_tokens=8, messages=messages, extra_body={"temperature": 0}
        )
    assert counted.input_tokens == usage.prompt_tokens
    assert [block.text for block in answer.content if block.type == "text"] == [expected]


def test_ollamas_client_sees_the_vision_capability_and_sends_images(seeing: ServerProcess) -> None:
    expected, usage = asked(seeing.url, user(image(CAT), "What is this?"))
    client = ollama.Client(host=seeing.url)
    options = {"temperature": 0, "num_predict": 8}
    chatted = client.chat(
        MODEL,
        [{"role": "user", "content": "What is this?", "images": [CAT]}],
        options=options,
    )
    generated = client.generate(MODEL, "What is this?", images=[CAT], options=options)
    shown = client.show(MODEL)
    client._client.close()
    assert chatted.message.content == generated.response == expected
    assert chatted.prompt_eval_count == usage.prompt_tokens
    assert "vision" in (shown.capabilities or ())


def test_a_broken_image_raises_each_clients_own_error(seeing: ServerProcess) -> None:
    broken = CAT[:100]
    with (
        openai.OpenAI(base_url=f"{seeing.url}/v1", api_key="none", max_retries=0) as client,
        pytest.raises(openai.BadRequestError, match="damaged") as refused,
    ):
        client.chat.completions.create(model=MODEL, messages=[user("?", image(broken))])
    assert refused.value.param == "messages.0.content.1.image_url"
    local = ollama.Client(host=seeing.url)
    with pytest.raises(ollama.ResponseError, match=r"messages\.0\.images\.0.*damaged"):
        local.chat(MODEL, [{"role": "user", "content": "?", "images": [broken]}])
    local._client.close()


def test_a_later_turn_after_a_broken_image_is_answered(seeing: ServerProcess) -> None:
    answer = {"role": "assistant", "content": "hm"}
    texts = [
        asked(seeing.url, user("?", part), answer, user("And now?"))
        for part in (image(CAT[:100]), "[image left out: it cannot be read]")
    ]
    assert texts[0][0] == texts[1][0]


@pytest.mark.parametrize("number", [signal.SIGKILL, *slow(signal.SIGTERM)])
def test_a_crashed_image_process_fails_no_request(
    number: signal.Signals, seeing: ServerProcess
) -> None:
    asked(seeing.url, user("What?", image(png(100 + number))))
    (before,) = image_processes(seeing)
    before.send_signal(number)
    asked(seeing.url, user("What?", image(png(200 + number))))
    (after,) = image_processes(seeing)
    assert after.pid != before.pid


def test_the_server_reports_vision_support(seeing: ServerProcess) -> None:
    (card,) = httpx.get(f"{seeing.url}/v1/models", timeout=60).json()["data"]
    assert card["architecture"]["input_modalities"] == ["text", "image"]
    assert seeing.model()["vision"]["refused"] is None


@pytest.mark.slow
def test_an_image_and_its_kv_survive_a_restart(folder: Path, tmp_path: Path) -> None:
    arguments = (str(folder), "--store", str(tmp_path / "store"))
    question = user("What is this?", image(CAT))
    with running_server(*arguments) as server:
        text, usage = asked(server.url, question)
    (kept,) = files(tmp_path / "store" / "images")
    assert kept.read_bytes() == CAT
    kept.write_bytes(DOG)  # damaged while no server runs
    with running_server(*arguments) as server:
        again, restored = asked(server.url, question)
        assert again == text
        assert cached(restored) >= usage.prompt_tokens - 2
        assert kept.read_bytes() == CAT


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["front", "worker"])
def test_image_processes_end_when_their_parent_is_killed(
    folder: Path, tmp_path: Path, victim: str
) -> None:
    server = ServerProcess(str(folder), "--store", str(tmp_path / "store"))
    try:
        server.wait_ready()
        asked(server.url, user("What?", image(CAT)))
        (reader,) = image_processes(server)
        assert reader.is_running()
        os.kill(server.process.pid if victim == "front" else server.model()["pid"], signal.SIGKILL)
        until(lambda: not reader.is_running(), "the image process to end")
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.slow
def test_an_answer_about_an_image_survives_its_worker(folder: Path, tmp_path: Path) -> None:
    options: Any = {
        "model": MODEL,
        "messages": [user("What is this?", image(CAT))],
        "max_tokens": 400,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "holdfast": {"explain": True}},
    }
    with (
        running_server(str(folder), "--store", str(tmp_path / "store")) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        expected = client.chat.completions.create(**options).choices[0].message.content
        texts = []
        resumed = 0
        for chunk in client.chat.completions.create(stream=True, **options):
            texts += [choice.delta.content or "" for choice in chunk.choices]
            explained = (chunk.model_extra or {}).get("holdfast")
            resumed = explained["resumed"] if explained else resumed
            if len(texts) == 20:
                os.kill(server.model()["pid"], signal.SIGKILL)
        assert "".join(texts) == expected
        assert resumed == 1
        until(lambda: server.model()["state"] == "ready", "a new worker")


@pytest.mark.slow
def test_without_a_store_images_are_deleted_with_the_server(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "holdfast").mkdir()
    kernels = caches_folder(os.environ) / "kernels"  # compiling them would take too long
    (tmp_path / "holdfast" / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with running_server(str(folder), "--store", "off") as server:
            asked(server.url, user("What is this?", image(CAT)))
            (images,) = tmp_path.rglob("images")
            assert [path.read_bytes() for path in files(images)] == [CAT]
        assert not list(tmp_path.rglob("images"))
