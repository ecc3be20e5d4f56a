"""The folder with the images of prompts: a file is named by its contents and the tenant
(`models.image_files.image_name`).

Workers read the files. The least recently used files are removed when they take more space than
allowed, but none that a running request uses. The time of the last use is the file's modification
time, so that it outlives the server, and so that servers with a common folder know it.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from holdfast.errors import WorkerUnavailable
from holdfast.files import atomic_write
from holdfast.models.image_files import image_name, is_image_name

_UNFINISHED_FILE = re.compile(r"\.[0-9a-f]{60}\..+")  # the temporary files of `atomic_write`
_UNFINISHED_SECONDS = 3600.0
_KEPT_SHARE = 0.9  # of the allowed space, so that a full folder is not scanned for every image


def images_folder(store: str) -> Path:
    """The folder of images: in the store's folder or, without a store, among temporary files."""
    return Path(store or tempfile.gettempdir()) / "images"


class ImageFolder:
    """The images of all prompts. Thread-safe."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        """path: created when the first image is written."""
        self.path = path
        self._max_bytes = max_bytes
        # the images whose files this process has written or compared with their hash
        self._sizes: dict[str, int] = {}
        self._total_bytes: int | None = None  # of all files; None: not counted yet
        self._lock = threading.RLock()  # held while files are read, written and removed
        self._holds: Counter[str] = Counter()  # number of holds by image
        # never held for long, because `release_images` is called on event loops
        self._holds_lock = threading.Lock()

    def hold_image(self, data: bytes, *, tenant: str = "") -> str:
        """Hold the image with these bytes, so that its file is not removed until `release_images`.

        Returns the image's name. Raises WorkerUnavailable if the image cannot be written.
        """
        name = image_name(data, tenant=tenant)
        with self._lock:  # so that no other thread removes the file before it is held
            if not self._use_existing(name, data):
                self._write_file(name, data)
            with self._holds_lock:
                self._holds[name] += 1
        return name

    def hold_existing(self, name: str) -> bool:
        """Hold an image that is already in this folder, without its bytes. Returns False if its
        file is gone, or must be checked against its hash.
        """
        with self._lock:
            if not self._use_verified(name):
                return False
            with self._holds_lock:
                self._holds[name] += 1
        return True

    def release_images(self, names: Iterable[str]) -> None:
        """Let files be removed again, once for each hold. Does not wait for the disk."""
        with self._holds_lock:
            self._holds.subtract(names)
            self._holds = +self._holds

    def forget(self, names: Iterable[str]) -> None:
        """Compare files with their hashes before their next use: a worker could not read them."""
        for name in names:  # without the lock, to not wait for the disk
            self._sizes.pop(name, None)

    def check_invariants(self) -> None:
        """Assert that what is known of the files is true."""
        with self._lock, self._holds_lock:
            assert all(count > 0 for count in self._holds.values()), "an image is held negatively"
            for name, size in self._sizes.items():
                status = (self.path / name).stat()
                assert status.st_size == size, "a size is wrong"
                assert stat.S_IMODE(status.st_mode) == 0o600, "others can read an image"

    def _use_existing(self, name: str, data: bytes) -> bool:
        """Mark the image's file as used if it exists and is undamaged. Returns False otherwise."""
        if self._use_verified(name):
            return True
        try:
            if (self.path / name).read_bytes() != data:
                return False  # `_write_file` replaces the file
        except OSError:
            return False
        self._sizes[name] = len(data)
        return self._use_verified(name)

    def _use_verified(self, name: str) -> bool:
        """Record a use of an image's file, if the file exists and its contents were verified earlier.
        Returns False otherwise.
        """
        if name not in self._sizes:
            return False
        try:
            os.utime(self.path / name)
        except OSError:
            self._sizes.pop(name, None)
            return False
        return True

    def _write_file(self, name: str, data: bytes) -> None:
        """Write the image's file, and remove others if there are too many. Raises
        WorkerUnavailable.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_write(self.path / name) as file:
                file.write(data)
            self._sizes[name] = len(data)
            if self._total_bytes is not None:
                # too much if a file was replaced; `_evict` counts them
                self._total_bytes += len(data)
            self._evict(kept_name=name)
        except OSError as error:
            raise WorkerUnavailable(f"images cannot be kept: {error}") from error

    def _evict(self, *, kept_name: str) -> None:
        """If the files take more than the allowed space, remove the least recently used.

        Images may be released while this runs, but no new hold begins, because the caller has the lock.

        kept_name: an image that is not removed, although it is not held yet.
        """
        if self._total_bytes is not None and self._total_bytes <= self._max_bytes:
            return
        self._remove_unfinished()
        files = self._files()
        total_bytes = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total_bytes <= self._max_bytes * _KEPT_SHARE:
                break
            with self._holds_lock:
                is_held = name in self._holds
            if name == kept_name or is_held:
                continue
            (self.path / name).unlink(missing_ok=True)
            self._sizes.pop(name, None)
            total_bytes -= size
        self._total_bytes = total_bytes

    def _remove_unfinished(self) -> None:
        """Remove files that a process was writing when it died."""
        with os.scandir(self.path) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    is_ours = _UNFINISHED_FILE.fullmatch(entry.name) is not None
                    if is_ours and entry.stat().st_mtime < time.time() - _UNFINISHED_SECONDS:
                        os.unlink(entry.path)

    def _files(self) -> list[tuple[float, int, str]]:
        """All images in the folder: time of the last use, size and name."""
        files = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                if not is_image_name(entry.name):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        files.append((status.st_mtime, status.st_size, entry.name))
        return files
