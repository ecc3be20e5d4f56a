"""`holdfast doctor`: reports on the machine, its libraries and their speed, and on how a model
would run.

MLX runs in separate processes: `python -m holdfast.cli.doctor` loads a model as a worker does, and
`python -m holdfast.cli.machine_report` measures the machine.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import platform as standard_platform
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from holdfast.cli.output import BAD_INPUT, Json, complain, count_text, load_progress, print_json
from holdfast.cli.quality import quality_text
from holdfast.cli.settings import settings_command
from holdfast.config import EffectiveSettings, ModelSettings, SchedulerSettings, StoreSettings
from holdfast.errors import HoldfastError
from holdfast.files import hash_cache_file
from holdfast.machine.child_process import answer_of
from holdfast.models.download import check_present, resolve_model, served_id
from holdfast.models.quality import QualityReport, find_quality
from holdfast.wire.commands import WorkerSettings
from holdfast.wire.events import ModelInfo, WorkerFailed
from holdfast.wire.images import VisionInfo

if TYPE_CHECKING:
    from rich.console import Console

    from holdfast.cli.machine_report import MachineReport
    from holdfast.front.fleet.worker_files import CrashReport
    from holdfast.front.prompt.dialects import DialectReport
    from holdfast.machine.device_memory import DeviceMemory

_GIB = 1 << 30
_SHOWN_LOG_LINES = 12
_CUDA_WHEELS = {"mlx-cuda-12", "mlx-cuda-13"}
_REINSTALL_CUDA = "pip install --force-reinstall --no-deps mlx-cuda-13"
# for a clone of the repository; `holdfast` on PyPI is another project
_INSTALL_CUDA = f"pip install -c constraints.txt '.[cuda]' && {_REINSTALL_CUDA}"


@functools.partial(settings_command, shown=("model.path", "model.context_tokens"))
def doctor(effective: EffectiveSettings, as_json: Json = False) -> None:
    """Check this machine.

    Reports on the machine, MLX, BLAS and memory, measures their speed, shows how MODEL would run,
    and gives recommendations.
    """
    from holdfast.front.fleet.catalog import catalog_of
    from holdfast.front.run.running_servers import run_folder
    from holdfast.models.draft_pairs import check_speculation

    model = effective.settings.model
    listed: tuple[ModelSettings, ...] = ()
    if model.path:  # the path may be a name in models.toml
        entries = catalog_of(effective.settings, os.environ).entries
        model = entries[0].model
        listed = tuple(entry.model for entry in entries)
    check_present(model)  # reports a misspelled name before anything is measured
    check_speculation(model, listed=listed)
    # MLX writes compiled code into the run folder
    with run_folder(os.environ), load_progress(effective.settings.log) as progress:
        diagnosis = diagnose(model, listed=listed, progress=progress)
    if as_json:
        print_json(diagnosis)
    else:
        _print_diagnosis(diagnosis)
    for problem in diagnosis.problems:
        complain(problem)
    if diagnosis.problems:
        raise typer.Exit(BAD_INPUT)


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about this machine that need no MLX: hardware, system, Python version."""

    system: str
    architecture: str
    usable_cores: int
    memory: DeviceMemory
    python: str


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Billions of float32 operations per second in matrix products."""

    as_installed_gflops: float
    in_use_gflops: float  # with the BLAS that replaces MLX's own, if there is one


class Diagnosis(msgspec.Struct, kw_only=True):
    """The results of all checks. A result is None if its check failed; `problems` says why."""

    machine: Machine
    platform: MachineReport | None = None
    speed: Speed | None = None
    model_name: str = ""
    folder: str = ""
    model: ModelInfo | None = None
    draft_model: str = ""  # the model that can draft for it; empty: none
    quality: QualityReport | None = None  # None: not measured for this version of the model
    dialect: DialectReport | None = None
    last_crash: CrashReport | None = None  # the last crash of one of this user's workers
    problems: list[str] = []
    advice: tuple[str, ...] = ()


def diagnose(
    settings: ModelSettings,
    *,
    listed: Sequence[ModelSettings] = (),
    progress: Callable[[str, float], None],
) -> Diagnosis:
    """Run all checks. Takes a few seconds, plus the time to fetch and load the model.

    listed: the models of models.toml, one of which may be the draft model.
    """
    from holdfast.files import crash_reports_folder
    from holdfast.front.fleet.worker_files import last_report
    from holdfast.machine.cores import usable_cores
    from holdfast.machine.device_memory import memory_report

    machine = Machine(
        system=f"{standard_platform.system()} {standard_platform.release()}",
        architecture=standard_platform.machine(),
        usable_cores=usable_cores(),
        memory=memory_report(),
        python=f"{standard_platform.python_version()} ({sys.executable})",
    )
    last_crash = last_report(crash_reports_folder(os.environ))
    diagnosis = Diagnosis(machine=machine, model_name=settings.path, last_crash=last_crash)
    for stage, check in (
        ("machine", _check_platform),
        ("speed", _measure_speed),
        ("model", _check_model),
        ("draft model", functools.partial(_find_draft, listed=listed)),
        ("dialect", _check_dialect),
    ):
        progress(stage, 0.0)
        try:
            check(diagnosis, settings, progress)
        except HoldfastError as error:
            diagnosis.problems.append(str(error))
        progress(stage, 1.0)
    diagnosis.advice = advice(
        diagnosis.platform,
        system=standard_platform.system(),
        architecture=standard_platform.machine(),
        nvidia_gpu=has_nvidia_gpu(),
        cuda_wheel=has_cuda_wheel(),
    )
    if diagnosis.model is not None:
        diagnosis.advice = (*diagnosis.model.warnings, *diagnosis.advice)
    return diagnosis


def _check_platform(diagnosis: Diagnosis, settings: ModelSettings, progress: object) -> None:
    """Report on MLX and the BLAS. Like all checks, fills in its part of the diagnosis."""
    from holdfast.cli.machine_report import machine_report

    diagnosis.platform = machine_report(threads=settings.threads)


def _measure_speed(diagnosis: Diagnosis, settings: ModelSettings, progress: object) -> None:
    """Measure products with the installed BLAS and, if another one replaces it, with that one."""
    from holdfast.cli.machine_report import measure_gflops

    if diagnosis.platform is None:
        return
    installed = measure_gflops(blas=False, threads=settings.threads)
    in_use = installed
    if diagnosis.platform.blas.in_front:
        in_use = measure_gflops(blas=True, threads=settings.threads)
    diagnosis.speed = Speed(as_installed_gflops=installed, in_use_gflops=in_use)


def _check_model(
    diagnosis: Diagnosis, settings: ModelSettings, progress: Callable[[str, float], None]
) -> None:
    """Fetch the model if necessary, and load it as a worker would."""
    diagnosis.folder = str(resolve_model(settings, progress=progress))
    diagnosis.model_name = served_id(settings)
    if diagnosis.platform is not None:
        diagnosis.model = check_model(dataclasses.replace(settings, path=diagnosis.folder))
        diagnosis.quality = find_quality(diagnosis.model.fingerprint, os.environ)


def _find_draft(
    diagnosis: Diagnosis,
    settings: ModelSettings,
    progress: object,
    *,
    listed: Sequence[ModelSettings],
) -> None:
    """Find the model that can draft for this one. Raises HoldfastError if the named one cannot.

    listed: the models of models.toml, one of which may be the draft model.
    """
    from holdfast.models.draft_pairs import LocalModel, draft_of

    if diagnosis.folder:
        model = LocalModel(name=diagnosis.model_name, folder=Path(diagnosis.folder))
        draft = draft_of(model, settings.speculation, listed=listed, environ=os.environ)
        diagnosis.draft_model = "" if draft is None else draft.name


def _check_dialect(diagnosis: Diagnosis, settings: ModelSettings, progress: object) -> None:
    """Find out how the chat template writes tool calls and reasoning."""
    from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle

    if diagnosis.folder:
        diagnosis.dialect = load_tokenizer_bundle(Path(diagnosis.folder)).dialect_report


def check_model(settings: ModelSettings) -> ModelInfo:
    """Load and probe the model in the folder `settings.path`, in another process.

    Raises HoldfastError with a message of one line.
    """
    answer: ModelInfo | str = answer_of(
        "holdfast.cli.doctor",
        answer_type=ModelInfo | str,
        doing="loading and probing",
        limit_seconds=settings.startup_seconds,
        sent=msgspec.json.encode(settings),
        hint="; for a slow model, raise model.startup_seconds",
    )
    if isinstance(answer, str):
        raise HoldfastError(answer)
    return answer


def advice(
    report: MachineReport | None,
    *,
    system: str,
    architecture: str,
    nvidia_gpu: bool,
    cuda_wheel: bool,
) -> tuple[str, ...]:
    """Return recommendations, the most useful first.

    report: None if MLX does not run. system: Linux or Darwin. architecture: the one that this
    Python was built for.
    """
    if report is None:
        return (
            "MLX does not run here (see the error); `pip install --force-reinstall mlx` may help",
        )
    if report.backend != "cpu":
        return report.recommendations
    unused_gpu = ""
    if system == "Darwin" and architecture == "x86_64":
        unused_gpu = "this Python is built for Intel: install a Python for Apple silicon (arm64)"
    elif system == "Darwin":
        unused_gpu = "Metal is not used: MLX needs macOS 14 or newer, and no virtual machine"
    elif nvidia_gpu and cuda_wheel:
        # both wheels contain mlx/lib/libmlx.so, so the one installed last hides the other
        unused_gpu = f"MLX for CUDA is installed, but hidden by MLX for CPUs: {_REINSTALL_CUDA}"
    elif nvidia_gpu:
        unused_gpu = (
            "an NVIDIA GPU is not used: in your clone of Holdfast, run `make venv`, or "
            f"{_INSTALL_CUDA}"
        )
    return (*([unused_gpu] if unused_gpu else []), *report.recommendations)


def has_nvidia_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, with or without MLX for CUDA."""
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def has_cuda_wheel() -> bool:
    """Whether MLX for CUDA is installed, even if it does not work."""
    return any(wheel.name in _CUDA_WHEELS for wheel in distributions())


def _print_diagnosis(diagnosis: Diagnosis) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    machine = diagnosis.machine
    memory = machine.memory
    rows = {
        "system": f"{machine.system}, {machine.architecture}, {machine.usable_cores} usable cores",
        "memory": f"{_gib(memory.available_bytes)} free of {_gib(memory.total_bytes)}",
        "python": machine.python,
    }
    _print_section(console, "machine", rows)
    _print_section(console, "MLX", _mlx_rows(diagnosis))
    _print_section(console, "model", _model_rows(diagnosis))
    if diagnosis.dialect is not None:
        _print_section(console, "tools and thinking", _dialect_rows(diagnosis.dialect))
    if diagnosis.last_crash is not None:
        _print_section(console, "last worker crash", _crash_rows(diagnosis.last_crash))
    console.print("recommendations", style="bold")
    for line in diagnosis.advice or ("none",):
        console.print(f"  {line}")


def _print_section(console: Console, title: str, rows: dict[str, str]) -> None:
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


def _mlx_rows(diagnosis: Diagnosis) -> dict[str, str]:
    """Describe MLX, the device and its speed."""
    report = diagnosis.platform
    speed = diagnosis.speed
    if report is None:
        return {"state": "does not run, see below"}
    rows = {
        "versions": f"mlx {report.mlx_version}, mlx-lm {report.mlx_lm_version}",
        "device": f"{report.backend} ({report.device_name})",
    }
    if report.device == "gpu":
        rows["working set"] = _gib(report.memory.working_set_bytes)
    else:
        replaces_note = ", replaces the built-in one" if report.blas.in_front else ""
        rows["BLAS"] = f"{report.blas}{replaces_note}"
        rows["decoding"] = f"BLAS (no C kernel: {report.blas.no_kernel})"
        if report.blas.few_rows:
            rows["decoding"] = f"C kernel for products of up to {report.blas.few_rows} tokens"
        rows["g++"] = (
            "found" if report.can_compile else "missing: fused operations are not compiled"
        )
    if speed is not None:
        rows["float32"] = f"{speed.as_installed_gflops:,.1f} GFLOP/s as installed"
        if report.blas.in_front:
            factor = speed.in_use_gflops / speed.as_installed_gflops
            rows["float32"] += (
                f", {speed.in_use_gflops:,.1f} with {report.blas.name} in use ({factor:.1f} times)"
            )
    return rows


def _model_rows(diagnosis: Diagnosis) -> dict[str, str]:
    """Describe the model, and how a worker would run it."""
    from holdfast.front.run.ready_message import context_text

    model = diagnosis.model
    rows = {"name": diagnosis.model_name or "the bundled one"}
    if diagnosis.folder:
        rows["folder"] = diagnosis.folder
    if model is None:
        return {**rows, "state": "cannot be run, see below"}
    weights_note = f" ({model.weights_note})" if model.weights_note else ""
    size = f"{model.weight_bytes / (1 << 20):,.0f} MiB"
    kept_note = ""
    if model.kept_layers:
        kept_note = (
            f"; {count_text(model.kept_layers, 'weight matrix', 'weight matrices')} kept as stored"
        )
    return {
        **rows,
        "architecture": f"{model.model_type}, {model.parameters / 1e6:,.1f} million parameters",
        "weights": f"{size}, computed in {model.compute_dtype}{kept_note}{weights_note}",
        "context": context_text(model.context_tokens, own_tokens=model.own_context_tokens),
        "layout": f"{model.layout} ({model.layout_reason})",
        "attention": model.attention,
        "speculation": _speculation_text(diagnosis, model),
        "images": _images_text(model.vision),
        "kv quality": _quality_text(diagnosis),
        "start": f"{model.load_seconds:.1f} s to load and probe",
    }


def _images_text(vision: VisionInfo | None) -> str:
    if vision is None:
        return "not supported (text-only model)"
    if vision.refused:
        return f"refused: {vision.refused}"
    if vision.reuse_refused:
        return f"read, but prompts with images are not cached: {vision.reuse_refused}"
    return "read, and prompts with images are cached"


def _speculation_text(diagnosis: Diagnosis, model: ModelInfo) -> str:
    if model.speculation_refused:
        return model.speculation_refused
    drafters = f" and from {diagnosis.draft_model}" if diagnosis.draft_model else ""
    return f"drafts from earlier text{drafters} are verified where that is faster"


def _quality_text(diagnosis: Diagnosis) -> str:
    if diagnosis.quality is not None:
        return quality_text(diagnosis.quality)
    return f"not measured; to measure it: holdfast quality {diagnosis.model_name}"


def _dialect_rows(dialect: DialectReport) -> dict[str, str]:
    """Describe how the model calls tools and reasons."""
    if dialect.tools == "none":
        return {"tools": "none: there is no chat template"}
    tools_text = "rendered by the chat template"
    if dialect.tools == "text":
        tools_text = f"described in the system message: {dialect.why}"
    proof_text = (
        "proven: rendered calls parse back" if dialect.proven else f"not proven: {dialect.why}"
    )
    history_text = "kept" if dialect.calls_kept else "calls are written into the text"
    parallel_text = "several calls per answer" if dialect.parallel else "one call per answer"
    rows = {
        "tools": tools_text,
        "calls": f"{dialect.family}, {proof_text}",
        "ids": dialect.ids,
        "history": f"{history_text}, {parallel_text}",
    }
    thinking = dialect.thinking
    if thinking is None:
        return {**rows, "thinking": "no markers are known"}
    opened_note = ", opened by the prompt" if thinking.opened_by_prompt else ""
    efforts_of_options: dict[str, list[str]] = {}
    for effort, options in thinking.efforts.items():
        efforts_of_options.setdefault(json.dumps(options), []).append(effort)
    switch_text = "; ".join(
        f"{', '.join(names)}: {options}" for options, names in efforts_of_options.items()
    )
    return {
        **rows,
        "thinking": f"{thinking.start} … {thinking.end}{opened_note}",
        "switch": switch_text or "none",
    }


def _crash_rows(report: CrashReport) -> dict[str, str]:
    """Describe the crash of a worker."""
    generated_tokens = sum(request.generated_tokens for request in report.requests)
    requests = len(report.requests) + report.more_requests
    when_text = "while it loaded"
    if report.served_seconds is not None:
        when_text = f"after {report.served_seconds:,.0f} s"
    rows = {
        "when": f"{report.at}, {when_text}",
        "model": report.model,
        "how": report.how,
        "was serving": f"{count_text(requests, 'request')} ({generated_tokens:,} tokens generated)",
        "memory": _gib(report.resident_bytes),
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    if report.refused:
        rows["refused"] = ", ".join(report.refused)
    if report.log:
        rows["last lines"] = "\n".join(report.log[-_SHOWN_LOG_LINES:])
    return rows


def _gib(size: int) -> str:
    return f"{size / _GIB:,.1f} GiB"


def _load_and_probe(settings: ModelSettings) -> ModelInfo:
    """Load the model as a worker that serves it, and unload it. Raises ModelLoadError."""
    from holdfast.library.in_process import InProcessClient

    worker = WorkerSettings(
        folder=settings.path,
        hash_cache=hash_cache_file(os.environ),
        model=settings,
        scheduler=SchedulerSettings(),
        store=StoreSettings(folder=""),
    )
    process = importlib.import_module("holdfast.worker.loop.process")
    client = InProcessClient(lambda inbox: process.serve_model(inbox, worker))
    outcome = client.wait_started()
    client.close()
    if isinstance(outcome, WorkerFailed):
        raise outcome.error
    return outcome.model


def _answer_check() -> None:
    """Read ModelSettings from stdin, and print a ModelInfo or an error as JSON."""
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSettings)
    answer: ModelInfo | str
    try:
        answer = _load_and_probe(settings)
    except HoldfastError as error:
        answer = str(error)
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    _answer_check()
