"""`holdfast doctor`: what this machine computes with, how fast, what would make it faster, and how
a model would be run.

`python -m holdfast.cli.doctor` is the process that measures the machine for `--measure`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from holdfast.cli.output import BAD_INPUT, Json, complain, count_text, load_progress
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.diagnosis import Diagnosis
    from holdfast.front.fleet.crash_reports import CrashReport
    from holdfast.front.prompt.dialects import DialectReport

_GIB = 1 << 30
_LINES_SHOWN = 12  # of a dead worker's log; its report has more


@settings_command
def doctor(
    effective: EffectiveSettings,
    as_json: Json = False,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure the machine for about ten minutes and save the findings in a file.",
        ),
    ] = False,
    panic_test: Annotated[
        bool,
        typer.Option(
            "--panic-test",
            help="With --measure: try for 45 minutes what has made Macs panic. Save your work.",
        ),
    ] = False,
) -> None:
    """Check this machine.

    It reports on the machine, MLX, BLAS and memory, measures their speed, says how MODEL would be
    run, and gives recommendations.
    """
    if panic_test and not measure:
        raise typer.BadParameter("--panic-test needs --measure")
    if measure:
        file = save_machine_check(Path.cwd(), arguments=("--panic-test",) if panic_test else ())
        typer.echo(f"saved in {file}; please attach it to an issue")
        return
    import msgspec

    from holdfast.cli.diagnosis import diagnose
    from holdfast.front.fleet.chosen_catalog import catalog_of
    from holdfast.front.run.run_folder import run_folder
    from holdfast.models.download import check_present

    model = effective.settings.model
    if model.path:  # also a name of models.toml
        model = catalog_of(effective.settings, os.environ).entries[0].model
    check_present(model)  # a name that was mistyped is told before anything is measured
    # MLX compiles into it
    with run_folder(os.environ), load_progress(effective.settings.log) as progress:
        found = diagnose(model, progress=progress)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    else:
        _show(found)
    for problem in found.problems:
        complain(problem)
    if found.problems:
        raise typer.Exit(BAD_INPUT)


def _show(found: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    machine = found.machine
    rows = {
        "system": f"{machine.system}, {machine.architecture}, {machine.usable_cores} usable cores",
        "memory": f"{_gib(machine.memory.available_bytes)} free of {_gib(machine.memory.total_bytes)}",
        "python": machine.python,
    }
    _section(console, "machine", rows)
    _section(console, "MLX", _mlx_rows(found))
    _section(console, "model", _model_rows(found))
    if found.dialect is not None:
        _section(console, "tools and thinking", _dialect_rows(found.dialect))
    if found.last_crash is not None:
        _section(console, "last worker crash", _crash_rows(found.last_crash))
    console.print("recommendations", style="bold")
    for line in found.advice or ("none",):
        console.print(f"  {line}")


def _section(console: Console, title: str, rows: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(title, style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 2))
    table.add_column(min_width=12)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(Text(name), Text(value))
    console.print(table)
    console.print()


def _mlx_rows(found: Diagnosis) -> dict[str, str]:
    report, speed = found.platform, found.speed
    if report is None:
        return {"state": "does not run, see below"}
    rows = {
        "versions": f"mlx {report.mlx_version}, mlx-lm {report.mlx_lm_version}",
        "device": f"{report.backend} ({report.device_name})",
    }
    if report.device == "gpu":
        rows["working set"] = _gib(report.memory.working_set_bytes)
    else:
        rows["BLAS"] = (
            f"{report.blas}{', replaces the built-in one' if report.blas.in_front else ''}"
        )
        rows["g++"] = "found" if report.compiler else "missing: fused operations are not compiled"
    if speed is not None:
        rows["float32"] = f"{speed.as_installed_gflops:,.1f} GFLOP/s as installed"
        if report.blas.in_front:
            factor = speed.in_use_gflops / speed.as_installed_gflops
            rows["float32"] += (
                f", {speed.in_use_gflops:,.1f} with {report.blas.name} in front ({factor:.1f} "
                "times): used"
            )
    return rows


def _model_rows(found: Diagnosis) -> dict[str, str]:
    model = found.model
    rows = {"name": found.model_name or "the bundled one"} | (
        {"folder": found.folder} if found.folder else {}
    )
    if model is None:
        return rows | {"state": "cannot be run, see below"}
    note = f" ({model.note})" if model.note else ""
    return rows | {
        "architecture": f"{model.model_type}, {model.parameters / 1e6:,.1f} million parameters",
        "weights": f"{model.weight_bytes / (1 << 20):,.0f} MiB, computed in {model.compute_dtype}{note}",
        "context": f"{model.context_tokens:,} tokens",
        "layout": f"{model.layout} ({model.reason})",
        "start": f"{model.seconds:.1f} s to load and probe",
    }


def _dialect_rows(dialect: DialectReport) -> dict[str, str]:
    if dialect.tools == "none":
        return {"tools": "none: there is no chat template"}
    shown = {
        "template": "shown by its chat template",
        "text": f"told in the system message: {dialect.why}",
    }[dialect.tools]
    rows = {
        "tools": shown,
        "calls": f"{dialect.family}, {'proven by a round trip' if dialect.proven else f'not proven: {dialect.why}'}",
        "ids": dialect.ids,
        "history": f"{'kept' if dialect.calls_kept else 'calls are written into the text'}, "
        f"{'several calls in one answer' if dialect.parallel else 'one call in each answer'}",
    }
    thinking = dialect.thinking
    if thinking is None:
        return rows | {"thinking": "no markers are known"}
    opened = ", opened by the prompt" if thinking.opened_by_prompt else ""
    efforts: dict[str, list[str]] = {}
    for effort, options in thinking.efforts.items():
        efforts.setdefault(json.dumps(options), []).append(effort)
    switch = "; ".join(f"{', '.join(asked)}: {options}" for options, asked in efforts.items())
    return rows | {
        "thinking": f"{thinking.start} … {thinking.end}{opened}",
        "switch": switch or "none",
    }


def _crash_rows(report: CrashReport) -> dict[str, str]:
    generated = sum(request.drawn_tokens for request in report.requests)
    served = (
        "while it loaded"
        if report.served_seconds is None
        else f"after {report.served_seconds:,.0f} s"
    )
    count = len(report.requests) + report.more_requests
    rows = {
        "when": f"{report.at}, {served}",
        "model": report.model,
        "how": report.how,
        "was serving": f"{count_text(count, 'request')} ({generated:,} tokens generated)",
        "memory": _gib(report.resident_bytes),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    if report.refused:
        rows["refused"] = ", ".join(report.refused)
    return rows | ({"last lines": "\n".join(report.log[-_LINES_SHOWN:])} if report.log else {})


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"


def save_machine_check(folder: Path, *, arguments: Sequence[str] = ()) -> Path:
    """Print findings as they come and save them in a new file in `folder`; returns the file.

    Raises HoldfastError.

    arguments: `--quick` only sees that everything runs, `--panic-test` tries what has made Macs
    panic.
    """
    file = folder / f"holdfast-machine-check-{time.strftime('%Y-%m-%d-%H%M%S')}.md"
    command = [sys.executable, "-P", "-m", "holdfast.cli.doctor", *arguments]
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
    """Measure the machine; the process that `save_machine_check` starts."""
    # before the first import of MLX
    importlib.import_module("holdfast.machine.platform").prepare_blas()
    importlib.import_module("holdfast.worker.engine.machine_check").main(sys.argv[1:])


if __name__ == "__main__":
    _main()
