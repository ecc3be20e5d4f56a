"""What commands print: JSON for programs, rows and tables for people."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from rich.table import Table

_NO_LIMIT = 1 << 16  # columns of characters

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def print_json(value: Any) -> None:
    """A value as JSON; what JSON has no form for, such as a path, as a text."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_rows(rows: Sequence[tuple[str, str]]) -> None:
    """Names and values, one below the other."""
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        typer.echo(f"{name:<{width}}  {value}")


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table with these headings and without lines. right: those of numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", justify="right" if column in right else "left")
    return table


def print_table(table: Table) -> None:
    """As wide as the terminal; in a pipe each row is one line, so that it can be searched."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = _NO_LIMIT
    console.print(table)
