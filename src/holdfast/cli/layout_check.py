"""How a model would be run here, for `doctor`; found out in a process of its own (`python -m
holdfast.cli.layout_check`).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from holdfast.config import ModelSettings
from holdfast.errors import HoldfastError
from holdfast.machine import platform


class LayoutCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What loading and probing a model gave."""

    layout: str
    reason: str
    model_type: str
    parameters: int
    weight_bytes: int
    compute_dtype: str
    context_tokens: int
    note: str
    seconds: float
    warnings: tuple[str, ...] = ()


def check_layout(settings: ModelSettings) -> LayoutCheck:
    """Load and probe the model in the folder `settings.path` in another process.

    Raises HoldfastError with one line.
    """
    command = [sys.executable, "-P", "-m", "holdfast.cli.layout_check"]
    limit = settings.startup_seconds
    try:
        done = subprocess.run(
            command,
            input=msgspec.json.encode(settings),
            capture_output=True,
            timeout=limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise HoldfastError(
            f"loading and probing took more than {limit:.0f} s (model.startup_seconds)"
        ) from None
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise HoldfastError(
            f"loading and probing ended with code {done.returncode}: "
            f"{lines[-1] if lines else 'no message'}"
        )
    answer = msgspec.json.decode(done.stdout, type=LayoutCheck | str)
    if isinstance(answer, str):
        raise HoldfastError(answer)
    return answer


def _check(settings: ModelSettings) -> LayoutCheck:
    platform.prepare_blas(settings.threads)  # has to come before the first import of MLX
    load = importlib.import_module("holdfast.worker.engine.load")
    probe = importlib.import_module("holdfast.worker.engine.probe")
    kernels = importlib.import_module("holdfast.worker.engine.long_context")
    began = time.perf_counter()
    platform.use_device(settings.device)
    loaded = load.load_model(Path(settings.path), settings, progress=lambda stage, fraction: None)
    result = probe.choose_layout(loaded.model, vocab_size=loaded.vocab_size, wanted=settings.layout)
    importlib.import_module("holdfast.worker.engine.sharing").choose_sharing(result)
    return LayoutCheck(
        layout=result.name,
        reason=result.reason,
        model_type=loaded.model_type,
        parameters=loaded.parameters,
        weight_bytes=loaded.weight_bytes,
        compute_dtype=str(loaded.compute_dtype).removeprefix("mlx.core."),
        context_tokens=loaded.context_tokens,
        note=loaded.note,
        seconds=time.perf_counter() - began,
        warnings=(*probe.warnings_about(result), *kernels.warnings_about_kernels(loaded.model)),
    )


def _main() -> None:
    settings = msgspec.json.decode(sys.stdin.buffer.read(), type=ModelSettings)
    answer: LayoutCheck | str
    try:
        answer = _check(settings)
    except HoldfastError as error:
        answer = str(error)
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    sys.stdout.buffer.flush()
    if "mlx.core" in sys.modules:
        sys.modules["mlx.core"].clear_streams()


if __name__ == "__main__":
    _main()
