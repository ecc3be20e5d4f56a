"""`holdfast chat` and `holdfast run`: a conversation in the terminal, line by line through a pipe,
or one question.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from holdfast.cli.output import plain_errors
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings, default_file, load_settings
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.server_client import ServerClient

_ALL_OF_STDIN = "-"
_ASK_SECONDS = 2.0  # a running server that is too busy to list its models is not waited for
_SHOWN = ("model.path", "model.context_tokens", "server.api_key")
_OF_A_SERVER = (
    "server.host",
    "server.port",
    "server.allowed_hosts",
    "server.cors_origins",
    "server.tls_key",
)
# Settings that a running server does not need to have been started with.
_OF_A_CLIENT = frozenset(
    {"model.path", "server.api_key", "server.tls_cert", "log.level", "log.format"}
)

Url: TypeAlias = Annotated[
    str, typer.Option("--url", help="A running server; MODEL is then an id that it serves.")
]
OwnServer: TypeAlias = Annotated[
    bool, typer.Option("--own-server", help="Start a server for this, even if one is running.")
]
System: TypeAlias = Annotated[str, typer.Option("--system", help="System prompt.")]
Temperature: TypeAlias = Annotated[
    float | None, typer.Option(min=0, help="0 takes the most likely token every time.")
]
MaxTokens: TypeAlias = Annotated[
    int | None, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")
]


class NotAModel(HoldfastError):
    """What was given as the model is a question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wishes:
    """What was asked of one conversation.

    `question` is "" where messages are typed, or come line by line.
    """

    question: str
    url: str
    own_server: bool
    system: str
    temperature: float | None
    max_tokens: int | None


@functools.partial(settings_command, shown=_SHOWN, left_out=_OF_A_SERVER)
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
    _converse(
        effective,
        _Wishes(
            question=sys.stdin.read() if prompt == _ALL_OF_STDIN else prompt,
            url=url,
            own_server=own_server,
            system=system,
            temperature=temperature,
            max_tokens=max_tokens,
        ),
    )


def run(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", show_default=False, help="Model folder, Hub id or name."),
    ],
    prompt: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", show_default=False, help="Ask this."),
    ] = None,
    url: Url = "",
    own_server: OwnServer = False,
    system: System = "",
    temperature: Temperature = None,
    max_tokens: MaxTokens = None,
) -> None:
    """Ask a model one thing, or chat with it.

    With PROMPT, or with text from a pipe, which is put before PROMPT, it prints one answer and
    exits. Otherwise it is `holdfast chat`.
    """
    piped = "" if sys.stdin.isatty() else sys.stdin.read()
    question = "\n\n".join(part for part in (piped.strip("\n"), " ".join(prompt or [])) if part)
    with plain_errors():
        _check_is_no_question(model)
        if not question and not sys.stdin.isatty():
            raise NotAModel(
                f'there is nothing to ask; for example: holdfast run {model} "Why is the sky blue?"'
            )
        effective = load_settings(
            file=default_file(os.environ), environ=os.environ, flags={"model.path": model}
        )
        _converse(
            effective,
            _Wishes(
                question=question,
                url=url,
                own_server=own_server,
                system=system,
                temperature=temperature,
                max_tokens=max_tokens,
            ),
        )


def _converse(effective: EffectiveSettings, wishes: _Wishes) -> None:
    from rich.console import Console

    from holdfast.cli.chat_session import ChatSession
    from holdfast.cli.chat_terminal import keys_kept

    _check_is_no_question(effective.settings.model.path)
    interactive = not wishes.question and sys.stdin.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with (
        keys_kept() if interactive else contextlib.nullcontext(),
        _server(effective, wishes, console, interactive=interactive) as (client, model),
    ):
        session = ChatSession(client, model, console, interactive=interactive)
        session.system = wishes.system
        session.options = {"temperature": wishes.temperature, "max_tokens": wishes.max_tokens}
        if wishes.question:
            code = 0 if session.ask(wishes.question) else 1
        else:
            code = session.run(
                _typed() if interactive else (line.rstrip("\n") for line in sys.stdin)
            )
    raise typer.Exit(code)


def _check_is_no_question(model: str) -> None:
    """Raise NotAModel if the argument for the model is a question instead."""
    if len(model.split()) > 1 and not Path(model).expanduser().exists():
        raise NotAModel(
            f'"{model}" is not a model. To ask one question: holdfast chat -p "…", or holdfast run MODEL "…"'
        )


@contextlib.contextmanager
def _server(
    effective: EffectiveSettings, wishes: _Wishes, console: Console, *, interactive: bool
) -> Iterator[tuple[ServerClient, str]]:
    """The server and the id of the model there. Raises ServerFailed."""
    from holdfast.cli.chat_server import own_server
    from holdfast.cli.server_client import ServerClient
    from holdfast.cli.server_command import with_scheme

    settings = effective.settings
    if wishes.url:
        key, certificate = settings.server.api_key, settings.server.tls_cert
        with ServerClient(
            url=with_scheme(wishes.url), api_key=key, certificate=certificate
        ) as client:
            yield client, _model(client, settings.model.path)
        return
    with contextlib.ExitStack() as stack:
        if not wishes.own_server and (found := _running_server(effective)) is not None:
            client, model, pid = found
            stack.callback(client.close)
            if interactive:
                console.print(
                    f"using the server at {client.url}, pid {pid} (--own-server starts another)",
                    style="dim",
                )
        else:
            with (
                console.status("starting")
                if console.is_terminal
                else contextlib.nullcontext() as spinner
            ):
                on_state = spinner.update if spinner is not None else lambda _state: None
                client = stack.enter_context(own_server(effective, on_state=on_state))
            model = _model(client, "")
        yield client, model


def _running_server(effective: EffectiveSettings) -> tuple[ServerClient, str, int] | None:
    """This user's server that serves the model, the model's id there and the process id; None where
    one has to be started.

    Where no model is named, it is the server at the port of the settings, or else the only one.
    """
    from holdfast.cli.server_client import ServerFailed
    from holdfast.cli.server_command import client_of
    from holdfast.front.run.running_servers import running_servers

    is_flag = {key: origin.startswith("flag") for key, origin in effective.origins.items()}
    if any(named and key not in _OF_A_CLIENT for key, named in is_flag.items()):
        return None
    wanted, settings = effective.settings.model.path, effective.settings.server
    running = running_servers(os.environ)
    at_port = [server for server in running if server.port == settings.port]
    if not wanted:
        candidates = at_port or (running if len(running) == 1 else [])
    else:
        candidates = sorted(running, key=lambda server: server.port != settings.port)
    for server in candidates:
        client = client_of(server, api_key=settings.api_key)
        with contextlib.suppress(ServerFailed):
            available = client.model_ids(seconds=_ASK_SECONDS)
            if available and (not wanted or wanted in available):
                return client, wanted or available[0], server.pid
        client.close()
    return None


def _model(client: ServerClient, wanted: str) -> str:
    """The id to send: the wanted one, else the server's first. Raises ServerFailed."""
    from holdfast.cli.server_client import ServerFailed

    available = client.model_ids()
    if wanted and wanted not in available:
        raise ServerFailed(
            f"{client.url} does not serve {wanted}; it serves: {', '.join(available) or 'nothing'}"
        )
    if not available:
        raise ServerFailed(f"{client.url} serves no model")
    return wanted or available[0]


def _typed() -> Iterator[str]:
    from holdfast.cli.chat_keyboard import typed_messages

    return typed_messages()
