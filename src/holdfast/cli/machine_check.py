"""`holdfast doctor --measure`: measures this machine for about ten minutes, and saves what it finds
in one file to be sent on.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from holdfast.errors import HoldfastError


def save_machine_check(folder: Path, *, arguments: Sequence[str] = ()) -> Path:
    """Print findings as they come and save them in a new file in `folder`; returns the file.

    Raises HoldfastError.

    arguments: `--quick` only sees that everything runs, `--panic-test` tries what has made Macs
    panic.
    """
    file = folder / f"holdfast-machine-check-{time.strftime('%Y-%m-%d-%H%M%S')}.md"
    command = [sys.executable, "-P", "-m", "holdfast.cli.machine_check", *arguments]
    with (
        file.open("w", encoding="utf-8") as saved,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
        ) as process,
    ):
        assert process.stdout is not None
        saved.write("# Machine check of Holdfast\n\n| what | figures |\n|---|---|\n")
        for line in process.stdout:
            what, _, figures = line.rstrip("\n").partition("\t")
            typer.echo(f"{what}: {figures}")
            saved.write(f"| {what} | {figures} |\n")
            saved.flush()  # a panic must not lose it
    if process.returncode != 0:
        raise HoldfastError(
            f"the check ended with code {process.returncode}; what it found until then is in {file}"
        )
    return file


def _main() -> None:
    # before the first import of MLX
    importlib.import_module("holdfast.machine.platform").prepare_blas()
    importlib.import_module("holdfast.worker.engine.machine_check").main(sys.argv[1:])


if __name__ == "__main__":
    _main()
