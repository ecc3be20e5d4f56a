"""Hashes the files of a model, whole, on a thread of its own while they are loaded, and tells
whether they stayed as they were.

What is promised: the hashes are those of what was in memory when the load ended. So each file is
looked at before the load begins and after it has ended, and what could have changed without a trace
is hashed a second time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import xxhash

from holdfast.errors import ModelLoadError
from holdfast.models.hash_cache import FileStamp, HashCache, stamp_from, stamp_of

PIECE_BYTES = 4 << 20  # hashing and reading let other threads run for as long as such a piece takes

ListFiles = Callable[[], Mapping[str, Path]]


class ModelChanged(ModelLoadError):
    """A file of the model was changed while it was loaded: what is in memory may be of no version
    at all.
    """


class FileHashing:
    """The hashes of all listed files.

    Make it before the first of them is read, ask for the result after the last.

    The thread knows nothing of MLX. Use as a context manager: leaving it early ends the thread.
    """

    def __init__(self, list_files: ListFiles, *, cache: HashCache) -> None:
        """list_files: name → path of everything that counts; asked twice, because files may come
        and go.
        """
        self._list_files, self._cache = list_files, cache
        self._began_ns = time.time_ns()
        self._before = _stamps(list_files())
        self._stop = threading.Event()
        self._hashes: dict[str, str] = {}
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-hashing", daemon=False)
        self._thread.start()

    def __enter__(self) -> FileHashing:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the thread, whatever it still does."""
        self._stop.set()
        self._thread.join()

    def result(self) -> Mapping[str, str]:
        """Wait for the hashes, by name.

        Call when everything has been read. Raises ModelChanged, ModelLoadError.
        """
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self._look_again()
        again_ns = time.time_ns()
        unsettled = {
            name: known
            for name, known in self._before.items()
            if not known[1].is_settled(self._began_ns)
        }
        for name, (path, stamp) in unsettled.items():
            if self._hash(path, stamp) != self._hashes[name]:
                raise _changed(path)
        self._look_again()
        for name, (_, stamp) in self._before.items():
            if stamp.is_settled(again_ns if name in unsettled else self._began_ns):
                self._cache.add(stamp, self._hashes[name])
        self._cache.save()
        return self._hashes

    def _look_again(self) -> None:
        """Raise ModelChanged if any file is not what it was."""
        now = _stamps(self._list_files())
        for name in sorted(self._before.keys() | now.keys()):
            if self._before.get(name) != now.get(name):
                raise _changed((self._before.get(name) or now[name])[0])

    def _run(self) -> None:
        try:
            for name, (path, stamp) in self._before.items():
                self._hashes[name] = self._cache.find(stamp) or self._hash(path, stamp)
        except ModelLoadError as error:
            self._failure = error

    def _hash(self, path: Path, stamp: FileStamp) -> str:
        """The hash of the file that looked like `stamp`.

        Raises ModelChanged when it is another now or gone, ModelLoadError.
        """
        digest = xxhash.xxh3_128()
        piece = memoryview(bytearray(min(PIECE_BYTES, max(stamp.size, 1))))
        try:
            with open(path, "rb", buffering=0) as file:
                if stamp_from(os.fstat(file.fileno())) != stamp:
                    raise _changed(path)
                while (count := file.readinto(piece)) and not self._stop.is_set():
                    digest.update(piece[:count])
        except FileNotFoundError:
            raise _changed(path) from None
        except OSError as error:
            raise ModelLoadError(f"a file of the model cannot be read: {error}") from error
        return digest.hexdigest()


def _stamps(files: Mapping[str, Path]) -> dict[str, tuple[Path, FileStamp]]:
    """Path and stamp of each file that is there."""
    found = {}
    for name, path in files.items():
        try:
            found[name] = (path, stamp_of(path))
        except (FileNotFoundError, NotADirectoryError):
            continue  # who loads it says so; here it is one that came or went
        except OSError as error:
            raise ModelLoadError(f"a file of the model cannot be read: {error}") from error
    return found


def _changed(path: Path) -> ModelChanged:
    return ModelChanged(f"{path} was changed while the model was loaded")
