"""A server from its operator's view: found, watched, reloaded and ended, alone and by signals to
its whole group.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest
from typer.testing import Result

from tests.fakes.command_line import invoked, only_line
from tests.fakes.server_process import LIMIT_SECONDS, ServerProcess, until

SETTINGS = '[log]\nlevel = "{level}"\nfile = "auto"\n[server]\nshutdown_seconds = 60\n[store]\nfolder = "{store}"\n'


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Separate caches, state and settings, so that servers of other tests are not seen."""
    for name in ("CACHE", "STATE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.delenv("HOLDFAST_STORE_FOLDER")
    monkeypatch.chdir(tmp_path)
    write_settings(tmp_path, level="info")
    return tmp_path


@pytest.fixture
def started(folders: Path, model_folder: Path) -> Iterator[ServerProcess]:
    server = start(folders, model_folder)
    yield server
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait()


def start(folders: Path, model_folder: Path) -> ServerProcess:
    arguments = (str(model_folder), "--name", "demo", "--config", str(folders / "holdfast.toml"))
    server = ServerProcess(*arguments, start_new_session=True)
    server.wait_ready()
    return server


def command(*arguments: str) -> Result:
    return invoked(arguments)


def write_settings(folders: Path, *, level: str) -> None:
    (folders / "holdfast.toml").write_text(SETTINGS.format(level=level, store=folders / "store"))


def streamed(
    server: ServerProcess, *, session: str, tokens: int
) -> Iterator[openai.types.Completion]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    headers = {"X-Session-ID": session}
    stream = client.completions.create(
        model="demo",
        prompt=f"{session} said: once",
        max_tokens=tokens,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers=headers,
    )
    return iter(stream)


def text_of(chunks: Iterator[openai.types.Completion]) -> tuple[str, str | None]:
    """The rest of a stream's text, and its end."""
    texts, reason = [], None
    for chunk in chunks:
        texts.append(chunk.choices[0].text)
        reason = chunk.choices[0].finish_reason or reason
    return "".join(texts), reason


@pytest.mark.slow
def test_an_operator_finds_watches_reloads_and_stops_a_server(
    started: ServerProcess, folders: Path
) -> None:
    (seen,) = json.loads(command("ps", "--json").stdout)
    assert (seen["pid"], seen["url"], seen["state"]) == (started.process.pid, started.url, "ok")
    (model,) = seen["models"]
    assert (model["id"], model["state"], model["pid"]) == ("demo", "ready", started.model()["pid"])
    assert min(model["memory_bytes"], seen["memory_bytes"]) > 10e6
    assert model["written_today_bytes"] == 0
    assert text_of(streamed(started, session="first", tokens=600))[1] == "length"
    until(
        lambda: (
            json.loads(command("ps", "--json").stdout)[0]["models"][0]["written_today_bytes"] > 0
        ),
        "what is read is written",
    )
    assert re.search(r"written today\n.*http://127.*[KM]iB\n", command("ps").stdout)
    write_settings(folders, level="debug")
    started.process.send_signal(signal.SIGHUP)
    until(
        lambda: "the log level is debug; it was info" in started.log(),
        "the settings are read again",
    )
    until(
        lambda: "the log level of this worker is now debug" in started.log(),
        "its worker is told as well",
    )
    stream = streamed(started, session="s", tokens=300)
    next(stream)
    stopping = command("stop", str(started.process.pid))
    assert stopping.exit_code == 0, stopping.stderr
    assert stopping.stdout.splitlines()[-1] == f"stopped {started.url} (pid {started.process.pid})"
    assert text_of(stream)[1] == "length"
    assert started.process.wait(LIMIT_SECONDS) == 0
    logged = command("logs", "-n", "1000").stdout
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO .*ready in .* at http://127", logged)
    assert "POST /v1/completions 200 demo" in logged
    assert command("ps").stdout == "no server of yours is running on this machine\n"
    assert "no server of yours" in only_line(command("stop").stderr)


@pytest.mark.slow
def test_a_group_signal_cuts_no_stream(
    started: ServerProcess, folders: Path, model_folder: Path
) -> None:
    streams = {
        f"session-{number}": streamed(started, session=f"session-{number}", tokens=200)
        for number in range(4)
    }
    for stream in streams.values():
        next(stream)
    worker = psutil.Process(started.model()["pid"])
    os.killpg(started.process.pid, signal.SIGTERM)
    assert {reason for _, reason in map(text_of, streams.values())} == {"length"}
    assert started.process.wait(LIMIT_SECONDS) == 0
    assert not worker.is_running()
    assert "cut off" not in started.log()
    assert not re.search("ERROR|Traceback", started.log())

    again = start(folders, model_folder)
    try:
        client = openai.OpenAI(base_url=f"{again.url}/v1", api_key="none", max_retries=0)
        sessions = json.loads(command("sessions", "ls", "--json").stdout)
        kept = {session["id"]: session["disk_tokens"] for session in sessions}
        assert kept.keys() == streams.keys()
        assert min(kept.values()) >= 200
        (found,) = (
            client.completions.with_raw_response.create(
                model="demo",
                prompt="session-2 said: once",
                max_tokens=1,
                extra_headers={"X-Session-ID": "session-2"},
            ).parse(),
        )
        assert found.usage is not None
        assert found.usage.prompt_tokens_details is not None
        assert found.usage.prompt_tokens_details.cached_tokens == found.usage.prompt_tokens - 1
    finally:
        assert again.stop() == 0
