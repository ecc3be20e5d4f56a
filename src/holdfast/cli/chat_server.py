"""The server process that `holdfast chat` starts for itself and ends again."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO

from holdfast.cli.server_client import ServerClient, ServerFailed, json_object
from holdfast.config import EffectiveSettings, shown_value

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 15.0
_OF_ITS_OWN = (
    "server.host",
    "server.port",
    "server.api_key",
    "server.tls_cert",
    "server.tls_key",
    "log.level",
)


@contextlib.contextmanager
def own_server(
    effective: EffectiveSettings, *, on_state: Callable[[str], None]
) -> Iterator[ServerClient]:
    """A server with these settings on a free loopback port, with a key of its own, for as long as
    the context lasts.

    on_state: called with what the server is doing until it is ready. Raises ServerFailed when it
    ends before that.
    """
    port, key = _free_port(), secrets.token_urlsafe(24)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
    } | {"HOLDFAST_SERVER_API_KEY": key}
    with tempfile.TemporaryFile() as log:
        # a session of its own: Ctrl-C in the terminal is for the answer, not for the server
        server = subprocess.Popen(
            _arguments(effective, port),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environ,
            start_new_session=True,
        )
        client = ServerClient(url=f"http://127.0.0.1:{port}", api_key=key, use_proxies=False)
        try:
            _await_ready(
                client,
                server,
                log,
                limit_seconds=effective.settings.model.startup_seconds,
                on_state=on_state,
            )
            yield client
        finally:
            client.close()
            _end(server)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _arguments(effective: EffectiveSettings, port: int) -> list[str]:
    """The command that starts the server.

    It sees the settings in force here and no other file or variable.
    """
    arguments = [
        sys.executable,
        "-P",
        "-m",
        "holdfast.cli.main",
        "serve",
        "--config",
        os.devnull,
        "--until-stdin-closes",
    ]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    level = "error" if effective.origins["log.level"] == "default" else effective.settings.log.level
    arguments += ["--log-level", level]
    if effective.origins["log.file"] == "default":
        # it goes to a temporary file, from which its last words are told
        arguments += ["--log-file", "off"]
    if effective.origins["store.folder"] == "default":
        # nobody has its key again, so nothing stored would be found again
        arguments += ["--set", "store.folder=off"]
    for key, origin in effective.origins.items():
        if origin != "default" and key not in _OF_ITS_OWN:
            arguments += ["--set", f"{key}={shown_value(effective.settings, key)}"]
    return arguments


def _await_ready(
    client: ServerClient,
    server: subprocess.Popen[bytes],
    log: IO[bytes],
    *,
    limit_seconds: float,
    on_state: Callable[[str], None],
) -> None:
    give_up_at = time.monotonic() + limit_seconds
    while server.poll() is None:
        if time.monotonic() > give_up_at:
            raise ServerFailed(
                f"the model was not ready after {limit_seconds:.0f} s (model.startup_seconds)"
            )
        with contextlib.suppress(ServerFailed):  # it does not listen yet
            health = client.health()
            # it takes requests; which model answers them, it loads then
            if health.get("status") == "ok":
                return
            states = [str(model.get("state")) for model in health.get("models", ())]
            on_state(", ".join(states) or "starting")
        time.sleep(_POLL_SECONDS)
    raise ServerFailed(_last_words(log) or f"the server ended with code {server.returncode}")


def _last_words(log: IO[bytes]) -> str:
    """The error line of a server that has ended."""
    log.seek(0)
    lines = [
        line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()
    ]
    own = [line.removeprefix("holdfast: ") for line in lines if line.startswith("holdfast: ")]
    # log.format is json
    own += [message for line in lines if (message := json_object(line).get("message"))]
    return (own or lines or [""])[-1]


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdin is not None:
        server.stdin.close()
