"""Keeps the features of images, in RAM and on disk, so that a vision tower runs once per image.

A file holds the features of one image by one model, as safetensors with the checksum of its arrays
in the metadata. A file that is damaged is deleted and computed again. All models share a folder; it
is bounded, and the features that were used longest ago go first.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO, cast

import mlx.core as mx
import numpy as np
import xxhash

from holdfast.files import atomic_write
from holdfast.worker.vision.model import ImageFeatures

logger = logging.getLogger("holdfast.cache")
FEATURE_RAM_BYTES = 256 << 20
FEATURE_DISK_BYTES = 4 << 30
_SUFFIX = ".safetensors"
_CHECKSUM = "xxh3_128"
_FINGERPRINT_DIGITS = 32  # 128 bits


class FeatureCache:
    """Features by the name of their image (a hash). Device thread only."""

    def __init__(
        self, folder: Path | None, *, fingerprint: str, ram_bytes: int, disk_bytes: int
    ) -> None:
        """folder: None: features are only kept in memory. fingerprint: of the model. ram_bytes,
        disk_bytes: how much may be kept.
        """
        self._folder = folder
        self._prefix = fingerprint[:_FINGERPRINT_DIGITS]
        self._most_ram_bytes = ram_bytes
        self._most_disk_bytes = disk_bytes
        self._in_ram: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._ram_bytes = 0

    def free_ram(self) -> None:
        self._in_ram.clear()
        self._ram_bytes = 0

    def has(self, image: str) -> bool:
        """Whether the features of an image are cached; they may be damaged."""
        if image in self._in_ram:
            return True
        # unlike `Path.is_file`, returns False if the disk cannot tell
        return self._folder is not None and os.path.isfile(self._path(self._folder, image))

    def find(self, image: str) -> ImageFeatures | None:
        """The features of an image; None if they are not kept, or damaged."""
        features = self._in_ram.get(image)
        if features is not None:
            self._in_ram.move_to_end(image)
            return features
        features = self._read(image)
        if features is not None:
            self._put_in_ram(image, features)
        return features

    def add(self, image: str, features: ImageFeatures) -> bool:
        """Keep the features of an image. Returns whether they are also on disk; a full or missing
        disk is only logged.
        """
        self._put_in_ram(image, features)
        if self._folder is None:
            return False
        try:
            self._write(self._folder, image, features)
            self._evict_files(self._folder)
        except OSError as error:
            logger.warning("the features of an image are not written to disk: %s", error)
            return False
        return True

    def _put_in_ram(self, image: str, features: ImageFeatures) -> None:
        """Keep features in RAM, and drop those used longest ago beyond the limit."""
        replaced = self._in_ram.pop(image, None)
        self._ram_bytes += features.nbytes - (0 if replaced is None else replaced.nbytes)
        self._in_ram[image] = features
        while self._ram_bytes > self._most_ram_bytes and len(self._in_ram) > 1:
            _, dropped = self._in_ram.popitem(last=False)
            self._ram_bytes -= dropped.nbytes

    def _read(self, image: str) -> ImageFeatures | None:
        """Read features from disk; None if there are none. A damaged file is deleted."""
        if self._folder is None:
            return None
        path = self._path(self._folder, image)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:  # this says nothing about the content
            logger.warning("the features of an image cannot be read: %s", error)
            return None
        try:
            loaded: Any = mx.load(io.BytesIO(content), format="safetensors", return_metadata=True)
            arrays, metadata = loaded
            mx.eval(list(arrays.values()))
            if _checksum(arrays) != metadata.get(_CHECKSUM):
                raise ValueError("the checksum differs")
            features = ImageFeatures.of_arrays(arrays)
        except (RuntimeError, ValueError, KeyError) as error:
            logger.warning("the features of an image are computed again: %s: %s", path, error)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return features

    def _write(self, folder: Path, image: str, features: ImageFeatures) -> None:
        """Write features to a separate file. Raises OSError."""
        arrays = features.arrays()
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(self._path(folder, image)) as file:
            mx.save_safetensors(
                cast("BinaryIO", file), arrays, metadata={_CHECKSUM: _checksum(arrays)}
            )

    def _path(self, folder: Path, image: str) -> Path:
        return folder / f"{self._prefix}-{image}{_SUFFIX}"

    def _evict_files(self, folder: Path) -> None:
        """Delete the files used longest ago, of all models, beyond the limit; the latest stays."""
        files_by_age = []
        for path in folder.glob(f"*{_SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files_by_age.append((status.st_mtime, status.st_size, path))
        total_bytes = sum(size for _, size, _ in files_by_age)
        for _, size, path in sorted(files_by_age)[:-1]:
            if total_bytes <= self._most_disk_bytes:
                return
            path.unlink(missing_ok=True)
            total_bytes -= size


def _checksum(arrays: dict[str, mx.array]) -> str:
    """A hash of the names, types, shapes and contents of all arrays."""
    digest = xxhash.xxh3_128()
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.array(array.reshape(-1).view(mx.uint8)).tobytes())
    return digest.hexdigest()
