"""A conversation in `holdfast chat`, without a process and without a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from holdfast.cli.chat import ChatSession
from holdfast.cli.server_client import ServerClient
from tests.fakes.echo_server import EchoServer


def converse(
    server: EchoServer,
    *lines: str,
    interactive: bool = False,
    system: str = "",
    terminal: bool = False,
    **options: object,
) -> tuple[int, str]:
    """Exit code and output of a conversation in `holdfast chat`."""
    output = io.StringIO()
    console = Console(
        file=output,
        highlight=False,
        markup=False,
        soft_wrap=True,
        force_terminal=terminal,
        _environ={"TERM": "xterm"},
    )
    session = ChatSession(
        ServerClient(url=server.url),
        "echo",
        console,
        interactive=interactive,
        system=system,
        options=dict(options),
    )
    return session.run(lines), output.getvalue()
