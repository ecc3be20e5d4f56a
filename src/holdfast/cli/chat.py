"""`holdfast chat` and `holdfast run`: the commands, and the server that a conversation uses."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, TypeAlias

import typer

from holdfast.cli.output import plain_errors
from holdfast.cli.settings_command import read_settings, settings_command
from holdfast.config import EffectiveSettings, shown_value
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.server_client import ServerClient

_STDIN = "-"
_MODELS_SECONDS = 2.0  # a running server that takes longer to list its models is too busy
_POLL_SECONDS = 0.05
_SHUTDOWN_SECONDS = 15.0
_SHOWN = ("model.path", "model.context_tokens", "server.api_key")
_SERVER_ONLY = (
    "server.host",
    "server.port",
    "server.allowed_hosts",
    "server.cors_origins",
    "server.tls_key",
)
# Any other flag needs a server that was started with it.
_CLIENT_FLAGS = frozenset(
    {"model.path", "server.api_key", "server.tls_cert", "log.level", "log.format"}
)
_SET_BY_OWN_SERVER = (
    "server.host",
    "server.port",
    "server.api_key",
    "server.tls_cert",
    "server.tls_key",
    "log.level",
)

Url: TypeAlias = Annotated[
    str, typer.Option("--url", help="A running server; MODEL is then an id that it serves.")
]
OwnServer: TypeAlias = Annotated[
    bool, typer.Option("--own-server", help="Start a server for this, even if one is running.")
]
System: TypeAlias = Annotated[str, typer.Option("--system", help="System prompt.")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(min=0, help="0 always takes the most likely token.")
]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Maximum length of an answer in tokens.")
]


class NotAModel(HoldfastError):
    """The argument for the model is a question, or there is no question."""


@functools.partial(settings_command, shown=_SHOWN, left_out=_SERVER_ONLY)
def chat(
    effective: EffectiveSettings,
    prompt: Annotated[
        str,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="Ask this, print the answer and exit; - reads all of stdin.",
        ),
    ] = "",
    url: Url = "",
    own_server: OwnServer = False,
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Chat with a model in the terminal.

    It uses your running server if that serves the model; otherwise it starts one for the
    conversation. /help lists the commands, Ctrl-C stops an answer. From a pipe, each line is a
    message.
    """
    question = sys.stdin.read() if prompt == _STDIN else prompt
    options = {"temperature": temperature, "max_tokens": max_tokens}
    _converse(effective, question, url=url, own=own_server, system=system, options=options)


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", show_default=False, help="Model folder, Hub id or name."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", show_default=False, help="The question."),
    ] = None,
    url: Url = "",
    own_server: OwnServer = False,
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Ask a model one question, or chat with it.

    With PROMPT, or with text from a pipe, which is put before PROMPT, it prints one answer and
    exits. Otherwise it is `holdfast chat`.
    """
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip("\n"), " ".join(prompt or [])) if part)
    with plain_errors():
        _check_is_no_question(model)
        if not question and not sys.stdin.isatty():
            raise NotAModel(
                f'there is no question; for example: holdfast run {model} "Why is the sky blue?"'
            )
        effective = read_settings({"model.path": model})
        options = {"temperature": temperature, "max_tokens": max_tokens}
        _converse(effective, question, url=url, own=own_server, system=system, options=options)


def _converse(
    effective: EffectiveSettings,
    question: str,
    *,
    url: str,
    own: bool,
    system: str,
    options: dict[str, float | None],
) -> None:
    """Answer the question, or without one what is typed or piped; then exit."""
    from rich.console import Console

    from holdfast.cli.chat_session import ChatSession, typed_messages

    _check_is_no_question(effective.settings.model.path)
    interactive = not question and sys.stdin.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with contextlib.ExitStack() as stack:
        lines: Iterator[str] = (line.rstrip("\n") for line in sys.stdin)
        if interactive:
            lines = stack.enter_context(typed_messages())
        client, model = stack.enter_context(
            _server(effective, console, url=url, own=own, interactive=interactive)
        )
        session = ChatSession(
            client,
            model,
            console,
            interactive=interactive,
            system=system,
            options={name: value for name, value in options.items() if value is not None},
        )
        if question:
            raise typer.Exit(0 if session.ask(question) else 1)
        raise typer.Exit(session.run(lines))


def _check_is_no_question(model: str) -> None:
    """Raise NotAModel if the argument for the model is a question instead."""
    if len(model.split()) > 1 and not Path(model).expanduser().exists():
        raise NotAModel(
            f'"{model}" is not a model. To ask one question: holdfast chat -p "…", or holdfast run '
            'MODEL "…"'
        )


@contextlib.contextmanager
def _server(
    effective: EffectiveSettings, console: Console, *, url: str, own: bool, interactive: bool
) -> Iterator[tuple[ServerClient, str]]:
    """The server, and the id of the model there. Raises ServerFailed."""
    from holdfast.cli.server_client import ServerClient
    from holdfast.cli.server_command import with_scheme

    settings = effective.settings
    if url:
        with ServerClient(
            url=with_scheme(url),
            api_key=settings.server.api_key,
            certificate=settings.server.tls_cert,
        ) as client:
            yield client, _served_model(client, settings.model.path)
        return
    found = None if own else _running_server(effective)
    if found is not None:
        client, model, pid = found
        if interactive:
            console.print(
                f"using the server at {client.url}, pid {pid} (--own-server starts another)",
                style="dim",
            )
        with client:
            yield client, model
        return
    with contextlib.ExitStack() as stack:
        if console.is_terminal:
            with console.status("starting") as spinner:
                client = stack.enter_context(own_server(effective, on_state=spinner.update))
        else:
            client = stack.enter_context(own_server(effective, on_state=lambda state: None))
        yield client, _served_model(client, "")


def _running_server(effective: EffectiveSettings) -> tuple[ServerClient, str, int] | None:
    """The user's running server that serves the model, the model's id there and the process id.

    If no model is named, it is the server at the port of the settings, or else the only one. None
    if a server has to be started.
    """
    from holdfast.cli.server_client import ServerFailed
    from holdfast.cli.server_command import address_of_running
    from holdfast.front.run.running_servers import running_servers

    for key, origin in effective.origins.items():
        if origin.startswith("flag") and key not in _CLIENT_FLAGS:
            return None
    wanted = effective.settings.model.path
    settings = effective.settings.server
    candidates = sorted(
        running_servers(os.environ), key=lambda server: server.port != settings.port
    )
    if not wanted and len(candidates) > 1:
        candidates = [server for server in candidates if server.port == settings.port]
    for server in candidates:
        client = address_of_running(server, api_key=settings.api_key).client()
        with contextlib.suppress(ServerFailed):
            available = client.model_ids(seconds=_MODELS_SECONDS)
            if available and (not wanted or wanted in available):
                return client, wanted or available[0], server.pid
        client.close()
    return None


def _served_model(client: ServerClient, wanted: str) -> str:
    """The wanted model's id, or the server's first. Raises ServerFailed."""
    from holdfast.cli.server_client import ServerFailed

    available = client.model_ids()
    if wanted and wanted not in available:
        raise ServerFailed(
            f"{client.url} does not serve {wanted}; it serves: {', '.join(available) or 'nothing'}"
        )
    if not available:
        raise ServerFailed(f"{client.url} serves no model")
    return wanted or available[0]


@contextlib.contextmanager
def own_server(
    effective: EffectiveSettings, *, on_state: Callable[[str], None]
) -> Iterator[ServerClient]:
    """Run a server with these settings on a free loopback port, with a key of its own.

    on_state: called with the server's state until it is ready. Raises ServerFailed if it exits
    before that.
    """
    from holdfast.cli.server_client import ServerClient

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = int(listener.getsockname()[1])
    key = secrets.token_urlsafe(24)
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith("HOLDFAST_")
    }
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            _server_command(effective, port),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env={**environ, "HOLDFAST_SERVER_API_KEY": key},
            start_new_session=True,  # Ctrl-C stops the answer, not the server
        )
        client = ServerClient(url=f"http://127.0.0.1:{port}", api_key=key)
        try:
            limit_seconds = effective.settings.model.startup_seconds
            _wait_until_ready(client, server, log, limit_seconds=limit_seconds, on_state=on_state)
            yield client
        finally:
            client.close()
            _end(server)


def _server_command(effective: EffectiveSettings, port: int) -> list[str]:
    """The command that starts the server with exactly these settings, and no file or variable."""
    command = [sys.executable, "-P", "-m", "holdfast.cli.main", "serve"]
    command += ["--config", os.devnull, "--until-stdin-closes"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    level = effective.settings.log.level
    if effective.origins["log.level"] == "default":
        level = "error"
    command += ["--log-level", level]
    if effective.origins["log.file"] == "default":
        command += ["--log-file", "off"]  # the log goes to the temporary file
    if effective.origins["store.folder"] == "default":
        # cached blocks belong to a key, and nobody will have this server's key again
        command += ["--set", "store.folder=off"]
    for key, origin in effective.origins.items():
        if origin != "default" and key not in _SET_BY_OWN_SERVER:
            command += ["--set", f"{key}={shown_value(effective.settings, key)}"]
    return command


def _wait_until_ready(
    client: ServerClient,
    server: subprocess.Popen[bytes],
    log: IO[bytes],
    *,
    limit_seconds: float,
    on_state: Callable[[str], None],
) -> None:
    from holdfast.cli.server_client import ServerFailed

    deadline = time.monotonic() + limit_seconds
    while server.poll() is None:
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"the model was not ready after {limit_seconds:.0f} s (model.startup_seconds)"
            )
        with contextlib.suppress(ServerFailed):  # it does not listen yet
            health = client.health()
            if health.get("status") == "ok":
                return
            states = [str(model.get("state")) for model in health.get("models", ())]
            on_state(", ".join(states) or "starting")
        time.sleep(_POLL_SECONDS)
    raise ServerFailed(_last_error(log) or f"the server ended with code {server.returncode}")


def _last_error(log: IO[bytes]) -> str:
    """The error line of a server that has exited; its last line if it has none."""
    from holdfast.cli.server_client import json_object

    log.seek(0)
    last = ""
    last_error = ""
    for line in log.read().decode(errors="replace").splitlines():
        last = line.strip() or last
        if line.startswith("holdfast: "):
            last_error = line.removeprefix("holdfast: ")
        last_error = json_object(line).get("message") or last_error  # log.format is json
    return last_error or last


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(_SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    if server.stdin is not None:
        server.stdin.close()
