"""Whether a folder holds a model that can be loaded here, by the names of its files and its
config.json: 0.1 ms, no MLX.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from holdfast.errors import ModelLoadError
from holdfast.models.model_folder import WEIGHT_FILES, check_is_folder, checked_config

_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
_REMAPPINGS = re.compile(r"^MODEL_\w*REMAPPING = (\{.*?^\})", re.MULTILINE | re.DOTALL)


def check_loadable(folder: Path) -> Mapping[str, Any]:
    """The configuration of a model that can be loaded; what only the loading shows, such as a file
    cut short, is not looked for.

    Raises ModelLoadError, with the reason in words, for a folder whose model cannot be.
    """
    try:
        return _checked(folder)
    except OSError as error:  # no permission, a name that is too long
        raise ModelLoadError(f"{folder} cannot be looked into: {error.strerror or error}") from None


def _checked(folder: Path) -> Mapping[str, Any]:
    check_is_folder(folder)
    config = checked_config(folder)
    model_type = str(config["model_type"])
    if not (is_supported(model_type) or config.get("model_file")):
        raise ModelLoadError(f"mlx-lm has no models of the type {model_type}")
    names = os.listdir(folder)
    weights = [name for name in names if fnmatchcase(name, WEIGHT_FILES)]
    if not weights:
        others = sorted(
            {
                name.rpartition(".")[2]
                for name in names
                if name.endswith((".safetensors", ".bin", ".pt", ".gguf"))
            }
        )
        found = f", only files of the kind {', '.join(others)}" if others else ""
        raise ModelLoadError(f"{folder} has no weights ({WEIGHT_FILES}){found}")
    shards = [match for name in weights if (match := _SHARD.fullmatch(name))]
    if shards and len(shards) < (wanted := int(shards[0][2])):
        raise ModelLoadError(f"only {len(shards)} of its {wanted} weight files are in {folder}")
    return config


def is_supported(model_type: str) -> bool:
    """Whether the installed mlx-lm has models of that type (`model_type` in config.json)."""
    if not re.fullmatch(r"\w[\w.-]*", model_type):
        return False
    return _as_loaded(model_type) in _modules()


def _as_loaded(model_type: str) -> str:
    return model_type if model_type in _modules() else _remapping().get(model_type, model_type)


def _package() -> Path | None:
    spec = importlib.util.find_spec("mlx_lm")  # imports nothing of it
    return (
        None
        if spec is None or not spec.submodule_search_locations
        else Path(spec.submodule_search_locations[0])
    )


@cache
def _modules() -> frozenset[str]:
    package = _package()
    if package is None:
        return frozenset()
    return frozenset(
        name.removesuffix(".py") for name in os.listdir(package / "models") if name.endswith(".py")
    )


@cache
def _remapping() -> dict[str, str]:
    """Types that mlx-lm loads as another one: read from its source, since importing it brings MLX."""
    package = _package()
    if package is None:
        return {}
    tables = [
        ast.literal_eval(text)
        for text in _REMAPPINGS.findall((package / "utils.py").read_text(encoding="utf-8"))
    ]
    return {
        key[0] if isinstance(key, tuple) else key: module
        for table in tables
        for key, module in table.items()
    }
