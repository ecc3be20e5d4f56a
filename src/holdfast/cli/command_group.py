"""The commands as a person types them: `help` is one too, and a word that is none is told what was
probably meant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer.core import TyperGroup

_HELP = "help"
_BENCH = "bench"  # of a distribution beside this one
# What other programs call it, which no likeness of letters would find.
_ELSEWHERE = {
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

    `Any`: typer's newer versions have click's types under a private name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """`help` and `help COMMAND` are `--help` and `COMMAND --help`."""
        if args[:1] == [_HELP]:
            args = [*args[1:], "--help"]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command; one that is none ends with what may have been meant."""
        word = args[0]
        if word not in self.commands and not word.startswith("-"):
            if word in _ELSEWHERE:
                ctx.fail(f"No such command '{word}'. Did you mean '{_ELSEWHERE[word]}'?")
            if word == _BENCH:
                ctx.fail(
                    "No such command 'bench'. The benchmarks come with a clone of the repository: "
                    "pip install -e ./bench"
                )
            if "/" in word or Path(word).exists():
                ctx.fail(f"No such command '{word}'. To serve that model: holdfast serve {word}")
        return super().resolve_command(ctx, args)
