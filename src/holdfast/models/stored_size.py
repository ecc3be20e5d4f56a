"""How large a model is, by its config.json and the headers of its weight files alone: in a folder,
or on the Hub.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from holdfast.errors import ModelLoadError
from holdfast.models.download import ModelSource, check_reachable, hub_errors
from holdfast.models.model_folder import WEIGHT_FILES, checked_config, checked_tensor_bytes

_CONFIG = "config.json"
_SCALES = ".scales"
_GROUP_SIZE = 64  # of mlx-lm where the configuration does not say
_CONNECTIONS = 8
# What transformers writes and what MLX does, both with a table in the configuration.
_QUANTIZATION = ("quantization", "quantization_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredSize:
    """A model as it is stored."""

    config: Mapping[str, Any]
    weight_bytes: int
    parameters: int  # packed ones counted one by one, their scales not

    @property
    def bits_per_weight(self) -> float:
        """With scales and biases of groups, where there are any."""
        return 8 * self.weight_bytes / max(self.parameters, 1)


def size_of_folder(folder: Path) -> StoredSize:
    """The size of the model in a folder.

    Raises ModelLoadError in one line where something is missing or not whole.
    """
    config, weight_bytes = checked_config(folder), checked_tensor_bytes(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in folder.glob(WEIGHT_FILES):
        with file.open("rb") as opened:
            header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
        shapes |= {
            name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"
        }
    return StoredSize(
        config=config, weight_bytes=weight_bytes, parameters=_parameters(shapes, config)
    )


def size_on_hub(source: ModelSource) -> StoredSize:
    """The size of a model on the Hub.

    Asks for lists and headers; no file is fetched or kept. Raises ModelLoadError.
    """
    from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status

    revision = source.revision or None
    # exported for users, but not typed as such
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers()
    with hub_errors(source):
        check_reachable()
        api = HfApi()
        files = {
            entry.path: entry.size
            for entry in api.list_repo_tree(source.name, revision=revision)
            if hasattr(entry, "size")
        }
        weights = [name for name in files if fnmatchcase(name, WEIGHT_FILES)]
        if _CONFIG not in files or not weights:
            raise ModelLoadError(
                f"{source.name} on the Hub has no files of an MLX model ({_CONFIG}, "
                f"{WEIGHT_FILES}){_other(files)}"
            )
        response = get_session().get(
            hf_hub_url(source.name, _CONFIG, revision=revision), headers=headers
        )
        hf_raise_for_status(response)
        try:
            config = response.json()
        except ValueError as error:
            raise ModelLoadError(
                f"{_CONFIG} of {source.name} on the Hub is not JSON: {error}"
            ) from None

        def header(name: str) -> dict[str, tuple[tuple[int, ...], int]]:
            tensors = api.parse_safetensors_file_metadata(
                source.name, name, revision=revision
            ).tensors
            return {
                key: (tuple(each.shape), each.data_offsets[1] - each.data_offsets[0])
                for key, each in tensors.items()
            }

        found = _all(header, weights)
    shapes = {name: shape for name, (shape, _) in found.items()}
    weight_bytes = sum(size for _, size in found.values())
    return StoredSize(
        config=config, weight_bytes=weight_bytes, parameters=_parameters(shapes, config)
    )


def _all(header: Callable[[str], dict[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    with ThreadPoolExecutor(max_workers=_CONNECTIONS) as pool:
        return {key: value for part in pool.map(header, names) for key, value in part.items()}


def _other(files: Iterable[str]) -> str:
    return (
        ", only GGUF files, the format of llama.cpp"
        if any(name.endswith(".gguf") for name in files)
        else ""
    )


def _parameters(shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> int:
    """A packed weight has as many numbers as its scales have groups, times a group's size."""
    table: Mapping[str, Any] = next(
        (config[key] for key in _QUANTIZATION if isinstance(config.get(key), Mapping)), {}
    )
    usual = table.get("group_size", _GROUP_SIZE)
    total = 0
    for name, shape in shapes.items():
        layer, _, last = name.rpartition(".")
        scales = shapes.get(layer + _SCALES)
        if scales is None:
            total += prod(shape)
        elif last == "weight":
            own = table.get(layer)
            group_size = own.get("group_size", usual) if isinstance(own, Mapping) else usual
            total += prod(scales) * int(group_size)
        elif last == "bias":
            total += prod(shape)
    return total
