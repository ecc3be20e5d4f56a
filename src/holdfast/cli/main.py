"""The command line.

Each command has a file of its own, and imports what is heavy only when it runs.
"""

from __future__ import annotations

from importlib.metadata import entry_points

import typer

from holdfast.cli.chat import chat, run
from holdfast.cli.command_group import CommandGroup
from holdfast.cli.config import config
from holdfast.cli.doctor import doctor
from holdfast.cli.errors import require_working_folder
from holdfast.cli.keys import keys
from holdfast.cli.launch import launch
from holdfast.cli.load import load, unload
from holdfast.cli.logs import logs
from holdfast.cli.models import models
from holdfast.cli.ps import ps
from holdfast.cli.serve import serve
from holdfast.cli.service import service
from holdfast.cli.sessions import sessions
from holdfast.cli.state import state
from holdfast.cli.stop import stop
from holdfast.cli.store import store
from holdfast.cli.version import Version, version

# entry points of distributions beside this one, each a typer.Typer: `bench/` has one
FURTHER_COMMANDS = "holdfast.commands"

app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def holdfast(version: Version = False) -> None:
    """Run language models with MLX for agents. Begin with: holdfast serve"""
    require_working_folder()


_SERVING, _SERVERS, _KEPT, _MACHINE = (
    "Serve and talk",
    "Running servers",
    "Models and data",
    "This machine",
)

for panel, commands in {
    _SERVING: (serve, run, chat),
    _SERVERS: (ps, stop, logs, load, unload),
    _MACHINE: (doctor, config, version),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
# What follows the agent's name is the agent's: options of its own, `--` and all.
app.command(
    rich_help_panel=_SERVING,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(launch)
app.add_typer(sessions, name="sessions", rich_help_panel=_SERVERS)
app.add_typer(models, name="models", rich_help_panel=_KEPT)
app.add_typer(store, name="store", rich_help_panel=_KEPT)
app.add_typer(state, name="state", rich_help_panel=_KEPT)
app.add_typer(keys, name="keys", rich_help_panel=_MACHINE)
app.add_typer(service, name="service", rich_help_panel=_MACHINE)
for found in entry_points(group=FURTHER_COMMANDS):
    app.add_typer(found.load(), name=found.name, rich_help_panel=_MACHINE)

if __name__ == "__main__":
    app()
