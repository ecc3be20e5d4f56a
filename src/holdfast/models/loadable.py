"""Checks whether the model in a folder can be loaded: all files are present, undamaged, and in a
format that is read correctly.

The check reads headers and small JSON files. Its result is cached until a file of the folder
changes, so that checking hundreds of models again takes only one `stat` per file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from holdfast.errors import DamagedModel, ModelLoadError, UnusableModel
from holdfast.lru_cache import LruCache
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
_MOST_RESULTS = 1024  # how many to cache
_TOKENIZER = "tokenizer.json"
# read when a model is loaded; all are optional
_MORE_JSON = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
)
_BLANK = b" \t\r\n"
# name, inode, bytes and modification time of each file of a folder
_Signature: TypeAlias = tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Checked:
    """The result of a check."""

    signature: _Signature  # of the folder's files: a new one requires a new check
    config: Mapping[str, Any] | UnusableModel  # or why the model is unusable
    can_chat: bool = False  # whether it has a chat template


_results: LruCache[Path, _Checked] = LruCache(_MOST_RESULTS)


def check_loadable(folder: Path) -> Mapping[str, Any]:
    """Return the configuration if the model in a folder can be loaded.

    Raises UnusableModel with the reason, and ModelLoadError if a file cannot be read at the moment.
    Thread-safe.
    """
    config = _checked(folder).config
    if isinstance(config, UnusableModel):
        raise type(config)(str(config))
    return config


def can_chat(folder: Path) -> bool:
    """Whether a loadable model has a chat template. Raises ModelLoadError. Thread-safe."""
    return _checked(folder).can_chat


def _checked(folder: Path) -> _Checked:
    """The result for a folder, cached until its files change. Raises ModelLoadError."""
    check_is_folder(folder)
    try:
        signature = _signature(folder)
        result = _results.get(folder)
        if result is None or result.signature != signature:
            result = _check(folder, signature)
            _results.put(folder, result)
    except OSError as error:
        raise ModelLoadError(f"{folder} cannot be read: {error.strerror or error}") from None
    return result


def _signature(folder: Path) -> _Signature:
    """A value that changes when a file of the folder is added, removed, replaced or written to."""
    signature = []
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                status = entry.stat()
            except OSError:  # a dangling link
                signature.append((entry.name, 0, 0, 0))
            else:
                signature.append((entry.name, status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(sorted(signature))


def _check(folder: Path, signature: _Signature) -> _Checked:
    """Check a model. Raises ModelLoadError and OSError if a file cannot be read at the moment."""
    from holdfast.models.chat_templates import check_templates, template_sources  # reads jinja2

    try:
        config = checked_config(folder)
        check_supported(config)
        checked_tensors(folder, config)
        _check_tokenizer(folder)
        for name in _MORE_JSON:
            if os.path.lexists(folder / name):
                read_json(folder / name)
        check_templates(folder)
        has_template = bool(template_sources(folder))
    except UnusableModel as error:
        return _Checked(signature=signature, config=error)
    return _Checked(signature=signature, config=config, can_chat=has_template)


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
