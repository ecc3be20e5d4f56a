"""Reads the names and files of LoRA adapters, in the format of mlx-lm, without MLX.

An adapter is a folder with `adapters.safetensors` and `adapter_config.json`. The settings list the
adapters of a model as `NAME=FOLDER`. Requests name one as `MODEL:NAME`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from holdfast.errors import ConfigError, ModelLoadError
from holdfast.files import expanded
from holdfast.models.model_folder import read_json
from holdfast.models.weight_files import read_header, tensor_bytes

WEIGHTS = "adapters.safetensors"
CONFIG = "adapter_config.json"
SEPARATOR = ":"  # between the name of a model and that of its adapter
_NAME = re.compile(r"[\w.-]+")
_PEFT_WEIGHTS = "adapter_model.safetensors"
# Ollama's clients append :latest to the name of a model, so no adapter can have this name
_OLLAMAS_TAG = "latest"
_KINDS = ("lora", "dora")
_DTYPES = ("F32", "F16", "BF16")
_FORMAT = f"an adapter is a folder with {CONFIG} and {WEIGHTS}, as mlx_lm.lora writes it"

AdapterKind: TypeAlias = Literal["lora", "dora"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFiles:
    """A checked adapter on disk.

    shapes: for each adapted layer, the shapes of its arrays (`lora_a`, `lora_b`, and `m` for DoRA).
    trained_on: the base model that the adapter's configuration names; empty: unknown.
    """

    name: str
    folder: Path
    kind: AdapterKind
    scale: float  # factor of the low-rank product
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]]
    tensor_bytes: int
    trained_on: str = ""


def adapter_folders(listed: Iterable[str]) -> dict[str, Path]:
    """The folders of the adapters that a setting lists as `NAME=FOLDER`, by name.

    Raises ConfigError.
    """
    folders: dict[str, Path] = {}
    for text in listed:
        name, equals, folder = (part.strip() for part in text.partition("="))
        if not (equals and folder and _NAME.fullmatch(name)) or name == _OLLAMAS_TAG:
            raise ConfigError(
                f"model.adapters = {text} is not allowed; allowed: NAME=FOLDER, such as "
                "sql=adapters/sql; a name consists of letters, digits, '_', '-' and '.', and is "
                f"not '{_OLLAMAS_TAG}'"
            )
        if name in folders:
            raise ConfigError(f"model.adapters has two adapters with the name {name}")
        folders[name] = expanded(Path(folder))
    return folders


def files_of_adapter(name: str, folder: Path) -> dict[str, Path]:
    """The files of an adapter, by names that differ from those of other adapters' files."""
    return {f"adapter/{name}/{file}": folder / file for file in (WEIGHTS, CONFIG)}


def listed_adapter(name: str, folder: Path) -> str:
    """Format an adapter as in the setting: `NAME=FOLDER`."""
    return f"{name}={folder}"


def checked_adapters(listed: Iterable[str]) -> tuple[AdapterFiles, ...]:
    """Check the files of the adapters that a setting lists, but not whether they fit the model.

    Reads only headers and configurations. Raises ConfigError, and ModelLoadError with a message of
    one line.
    """
    return tuple(checked_adapter(name, path) for name, path in adapter_folders(listed).items())


def checked_adapter(name: str, folder: Path) -> AdapterFiles:
    """Check the files of one adapter. Raises ModelLoadError with a message of one line."""
    try:
        return _checked(name, folder)
    except ModelLoadError as error:
        raise ModelLoadError(f"adapter {name}: {error}") from None


def _checked(name: str, folder: Path) -> AdapterFiles:
    """As `checked_adapter`, with messages that do not name the adapter."""
    if not folder.is_dir():
        problem = f"{folder} is not a folder" if folder.exists() else f"there is no folder {folder}"
        raise ModelLoadError(f"{problem}; {_FORMAT}")
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise ModelLoadError(f"{folder} has no {file}{_found_instead(folder)}")
    config = read_json(folder / CONFIG)
    kind = config.get("fine_tune_type", "lora")
    if kind not in _KINDS:
        raise ModelLoadError(
            f"{folder / CONFIG} has fine_tune_type {kind!r}; possible: {', '.join(_KINDS)} (merge "
            "other fine-tunings into their model with mlx_lm.fuse)"
        )
    header = read_header(folder / WEIGHTS)
    return AdapterFiles(
        name=name,
        folder=folder,
        kind=kind,
        scale=_scale(config, folder),
        shapes=_shapes(header, folder / WEIGHTS, kind=kind),
        tensor_bytes=tensor_bytes(header),
        trained_on=base_model if isinstance(base_model := config.get("model"), str) else "",
    )


def _found_instead(folder: Path) -> str:
    """Explain why an adapter's file is missing, as the end of a sentence."""
    if (folder / _PEFT_WEIGHTS).is_file():
        return (
            f", but {_PEFT_WEIGHTS}, the format of PEFT; an adapter must be in mlx-lm's format, as "
            "mlx_lm.lora writes it"
        )
    return f"; {_FORMAT}"


def _scale(config: Mapping[str, Any], folder: Path) -> float:
    """The factor of the low-rank product. Raises ModelLoadError if the configuration has none."""
    parameters = config.get("lora_parameters")
    scale = parameters.get("scale") if isinstance(parameters, Mapping) else None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise ModelLoadError(f"{folder / CONFIG} has no number lora_parameters.scale")
    return float(scale)


def _shapes(
    header: Mapping[str, Any], file: Path, *, kind: AdapterKind
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The shapes of an adapter's weights, by layer and part. Raises ModelLoadError if a weight is
    missing or unexpected.
    """
    needed_parts = {"lora_a", "lora_b", "m"} if kind == "dora" else {"lora_a", "lora_b"}
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor, entry in header.items():
        layer, _, part = tensor.rpartition(".")
        if not layer or part not in needed_parts:
            raise ModelLoadError(
                f"{file} contains {tensor}, which is no weight of a {kind} adapter; possible: "
                f"names that end in {', '.join(sorted(needed_parts))}"
            )
        if entry["dtype"] not in _DTYPES:
            raise ModelLoadError(
                f"{file} contains {tensor} as {entry['dtype']}; possible: {', '.join(_DTYPES)}"
            )
        shapes.setdefault(layer, {})[part] = tuple(entry["shape"])
    if not shapes:
        raise ModelLoadError(f"{file} contains no weights")
    for layer, parts in shapes.items():
        if missing := sorted(needed_parts - parts.keys()):
            raise ModelLoadError(f"{file} has no {layer}.{missing[0]}")
    return shapes
