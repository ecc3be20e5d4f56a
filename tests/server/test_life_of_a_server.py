from __future__ import annotations

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.fakes.command_line import holdfast, only_line
from tests.fakes.server_process import LIMIT_SECONDS, ServerProcess, until

LONG = {"model": "demo", "prompt": "once", "max_tokens": 5000, "extra_body": {"ignore_eos": True}}


@contextmanager
def shutting_down(folder: Path, *, seconds: float) -> Iterator[ServerProcess]:
    """A server that waits so long for its answers; the test ends it."""
    limit = f"server.shutdown_seconds={seconds}"
    server = ServerProcess(str(folder), "--name", "demo", "--set", limit)
    try:
        server.wait_ready()
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def long_stream(server: ServerProcess) -> openai.Stream[openai.types.Completion]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    return client.completions.create(**LONG, stream=True)  # type: ignore[call-overload,no-any-return]


def test_a_disconnect_stops_the_work(server: ServerProcess) -> None:
    stream = long_stream(server)
    next(iter(stream))
    # the worker's reports come after the first token: without this, the 0 could be from before it
    until(lambda: server.model()["running"] > 0, "the work is reported")
    stream.close()
    until(lambda: server.model()["running"] == 0, "the work has stopped")
    assert server.model()["running"] == 0


def test_the_front_process_does_not_load_mlx(server: ServerProcess, client: openai.OpenAI) -> None:
    client.completions.create(model="demo", prompt="one", max_tokens=1)
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("only Linux shows the libraries of a process")
    assert "libmlx" not in maps.read_text()
    assert "libmlx" in Path(f"/proc/{server.model()['pid']}/maps").read_text()


def has_ended(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_running_answers_and_uploads_are_cut_at_the_shutdown_limit(
    model_folder: Path,
) -> None:
    with shutting_down(model_folder, seconds=0.5) as server:
        stream = iter(long_stream(server))
        next(stream)
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address) as half, socket.create_connection(address) as silent:
            half.sendall(
                b"POST /v1/sessions/import HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
                b"9\r\n\r\nx"
            )
            silent.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert silent.recv(12) == b"HTTP/1.1 200"
            assert server.stop() == 0
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            list(stream)
        assert "2 answers cut off" in server.log()
        assert (
            "model_unavailable: the server stopped before the answer was complete" in server.log()
        )
        assert not re.search("ERROR|Traceback", server.log())


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_a_waiting_shutdown(
    model_folder: Path, number: signal.Signals
) -> None:
    with shutting_down(model_folder, seconds=60) as server:
        worker = psutil.Process(server.model()["pid"])
        streams = [iter(long_stream(server)) for _ in range(2)]
        for stream in streams:
            next(stream)
        server.process.send_signal(number)
        until(
            lambda: (
                "waiting for 2 answers, at most 60 s; press Ctrl-C again to exit now"
                in server.log()
            ),
            "it is said",
        )
        assert httpx.get(f"{server.url}/health", timeout=60).status_code == 503
        next(streams[0])  # they continue
        assert server.stop(number) == 0
        assert has_ended(worker)
        for stream in streams:
            with pytest.raises((openai.APIError, httpx.HTTPError)):
                list(stream)
        assert "2 answers cut off" in server.log()
        assert not re.search("ERROR|Traceback", server.log())


def test_an_answer_that_ends_in_time_is_completed_before_exit(
    model_folder: Path,
) -> None:
    with shutting_down(model_folder, seconds=60) as server:
        worker = psutil.Process(server.model()["pid"])
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        stream = iter(client.completions.create(**{**LONG, "max_tokens": 200}, stream=True))  # type: ignore[call-overload]
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        chunks = list(stream)
        assert chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(LIMIT_SECONDS) == 0  # after the first signal only
        assert has_ended(worker)
        assert not re.search("cut off|ERROR|Traceback", server.log())


def test_the_banner_shows_lan_addresses_and_the_missing_key(
    strict_server: ServerProcess,
) -> None:
    server = strict_server
    until(lambda: "curl" in server.output(), "everything is printed")
    assert server.url.startswith("http://127.0.0.1:")
    assert "no API key is set" in server.output()
    others = re.findall(r"for others\s+(http://\S+)", server.output())
    port = server.url.rpartition(":")[2]
    for url in [*others, server.url]:
        assert httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).status_code == 200
    assert all(url.endswith(f":{port}") for url in others)
    refused = httpx.get(
        f"{server.url}/v1/models", headers={"host": "box.local"}, trust_env=False, timeout=60
    )
    assert refused.status_code == 421
    assert "--allowed-hosts" in refused.json()["error"]["message"]


def test_a_truncated_model_is_one_line_and_exit_code_2(model_folder: Path, tmp_path: Path) -> None:
    for file in model_folder.iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(
            content[: len(content) // 2] if file.suffix == ".safetensors" else content
        )
    done = holdfast("serve", str(tmp_path), "--port", "0", cwd=tmp_path)
    assert done.returncode == 2
    assert "model.safetensors" in only_line(done.stderr)
