"""Transfers single files from the Hub into its cache, and resumes interrupted transfers.

huggingface_hub 2 ("the library") downloads each file under a new name, drops it on any failure, and
resets its retry count only after 10 MB. So the transfers are made here: each file becomes a blob named
by its ETag, as in the library's cache; a partial one is `ETAG.incomplete`. The library then finds the
blobs and links them into the snapshot. A blob's lock shows that a process is fetching it.

The parameter `add` of functions here is called with each number of bytes that arrives, and with 0 while
waiting; it raises an error to stop the download.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from holdfast.errors import ModelLoadError
from holdfast.files import try_lock
from holdfast.models.hub import ModelSource, interrupted, may_pass, network_error

_CONNECTIONS = 8
_MOST_FRUITLESS_TRIES = 5  # tries in a row that bring not a single byte
_RETRY_SECONDS = 1.0  # doubled after each fruitless try
_PARTIAL = ".incomplete"


class _Stopped(Exception):
    """Another transfer of the same download has failed, or the download was stopped."""


def fetch_blobs(
    source: ModelSource,
    commit: str,
    names: Iterable[str],
    *,
    cache: Path,
    add: Callable[[float], None],
) -> None:
    """Fetch files of a commit as blobs. Use it within `hub_errors`.

    cache: the folder of the Hub's cache. add: called by several threads with numbers of bytes,
    including those of earlier attempts; negative if bytes are fetched again. If it raises an error,
    all transfers stop and the error is raised here.
    """
    stop = threading.Event()

    def add_or_stop(byte_count: float) -> None:
        if stop.is_set():
            raise _Stopped
        add(byte_count)

    with ThreadPoolExecutor(max_workers=_CONNECTIONS, thread_name_prefix="hub-file") as pool:
        tasks = [
            pool.submit(_fetch_blob, source, commit, name, cache=cache, add=add_or_stop)
            for name in names
        ]
        try:
            for task in as_completed(tasks):
                task.result()
        except BaseException as error:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            if may_pass(error):
                raise interrupted(source, error) from error
            raise


def repository_folder(cache: Path, hub_id: str) -> Path:
    """The folder of a model in the Hub's cache."""
    return cache / f"models--{hub_id.replace('/', '--')}"


def partial_bytes(repository: Path) -> int:
    """The size of the partial files that interrupted downloads of a model left."""
    # the library's partial files have a random part between two dots; they are never resumed
    resumable_files = (
        file for file in (repository / "blobs").glob(f"*{_PARTIAL}") if file.name.count(".") == 1
    )
    return sum(file.stat().st_size for file in resumable_files)


def remove_partial_files(repository: Path) -> None:
    """Remove the partial files that interrupted downloads of a model left, except files in use."""
    for file in (repository / "blobs").glob(f"*{_PARTIAL}"):
        with (
            contextlib.suppress(OSError),
            _locked(file.name.partition(".")[0], repository) as has_lock,
        ):
            if has_lock:
                file.unlink(missing_ok=True)


def _fetch_blob(
    source: ModelSource, commit: str, name: str, *, cache: Path, add: Callable[[float], None]
) -> None:
    """Fetch one file, or what is missing of it, unless the library can fetch it in chunks."""
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(source.name, name, revision=commit)
    metadata = _metadata(url, add=add)
    etag = metadata.etag
    if not etag:
        raise ModelLoadError(f"the Hub sends no ETag for {name} of {source.name}")
    if getattr(metadata, "xet_file_data", None) is not None and _has_xet():
        return  # the library fetches it in chunks, and keeps them
    repository = repository_folder(cache, source.name)
    blob = repository / "blobs" / etag
    blob.parent.mkdir(parents=True, exist_ok=True)
    with _waiting_for_lock(etag, repository, add=add):
        if blob.exists():
            return
        for library_file in blob.parent.glob(f"{etag}.*{_PARTIAL}"):  # never resumed
            library_file.unlink(missing_ok=True)
        partial = blob.with_name(f"{etag}{_PARTIAL}")
        with partial.open("ab") as file:
            has_right_size = _receive(url, file, metadata, add=add)
        if not has_right_size:
            partial.unlink()
            raise ModelLoadError(
                f"the Hub sent more than the {metadata.size:,} bytes of {name} of {source.name}"
            )
        os.replace(partial, blob)


def _metadata(url: str, *, add: Callable[[float], None]) -> Any:
    """The ETag, location and size of a file on the Hub. Tries several times."""
    from huggingface_hub import constants, get_hf_file_metadata

    fruitless_tries = 1
    while True:
        try:
            return get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        except (network_error(), ConnectionError, TimeoutError) as error:
            if fruitless_tries > _MOST_FRUITLESS_TRIES or not may_pass(error):
                raise
            _pause(fruitless_tries, add=add)
            fruitless_tries += 1


def _pause(fruitless_tries: int, *, add: Callable[[float], None]) -> None:
    """Wait before the next try, longer after each one in a row; `add` may stop the wait."""
    for _ in range(2 ** max(0, fruitless_tries - 1)):
        time.sleep(_RETRY_SECONDS)
        add(0)


def _has_xet() -> bool:
    """Whether the library can fetch files of the Hub's Xet storage in chunks."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


def _receive(url: str, file: IO[bytes], metadata: Any, *, add: Callable[[float], None]) -> bool:
    """Append the missing bytes, over several connections if necessary. Returns whether the file has
    its announced size; False if the Hub sent more.
    """
    size: int | None = metadata.size
    if size is not None and file.tell() > size:
        _start_over(file)
    add(file.tell())
    fruitless_tries = 0
    while size is None or file.tell() < size:
        start = file.tell()
        try:
            _receive_once(url, metadata.location, file, add=add)
            if size is None or file.tell() >= size:
                break
            raise ConnectionError(f"the connection ended after {file.tell():,} of {size:,} bytes")
        except (network_error(), ConnectionError, TimeoutError) as error:
            fruitless_tries = 0 if file.tell() > start else fruitless_tries + 1
            if fruitless_tries > _MOST_FRUITLESS_TRIES or not may_pass(error):
                raise
            _pause(fruitless_tries, add=add)
            metadata = _metadata(url, add=add)  # the location may expire
    return size is None or file.tell() == size


def _receive_once(
    url: str, location: str, file: IO[bytes], *, add: Callable[[float], None]
) -> None:
    """Append the bytes that one connection delivers. location: where the Hub says that `url` is."""
    from huggingface_hub import constants, get_session, hf_raise_for_status

    # this function is public, but untyped
    headers = importlib.import_module("huggingface_hub.utils").build_hf_headers()
    headers["accept-encoding"] = "identity"  # so that ranges refer to bytes of the file
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is meant for the Hub, not its storage
    start = file.tell()
    if start:
        headers["range"] = f"bytes={start}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", location, headers=headers, timeout=timeout) as response:
        hf_raise_for_status(response)
        if start and response.status_code != 206:  # the server does not support ranges
            _start_over(file)
            add(-start)
        for chunk in response.iter_bytes():
            file.write(chunk)
            add(len(chunk))


def _start_over(file: IO[bytes]) -> None:
    """Empty the file, so that it is fetched from the beginning."""
    file.seek(0)
    file.truncate()


def _lock_path(etag: str, repository: Path) -> Path:
    """The library's own lock file of a blob, so that the library does not write the file while it
    is held.
    """
    return repository.parent / ".locks" / repository.name / f"{etag}.lock"


@contextlib.contextmanager
def _locked(etag: str, repository: Path) -> Iterator[bool]:
    """Hold the lock of a blob, if it is free. Yields whether it is held."""
    path = _lock_path(etag, repository)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield try_lock(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def _waiting_for_lock(
    etag: str, repository: Path, *, add: Callable[[float], None]
) -> Iterator[None]:
    """Hold the lock of a blob, after waiting for the process that is fetching it. `add` may stop
    the wait.
    """
    while True:
        with _locked(etag, repository) as has_lock:
            if has_lock:
                yield
                return
        time.sleep(_RETRY_SECONDS)
        add(0)
