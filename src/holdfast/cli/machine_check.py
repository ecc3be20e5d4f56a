"""Measurements for `holdfast doctor`, each in a process of its own: which BLAS is in front is decided once per process.

`python -m holdfast.cli.machine_check built-in|in-front|layout [SETTINGS]` prints one JSON object.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.config import ModelSettings
from holdfast.errors import HoldfastError
from holdfast.models import platform

_MEASURED_SECONDS = 0.6
_SIDE = {"cpu": 1024, "gpu": 4096}  # of the square matrices: large enough to be the product's time alone


def main(arguments: list[str]) -> int:
    """Do what the arguments say; the result, or {"error": …}, goes to standard output as JSON."""
    kind = arguments[0]
    settings = msgspec.json.decode(arguments[1], type=ModelSettings) if len(arguments) > 1 else ModelSettings()
    try:
        if kind != "built-in":
            platform.prepare_blas(settings.threads)
        result = _layout(settings) if kind == "layout" else _speed()
        importlib.import_module("mlx.core").clear_streams()
    except HoldfastError as error:
        result = {"error": str(error)}
    sys.stdout.write(json.dumps(result) + "\n")
    return 0


def _speed() -> dict[str, Any]:
    """The platform report and the speed of float32 matrix products in GFLOP/s (best of several)."""
    mx = importlib.import_module("mlx.core")
    report = platform.report()
    side = _SIDE[report.device]
    matrix = mx.random.uniform(shape=(side, side))
    mx.eval(matrix, matrix[:64] @ matrix)
    best, began = 0.0, time.perf_counter()
    while best == 0.0 or time.perf_counter() - began < _MEASURED_SECONDS:
        start = time.perf_counter()
        mx.eval(matrix @ matrix)
        best = max(best, 2 * side**3 / (time.perf_counter() - start) / 1e9)
    return {"gflops": best, "report": dataclasses.asdict(report)}


def _layout(settings: ModelSettings) -> dict[str, Any]:
    """How the model would be run here, and why."""
    load = importlib.import_module("holdfast.models.load")
    probe = importlib.import_module("holdfast.engine.probe")
    folder = Path(settings.path)
    began = time.perf_counter()
    loaded = load.load_model(folder, settings, progress=lambda stage, fraction: None)
    result = probe.choose_layout(loaded.model, vocab_size=loaded.vocab_size, wanted=settings.layout)
    return {
        "layout": result.runner.name,
        "reason": result.reason,
        "trials": [dataclasses.asdict(trial) for trial in result.trials],
        "model_type": loaded.model_type,
        "parameters": loaded.parameters,
        "weight_bytes": loaded.weight_bytes,
        "compute_dtype": str(loaded.compute_dtype).removeprefix("mlx.core."),
        "context_tokens": loaded.context_tokens,
        "note": loaded.note,
        "seconds": time.perf_counter() - began,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
