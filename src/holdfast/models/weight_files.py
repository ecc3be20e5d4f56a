"""Checks the weight files of a model before MLX reads them.

MLX reads lazily, and evaluating a truncated file can abort the whole process. So the header of each
file is first compared with the file's size. Only the headers are read. A shard is one of several files
with the weights of a model; an index file tells which shard contains which tensor.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Mapping
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from holdfast.errors import DamagedModel, UnusableModel
from holdfast.models.foreign_formats import SETTINGS_FILES
from holdfast.models.model_folder import WEIGHT_FILES, opened, read_json
from holdfast.models.quantization import check_weights

_INDEX = "model.safetensors.index.json"
_LARGEST_HEADER_BYTES = 256 << 20
_LFS_POINTER = b"version https://git-lfs"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SHARD = re.compile(r".*-(\d+)-of-(\d+)\.safetensors")
# sizes of the numbers of a tensor, by its dtype
_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 8),
}


def checked_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The tensors of all weight files, by name, each with its `dtype` and `shape`.

    Raises UnusableModel with a one-line message if a file is missing or damaged, or if the weights
    are in a format that would be read wrongly.
    """
    tensors: dict[str, dict[str, Any]] = {}
    for file in weight_files(folder):
        tensors |= read_header(file)
    settings_files = {name: folder / name for name in SETTINGS_FILES}
    beside = {name: read_json(file) for name, file in settings_files.items() if file.is_file()}
    try:
        check_weights(config, tensors, beside)
    except UnusableModel as error:
        raise UnusableModel(f"{folder}: {error}") from None
    return tensors


def checked_tensor_bytes(folder: Path) -> int:
    """The total size of the tensors in all weight files.

    Raises UnusableModel with a message of one line if a file is missing or truncated.
    """
    return sum(_end_of_tensors(read_header(file)) for file in weight_files(folder))


def tensor_bytes(tensors: Mapping[str, Mapping[str, Any]]) -> int:
    """The total size of tensors, by their entries in the headers of files."""
    offsets = (entry["data_offsets"] for entry in tensors.values())
    return sum(end - begin for begin, end in offsets)


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a model. Raises UnusableModel if one is missing."""
    names = sorted(name for name in os.listdir(folder) if fnmatchcase(name, WEIGHT_FILES))
    _check_shards(folder, names)
    if not names:
        raise _no_weights(folder)
    return [folder / name for name in names]


def _check_shards(folder: Path, names: list[str]) -> None:
    """Raise DamagedModel if a file is missing that the index names, or that the numbers in the files'
    names announce. names: of the weight files in the folder.
    """
    indexed_names = set()
    if (index := folder / _INDEX).exists():
        mapping = read_json(index).get("weight_map")
        if not isinstance(mapping, dict):
            raise DamagedModel(f"{index} has no weight_map; download the file again")
        indexed_names = {str(name) for name in mapping.values()}
    missing = sorted(name for name in indexed_names if "\0" in name or not (folder / name).exists())
    if missing:
        raise DamagedModel(
            f"{folder} lacks {len(missing)} of {len(indexed_names)} weight files: {_first_names(missing)}; "
            "download the model again"
        )
    shards = [match for name in names if (match := _SHARD.fullmatch(name))]
    if shards and len(shards) < (count := int(shards[0][2])):
        raise DamagedModel(
            f"only {len(shards)} of {count} weight files are in {folder}; download the model again"
        )


def _no_weights(folder: Path) -> UnusableModel:
    """The error for a folder without weight files; names those in other formats."""
    other_names = sorted(name for name in os.listdir(folder) if name.endswith(_OTHER_WEIGHTS))
    if not other_names:
        return DamagedModel(f"{folder} has no weights ({WEIGHT_FILES}); download the model again")
    return UnusableModel(
        f"{folder} has no {WEIGHT_FILES}, only {_first_names(other_names)}; convert the model first: "
        f"mlx_lm.convert --hf-path {folder} --mlx-path NEW_FOLDER"
    )


def read_header(file: Path) -> dict[str, dict[str, Any]]:
    """Return the header of a weight file: the entry of each tensor, by name, with `dtype`, `shape`
    and `data_offsets`.

    Raises UnusableModel if the file is truncated. Source:
    https://github.com/huggingface/safetensors#format.
    """
    try:
        with opened(file) as content:
            file_bytes = os.fstat(content.fileno()).st_size
            start = content.read(len(_LFS_POINTER))
            if start == _LFS_POINTER:
                raise DamagedModel(
                    f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its "
                    "folder, or download the file again"
                )
            header_bytes = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if not 2 <= header_bytes <= min(_LARGEST_HEADER_BYTES, file_bytes - 8):
                raise DamagedModel(
                    f"{file} ({file_bytes:,} bytes) is damaged or cut short, because its header does "
                    f"not fit into the file{_web_page_note(start)}; download the file again"
                )
            content.seek(8)
            header: dict[str, dict[str, Any]] = json.loads(content.read(header_bytes))
        header.pop("__metadata__", None)
        _check_entries(header)
        tensors_end = _end_of_tensors(header)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedModel(
            f"{file} is damaged: its header is not that of a safetensors file; download the file "
            "again"
        ) from error
    expected_bytes = 8 + header_bytes + tensors_end
    if expected_bytes != file_bytes:
        raise DamagedModel(
            f"{file} is damaged or cut short: {expected_bytes:,} bytes expected, "
            f"{file_bytes:,} found; download the file again"
        )
    return header


def _web_page_note(start: bytes) -> str:
    """A note for a message if a file begins like an HTML page, as a failed download does; else empty."""
    return " (it is a web page)" if start.lstrip()[:1] == b"<" else ""


def _check_entries(header: Mapping[str, Any]) -> None:
    """Raise ValueError and other errors if a tensor's description is invalid."""
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        counts = [*entry["shape"], begin, end]
        are_counts = all(type(count) is int and count >= 0 for count in counts)
        if not are_counts or begin > end or not isinstance(entry["dtype"], str):
            raise ValueError(name)
        item_bytes = _ITEM_BYTES.get(entry["dtype"])
        if item_bytes is not None and prod(entry["shape"]) * item_bytes != end - begin:
            raise ValueError(name)


def _end_of_tensors(header: Mapping[str, Any]) -> int:
    """Return the end of the last tensor, relative to the header."""
    return max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _first_names(names: list[str]) -> str:
    """The first three names, and how many more there are, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
