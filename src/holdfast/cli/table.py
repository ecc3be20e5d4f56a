"""Tables of what commands list."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

_NO_LIMIT = 1 << 16  # columns of characters


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
