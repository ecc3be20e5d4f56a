"""The command line. Each command has a file of its own, and imports what is heavy only when it runs."""

from __future__ import annotations

import typer

from holdfast.cli.bench import bench
from holdfast.cli.chat import chat
from holdfast.cli.config import config
from holdfast.cli.doctor import doctor
from holdfast.cli.errors import require_working_folder
from holdfast.cli.serve import serve
from holdfast.cli.sessions import sessions
from holdfast.cli.store import store
from holdfast.cli.version import version

app = typer.Typer(
    name="holdfast",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def holdfast() -> None:
    """Runs language models with MLX for agents."""
    require_working_folder()


for command in (serve, chat, doctor, config, version):
    app.command()(command)
app.add_typer(store, name="store")
app.add_typer(sessions, name="sessions")
app.add_typer(bench, name="bench")

if __name__ == "__main__":
    app()
