"""Checks whether the model in a folder can be loaded: all files are present, undamaged, and in a
format that is read correctly.

The check reads headers and small JSON files. Its result is cached until a file of the folder
changes, so that checking hundreds of models again takes only one `stat` per file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.errors import DamagedModel, ModelLoadError, UnusableModel
from holdfast.lru_cache import LruCache
from holdfast.models.chat_templates import check_templates
from holdfast.models.model_folder import (
    check_is_folder,
    check_supported,
    checked_config,
    opened,
    read_json,
)
from holdfast.models.weight_files import checked_tensors

# tokenizer files that transformers converts
CONVERTIBLE = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_MOST_KEPT = 1024
_TOKENIZER = "tokenizer.json"
# read when a model is loaded; all are optional
_MORE_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
)
_BLANK = b" \t\r\n"
_Signature: TypeAlias = tuple[tuple[str, int, int, int], ...]
_results: LruCache[Path, tuple[_Signature, Mapping[str, Any] | UnusableModel]] = LruCache(
    _MOST_KEPT
)


def check_loadable(folder: Path) -> Mapping[str, Any]:
    """Return the configuration if the model in a folder can be loaded.

    Raises UnusableModel with the reason, and ModelLoadError if a file cannot be read at the moment.
    Thread-safe.
    """
    check_is_folder(folder)
    try:
        signature = _signature(folder)
        kept = _results.get(folder)
        if kept is None or kept[0] != signature:
            kept = signature, _result(folder)
            _results.put(folder, kept)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror or error}") from None
    result = kept[1]
    if isinstance(result, UnusableModel):
        raise type(result)(str(result))
    return result


def _signature(folder: Path) -> _Signature:
    """A value that changes when a file of the folder is added, removed, replaced or written to."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:  # a dangling link
                found.append((entry.name, 0, 0, 0))
            else:
                found.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(found))


def _result(folder: Path) -> Mapping[str, Any] | UnusableModel:
    """The configuration, or why the model is unusable."""
    try:
        config = checked_config(folder)
        check_supported(config)
        checked_tensors(folder, config)
        _check_tokenizer(folder)
        for name in _MORE_JSON:
            if os.path.lexists(folder / name):
                read_json(folder / name)
        check_templates(folder)
    except UnusableModel as error:
        return error
    return config


def _check_tokenizer(folder: Path) -> None:
    """Check that there is a tokenizer, and that its file is not truncated."""
    file = folder / _TOKENIZER
    if not os.path.lexists(file):
        if not any((folder / name).is_file() for name in CONVERTIBLE):
            raise DamagedModel(
                f"{folder} has no tokenizer: neither {_TOKENIZER} nor {', '.join(CONVERTIBLE)}; "
                "download the model again"
            )
        return
    with opened(file) as content:
        start = content.read(64)
        content.seek(max(0, os.fstat(content.fileno()).st_size - 64))
        end = content.read()
    if not (start.lstrip(_BLANK).startswith(b"{") and end.rstrip(_BLANK).endswith(b"}")):
        raise DamagedModel(f"{file} is damaged or cut short; download the file again")
