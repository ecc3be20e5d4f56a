from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from holdfast.config import ServerSettings
from holdfast.errors import ConfigError
from holdfast.front.application import create_application
from holdfast.front.server.http_server import HttpServer, listen, url_of
from tests.fakes.http_clients import CHAT, chat_body, events_of
from tests.fakes.scripted_gateway import ScriptedGateway, answer, scripted_services
from tests.fakes.slow import slow

ROOT = Path(__file__).parents[3]
PROGRAM = """
from holdfast.config import ServerSettings
from holdfast.front.application import create_application
from holdfast.front.server.http_server import HttpServer, listen, url_of
from tests.fakes.scripted_gateway import ScriptedGateway, scripted_services

settings = ServerSettings(port=0)
app = create_application(scripted_services(ScriptedGateway()))
with listen(settings) as listener:
    HttpServer(app, settings, on_started=lambda: print(url_of(listener), flush=True)).run(sockets=[listener])
print("stopped in order", flush=True)
"""


def test_a_free_port_is_found_and_named() -> None:
    with listen(ServerSettings(port=0)) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as refusal:
            listen(ServerSettings(port=port))
    assert (
        str(refusal.value)
        == f"port {port} on 127.0.0.1 is in use by another program; stop it or choose another port (--port)"
    )


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid", "a" * 300, "1.2.3.4.5"])
def test_a_foreign_address_is_one_clear_line(host: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        listen(ServerSettings(host=host, port=0))
    assert host in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("localhost", "127.0.0.1")])
def test_the_url_can_be_called(host: str, shown: str) -> None:
    with listen(ServerSettings(host=host, port=0)) as listener:
        assert url_of(listener).startswith((f"http://{shown}:", "http://[::1]:"))


@pytest.mark.parametrize("number", [*slow(signal.SIGINT), signal.SIGTERM])
def test_a_signal_stops_the_server_in_order(number: signal.Signals) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("http://127.0.0.1:")
        process.send_signal(number)
        assert process.stdout.readline() == "stopped in order\n"
        assert process.wait(timeout=60) == 0


async def test_during_shutdown_running_requests_finish_and_new_ones_are_refused() -> None:
    ends = asyncio.Event()
    gateway = ScriptedGateway(script=[*answer("Hel", "lo")[:1], ends, *answer("Hel", "lo")[1:]])
    settings = ServerSettings(port=0, shutdown_seconds=60)
    app = create_application(scripted_services(gateway, server=settings))
    with listen(settings) as listener:
        url, started = url_of(listener), asyncio.Event()
        running = HttpServer(app, settings, on_started=started.set)
        serving = asyncio.create_task(running.serve(sockets=[listener]))
        await started.wait()
        async with httpx.AsyncClient(base_url=url, trust_env=False) as client:
            assert (await client.get("/health")).status_code == 200
            async with client.stream("POST", CHAT, json=chat_body(stream=True)) as stream:
                running.should_exit = True
                while (health := await client.get("/health")).status_code == 200:
                    continue
                assert (health.json()["status"], health.headers["connection"]) == (
                    "stopping",
                    "close",
                )
                refused = await client.post(CHAT, json=chat_body())
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    503,
                    "server_stopping",
                )
                assert int(refused.headers["retry-after"]) > 1
                assert refused.headers["connection"] == "close"
                assert len(gateway.requests) == 1
                ends.set()
                text = (await stream.aread()).decode()
        await serving
    assert events_of(text)[-1] == "[DONE]"
    assert "Hel" in text
