"""`holdfast doctor`: what this machine computes with, how fast, what would make it faster, and how a model would be run."""

from __future__ import annotations

import dataclasses
import json
import platform as standard_platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from holdfast.cli.errors import BAD_INPUT, complain
from holdfast.cli.settings_command import settings_command
from holdfast.config import EffectiveSettings, ModelSettings

if TYPE_CHECKING:
    from rich.console import Console

_CHECK_SECONDS = 120.0
_GIB = 1 << 30


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Everything that doctor shows. Measurements that failed are {"error": …}."""

    machine: dict[str, Any]
    built_in: dict[str, Any]  # speed as MLX is installed
    in_front: dict[str, Any]  # speed as Holdfast runs it; only measured where a BLAS can stand in front
    model: dict[str, Any]
    advice: tuple[str, ...]


@settings_command
def doctor(
    effective: EffectiveSettings,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Report on machine, MLX, BLAS and memory, measure their speed, and say how MODEL would be run and what to install."""
    found = _diagnose(effective.settings.model)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(found), indent=2, ensure_ascii=False))
    else:
        _show(found)
    if "error" in found.model:
        complain(found.model["error"])
        raise typer.Exit(BAD_INPUT)


def _diagnose(settings: ModelSettings) -> Diagnosis:
    from holdfast.cli.advice import advice
    from holdfast.models.cores import usable_cores
    from holdfast.models.memory import memory_report

    memory = memory_report()
    machine = {
        "system": f"{standard_platform.system()} {standard_platform.release()}",
        "architecture": standard_platform.machine(),
        "usable_cores": usable_cores(),
        "total_memory_bytes": memory.total_bytes,
        "available_memory_bytes": memory.available_bytes,
        "python": f"{standard_platform.python_version()} ({sys.executable})",
    }
    built_in = _measured("built-in", settings)
    on_linux_cpu = sys.platform == "linux" and built_in.get("report", {}).get("device") != "gpu"
    in_front = _measured("in-front", settings) if on_linux_cpu else built_in
    return Diagnosis(
        machine=machine, built_in=built_in, in_front=in_front, model=_model(settings), advice=advice(in_front.get("report"))
    )


def _model(settings: ModelSettings) -> dict[str, Any]:
    from holdfast.app.model_folder import local_folder

    folder: Path = local_folder(settings)
    return {"folder": str(folder), **_measured("layout", dataclasses.replace(settings, path=str(folder)))}


def _measured(kind: str, settings: ModelSettings) -> dict[str, Any]:
    """One measurement in a process of its own, so that a crash of it is only a line in the report."""
    import msgspec

    limit = settings.startup_seconds if kind == "layout" else _CHECK_SECONDS
    command = [sys.executable, "-m", "holdfast.cli.machine_check", kind, msgspec.json.encode(settings).decode()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, stdin=subprocess.DEVNULL, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"the measurement {kind!r} took longer than {limit:.0f} s"}
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        return {"error": f"the measurement {kind!r} ended with code {done.returncode}: {last}"}
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def _show(found: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    machine = found.machine
    _section(console, "machine", {
        "system": f"{machine['system']}, {machine['architecture']}, {machine['usable_cores']} cores to use",
        "memory": f"{_gib(machine['available_memory_bytes'])} free of {_gib(machine['total_memory_bytes'])}",
        "python": machine["python"],
    })  # fmt: skip
    _section(console, "MLX", _mlx_rows(found))
    _section(console, "model", _model_rows(found.model))
    console.print()
    console.print("what to install", style="bold")
    for line in found.advice or ("nothing: this is as fast as it gets here",):
        console.print(f"  {line}", markup=False)


def _section(console: Console, title: str, rows: dict[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    console.print(f"\n{title}" if title != "machine" else title, style="bold")
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 2))
    table.add_column(min_width=12)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, Text(value))
    console.print(table)


def _mlx_rows(found: Diagnosis) -> dict[str, str]:
    if "error" in found.built_in:
        return {"error": found.built_in["error"]}
    report = found.in_front.get("report", found.built_in["report"])
    rows = {
        "versions": f"mlx {report['mlx_version']}, mlx-lm {report['mlx_lm_version']}",
        "device": f"{report['backend']} ({report['device_name']})",
    }
    if report["device"] == "gpu":
        rows["float32"] = f"{found.built_in['gflops']:,.0f} GFLOP/s"
        rows["working set"] = _gib(report["memory"]["working_set_bytes"])
        return rows
    blas = report["blas"]
    rows["BLAS"] = f"{blas['name']} {blas['version']} in front, {blas['threads']} threads" if blas["in_front"] else blas["reason"]
    rows["float32"] = f"{found.built_in['gflops']:,.1f} GFLOP/s as installed"
    if blas["in_front"]:
        factor = found.in_front["gflops"] / found.built_in["gflops"]
        rows["float32"] += (
            f", {found.in_front['gflops']:,.1f} with {blas['name']} in front ({factor:.1f} times), which Holdfast uses"
        )
    elif "error" in found.in_front:
        rows["in front"] = found.in_front["error"]
    rows["g++"] = "there" if report["compiler"] else "missing: fused operations are not compiled"
    return rows


def _model_rows(model: dict[str, Any]) -> dict[str, str]:
    rows = {"folder": model["folder"]}
    if "error" in model:
        return rows | {"error": model["error"]}
    rows["architecture"] = f"{model['model_type']}, {model['parameters'] / 1e6:,.1f} million parameters"
    rows["weights"] = f"{model['weight_bytes'] / _GIB:,.2f} GiB, computed in {model['compute_dtype']}"
    if model["note"]:
        rows["weights"] += f" ({model['note']})"
    rows["context"] = f"{model['context_tokens']:,} tokens"
    rows["layout"] = model["layout"]
    rows["because"] = model["reason"]
    rows["took"] = f"{model['seconds']:.1f} s to load and probe"
    return rows


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"
