"""`holdfast serve`, and what it says when its port is taken."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated, Any

import typer

from holdfast.cli.output import load_progress
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings
from holdfast.errors import AddressInUse, ConfigError

_ASK_SECONDS = 2.0
_WAY_OUT = "or take another port: -p {other} (-p 0: a free one)"


@settings_command
def serve(
    effective: EffectiveSettings,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Serve models over HTTP.

    The server speaks the APIs of OpenAI, Anthropic and Ollama, and serves /health and /metrics.
    docs/reference/configuration.md lists all settings.
    """
    from holdfast.front.run import front

    if until_stdin_closes:
        threading.Thread(target=_end_with_stdin, name="stdin-watch", daemon=True).start()
    try:
        with load_progress(effective.settings.log) as progress:
            code = front.run(effective, progress=progress)
    except AddressInUse as taken:
        raise ConfigError(who_has_the_port(taken)) from None
    raise typer.Exit(code)


def _end_with_stdin() -> None:
    """Ask this process to stop when whoever started it is gone, however it went."""
    # not sys.stdin.read: its lock would be held when the interpreter ends
    while os.read(sys.stdin.fileno(), 1024):
        continue
    os.kill(os.getpid(), signal.SIGTERM)


def who_has_the_port(taken: AddressInUse) -> str:
    """One line: which program listens on the port, and what the user can do. Asks that program."""
    way_out = _WAY_OUT.format(other=taken.port + 1 if taken.port < 65535 else taken.port - 1)
    models = _models_served(taken.url)
    if models is None:
        return f"port {taken.port} on {taken.host} is taken by another program; stop it, {way_out}"
    served = ", ".join(models) or "nothing yet"
    return (
        f"port {taken.port} on {taken.host} is taken by Holdfast itself: it serves {served} at "
        f"{taken.url} "
        f"already (talk with it: holdfast chat --url {taken.url}). Stop that one (holdfast stop "
        f"{taken.port}), {way_out}"
    )


def _models_served(url: str) -> list[str] | None:
    """The ids of the models that a Holdfast at this address serves; None when it is something else."""
    from holdfast.cli.server_client import ServerClient, ServerFailed

    try:
        with ServerClient(url=url, use_proxies=False) as client:
            health = client.call("GET", "/health", timeout=_ASK_SECONDS)
    except ServerFailed:
        return None
    models: Any = health.get("models")
    if "version" not in health or not isinstance(models, list):
        return None
    return [str(model["id"]) for model in models if isinstance(model, dict) and "id" in model]
