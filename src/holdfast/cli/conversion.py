"""Converts a model to MLX's format, or quantizes it, with mlx-lm; the result is loaded and run
before it takes its place.

In a process of its own (`python -m holdfast.cli.conversion`), since the caller imports no MLX: use
`convert_model`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Literal, TypeAlias

import msgspec

from holdfast.config import ModelSettings
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.models.model_folder import WEIGHT_FILES

Mode: TypeAlias = Literal["affine", "mxfp4", "nvfp4", "mxfp8"]
FloatType: TypeAlias = Literal["float16", "bfloat16", "float32"]
_SPARE_BYTES = 256 << 20
_LONGEST_REASON = 300


class Conversion(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be made of a model. Without bits it is only brought into MLX's format."""

    source: str  # a folder
    target: str  # a folder that is not there yet
    bits: int | None = None
    group_size: int | None = None  # None: as the mode has it
    mode: Mode = "affine"
    dtype: FloatType | None = None  # of what is not packed; None: as it is
    trust_remote_code: bool = False


def convert_model(conversion: Conversion) -> int:
    """Convert a model; returns the bytes of the weights of the result. Blocks for minutes.

    The target is there whole, and was loaded and run once, or not at all. Raises ConfigError when
    it cannot be made there, and ModelLoadError when the model cannot be converted or the result
    does not run.
    """
    source, target = Path(conversion.source), checked_target(Path(conversion.target))
    try:
        return _made(conversion, source, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error.strerror or error}") from None


def checked_target(folder: Path) -> Path:
    """The whole path of a folder that is to be made.

    Raises ConfigError where something is there already.
    """
    target = Path(os.path.expanduser(folder)).absolute()
    if os.path.lexists(target):
        raise ConfigError(f"{target} is there already; name a folder that is not")
    return target


def _made(conversion: Conversion, source: Path, target: Path) -> int:
    target.parent.mkdir(parents=True, exist_ok=True)
    stored = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    needed = stored if conversion.bits is None else stored * conversion.bits // 8
    free = shutil.disk_usage(target.parent).free
    if needed + _SPARE_BYTES > free:
        raise ConfigError(
            f"about {needed / 1e9:.1f} GB are needed in {target.parent}, {free / 1e9:.1f} GB are "
            "free"
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
        made = Path(beside) / target.name
        _run(msgspec.structs.replace(conversion, target=str(made)))
        made.rename(target)
    return sum(file.stat().st_size for file in target.glob(WEIGHT_FILES))


def _run(conversion: Conversion) -> None:
    command = [sys.executable, "-P", "-m", "holdfast.cli.conversion"]
    done = subprocess.run(
        command,
        input=msgspec.json.encode(conversion),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines else f"the process ended with code {done.returncode}"
        raise ModelLoadError(
            f"{conversion.source} could not be converted: {reason[:_LONGEST_REASON]}"
        )


def _convert(conversion: Conversion) -> None:
    """Device thread (the only one) of the process. Raises what mlx-lm raises."""
    made = importlib.import_module("mlx_lm.convert").convert
    made(
        conversion.source,
        mlx_path=conversion.target,
        quantize=conversion.bits is not None or conversion.mode != "affine",
        q_bits=conversion.bits,
        q_group_size=conversion.group_size,
        q_mode=conversion.mode,
        dtype=conversion.dtype,
        trust_remote_code=conversion.trust_remote_code,
    )


def _check_runs(folder: Path, *, trust_remote_code: bool) -> None:
    """Load the result as a worker does, and run it on a few tokens. Raises ModelLoadError."""
    from holdfast.worker.engine.load import load_model

    mx = importlib.import_module("mlx.core")
    settings = ModelSettings(path=str(folder), trust_remote_code=trust_remote_code)
    loaded = load_model(folder, settings, progress=lambda stage, fraction: None)
    logits = loaded.model(mx.array([[1, 2, 3]]))
    if not bool(mx.all(mx.isfinite(logits)).item()):
        raise ModelLoadError("what came out does not compute: its logits are not finite")


def _main() -> None:
    conversion = msgspec.json.decode(sys.stdin.buffer.read(), type=Conversion)
    with contextlib.redirect_stdout(sys.stderr):
        _convert(conversion)
        _check_runs(Path(conversion.target), trust_remote_code=conversion.trust_remote_code)
    importlib.import_module("mlx.core").clear_streams()


if __name__ == "__main__":
    _main()
