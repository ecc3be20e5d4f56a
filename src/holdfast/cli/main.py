"""The command line. Commands import heavy modules only when they run."""

from __future__ import annotations

import importlib.metadata
import platform
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

import holdfast as package
from holdfast.cli.chat import chat, run
from holdfast.cli.doctor import doctor
from holdfast.cli.launch import launch
from holdfast.cli.logs import logs
from holdfast.cli.models import models
from holdfast.cli.output import require_working_folder
from holdfast.cli.performance import performance
from holdfast.cli.quality import quality
from holdfast.cli.servers import load, ps, serve, service, stop, unload
from holdfast.cli.settings import config, keys
from holdfast.cli.store import sessions, state, store

# group of entry points in other distributions, such as that of `bench/`; each is a typer.Typer
FURTHER_COMMANDS = "holdfast.commands"

# command → what to do with several models, or with words after the model
_SEVERAL_MODELS = {
    "serve": "To serve several models, name them in models.toml and start 'holdfast serve' without "
    "a model; it also serves the models in the Hub's cache. See docs/guides/models.md",
    "chat": "To ask at once: holdfast run MODEL QUESTION",
    "doctor": "Run the command once for each",
}
_HELP = "help"
_BENCH = "bench"
# what users of other programs may type → our command, where the names are not similar
_COMMAND_OF_OTHER_WORD = {
    "talk": "chat",
    "up": "serve",
    "start": "serve",
    "list": "models ls",
    "ls": "models ls",
    "pull": "models pull",
    "rm": "models rm",
    "show": "models info",
    "kill": "stop",
    "log": "logs",
    "status": "ps",
    "settings": "config",
    "check": "doctor",
    "benchmark": "bench",
}


class CommandGroup(TyperGroup):
    """The group of all commands.

    Types are `Any`, because newer versions of Typer hide those of click.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Treat `help` and `help COMMAND` like `--help` and `COMMAND --help`."""
        if args[:1] == [_HELP]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command, or fail with a suggestion."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            if word in _COMMAND_OF_OTHER_WORD:
                ctx.fail(
                    f"No such command '{word}'. Did you mean '{_COMMAND_OF_OTHER_WORD[word]}'?"
                )
            if word == _BENCH:
                ctx.fail(
                    "No such command 'bench'. The benchmarks come with a clone of the repository: "
                    "pip install -e ./bench"
                )
            if "/" in word or Path(word).exists():
                ctx.fail(f"No such command '{word}'. To serve that model: holdfast serve {word}")
        return super().resolve_command(ctx, args)


class ModelCommand(TyperCommand):
    """A command whose only argument is a model. Says what to do with several ones."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse further arguments with a hint."""
        ctx.allow_extra_args = True
        super().parse_args(ctx, args)
        if ctx.args and not ctx.resilient_parsing:
            ctx.fail(
                f"{ctx.info_name} takes one model; '{' '.join(ctx.args)}' is left over. "
                f"{_SEVERAL_MODELS[ctx.info_name]}"
            )
        return list(ctx.args)


def version() -> None:
    """Print the versions of Holdfast, Python and MLX."""
    typer.echo(
        f"holdfast {package.__version__} (distribution {package.DISTRIBUTION}: "
        f"{_installed_version(package.DISTRIBUTION)})"
    )
    typer.echo(f"python {platform.python_version()}")
    for name in ("mlx", "mlx-lm"):
        typer.echo(f"{name} {_installed_version(name)}")


def _print_version_and_exit(is_given: bool) -> None:
    if is_given:
        version()
        raise typer.Exit


Version: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--version",
        "-V",
        callback=_print_version_and_exit,
        is_eager=True,
        help="Print the versions and exit.",
    ),
]


def _installed_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


app = typer.Typer(
    name="holdfast",
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def holdfast(version: Version = False) -> None:
    """Run language models with MLX for agents. Start with: holdfast serve"""
    require_working_folder()


# panels of the help, by kind of commands
_SERVING = "Serve and chat"
_SERVERS = "Running servers"
_MODELS = "Models and data"
_MACHINE = "This machine"

for panel, commands in {
    _SERVING: (serve, run, chat),
    _SERVERS: (ps, stop, logs, performance, load, unload),
    _MODELS: (quality,),
    _MACHINE: (doctor, config, version),
}.items():
    for command in commands:
        command_class = ModelCommand if command.__name__ in _SEVERAL_MODELS else None
        app.command(rich_help_panel=panel, cls=command_class)(command)
# Everything after the agent's name is passed to the agent.
app.command(
    rich_help_panel=_SERVING,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)(launch)
app.add_typer(sessions, name="sessions", rich_help_panel=_SERVERS)
app.add_typer(models, name="models", rich_help_panel=_MODELS)
app.add_typer(store, name="store", rich_help_panel=_MODELS)
app.add_typer(state, name="state", rich_help_panel=_MODELS)
app.add_typer(keys, name="keys", rich_help_panel=_MACHINE)
app.add_typer(service, name="service", rich_help_panel=_MACHINE)
for entry_point in entry_points(group=FURTHER_COMMANDS):
    app.add_typer(entry_point.load(), name=entry_point.name, rich_help_panel=_MACHINE)

if __name__ == "__main__":
    app()
