"""`holdfast version` and `holdfast --version`."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, TypeAlias

import typer

import holdfast


def version() -> None:
    """Print the versions of Holdfast, Python and MLX."""
    typer.echo(
        f"holdfast {holdfast.__version__} (distribution {holdfast.DISTRIBUTION}: "
        f"{_installed(holdfast.DISTRIBUTION)})"
    )
    typer.echo(f"python {platform.python_version()}")
    for name in ("mlx", "mlx-lm"):
        typer.echo(f"{name} {_installed(name)}")


def _and_leave(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


Version: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--version", "-V", callback=_and_leave, is_eager=True, help="Print the versions and exit."
    ),
]


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
