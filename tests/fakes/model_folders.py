"""Folders that look like models until they are loaded, and ways to damage their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from tests.fakes.foreign_weights import stored, write_safetensors

WEIGHTS = "model.safetensors"


def write_bare_model(
    folder: Path, *weights: str, model_type: object = "llama", **config: object
) -> Path:
    """Write a folder with a configuration, a tokenizer and weight files (one if none are named)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **config}))
    (folder / "tokenizer.json").write_text("{}")
    for number, name in enumerate(weights or (WEIGHTS,)):
        write_safetensors(folder / name, {f"w{number}": stored(np.ones(4))})
    return folder


def _replaced(content: bytes) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink(missing_ok=True)
        file.write_bytes(content)

    return damage


def _dangling(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to(file.parent / "blobs" / "gone")


def _folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def _pipe(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


# ways in which any file can be damaged, by name
DAMAGES: Mapping[str, Callable[[Path], None]] = {
    "empty": _replaced(b""),
    "binary": _replaced(bytes(range(256)) * 8),
    "UTF-16": _replaced('{"a": 1}'.encode("utf-16")),
    "a web page": _replaced(b"<!DOCTYPE html><html><body>404</body></html>"),
    "a Git LFS pointer": _replaced(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    ),
    "nested lists": _replaced(b"[" * 100_000),
    "nested objects": _replaced(b'{"a":' * 100_000),
    "nested tables": _replaced(b"a = " + b"[" * 20_000 + b"]" * 20_000),
    "a list": _replaced(b"[1, 2]"),
    "a number": _replaced(b"NaN"),
    "cut": _replaced(b'{"model_type": "llama", '),
    "a dangling link": _dangling,
    "a folder": _folder,
    "a pipe": _pipe,
}
