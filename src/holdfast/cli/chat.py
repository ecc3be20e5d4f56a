"""`holdfast chat`: a conversation in the terminal, or line by line through a pipe."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.server_client import ServerClient


@settings_command
def chat(
    effective: EffectiveSettings,
    url: Annotated[str, typer.Option("--url", help="A running server (MODEL is then an id there); else one is started.")] = "",
    system: Annotated[str, typer.Option("--system", help="System prompt.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0, help="0 takes the most likely token every time.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Longest answer in tokens.")] = None,
) -> None:
    """Talk with a model: /help lists the commands, Ctrl-C stops an answer. From a pipe, every line is a message."""
    from rich.console import Console

    from holdfast.cli.chat_session import ChatSession
    from holdfast.cli.chat_terminal import keys_kept

    interactive = sys.stdin.isatty()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with keys_kept() if interactive else contextlib.nullcontext(), _server(effective, url, console) as client:
        model = _model(client, effective.settings.model.path if url else "")
        session = ChatSession(client, model, console, interactive=interactive)
        session.system = system
        session.options = {"temperature": temperature, "max_tokens": max_tokens}
        code = session.run(_typed() if interactive else (line.rstrip("\n") for line in sys.stdin))
    raise typer.Exit(code)


@contextlib.contextmanager
def _server(effective: EffectiveSettings, url: str, console: Console) -> Iterator[ServerClient]:
    from holdfast.cli.chat_server import own_server
    from holdfast.cli.server_client import ServerClient
    from holdfast.cli.server_command import with_scheme

    if url:
        server = effective.settings.server
        with ServerClient(url=with_scheme(url), api_key=server.api_key, certificate=server.tls_cert) as client:
            yield client
        return
    with contextlib.ExitStack() as stack:
        status = console.status("starting") if console.is_terminal else contextlib.nullcontext()
        with status as spinner:
            on_state = spinner.update if spinner is not None else lambda _state: None
            client = stack.enter_context(own_server(effective, on_state=on_state))
        yield client


def _model(client: ServerClient, wanted: str) -> str:
    """The id to send: the wanted one, else the server's first. Raises ServerFailed."""
    from holdfast.cli.server_client import ServerFailed

    available = client.model_ids()
    if wanted and wanted not in available:
        raise ServerFailed(f"{client.url} does not serve {wanted}; it serves: {', '.join(available) or 'nothing'}")
    if not available:
        raise ServerFailed(f"{client.url} serves no model")
    return wanted or available[0]


def _typed() -> Iterator[str]:
    from holdfast.cli.chat_keyboard import typed_messages

    return typed_messages()
