"""`holdfast serve`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Annotated

import typer

from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings
from holdfast.errors import AddressInUse, ConfigError


@settings_command
def serve(
    effective: EffectiveSettings,
    until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
) -> None:
    """Serve models over HTTP.

    The server speaks the APIs of OpenAI, Anthropic and Ollama, and serves /health and /metrics.
    docs/reference/configuration.md lists all settings.
    """
    from holdfast.cli.port_taken import who_has_the_port
    from holdfast.cli.progress import load_progress
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
