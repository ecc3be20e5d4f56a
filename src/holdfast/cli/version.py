"""`holdfast version`."""

from __future__ import annotations

import importlib.metadata
import platform

import typer

import holdfast


def version() -> None:
    """Print the versions of Holdfast, Python and MLX."""
    typer.echo(f"holdfast {holdfast.__version__}")
    typer.echo(f"python {platform.python_version()}")
    for name in ("mlx", "mlx-lm"):
        typer.echo(f"{name} {_installed(name)}")


def _installed(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
