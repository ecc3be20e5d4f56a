"""From the name of a model to a local folder: a bundled model, a folder, or a model of the Hub.

Uses the Hub's own cache and variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Imports
huggingface_hub only to fetch something, and MLX never.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import hashlib
import logging
import os
import re
import shutil
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlsplit

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError, NoSuchModel
from holdfast.models.demo import DEMO_ID, DEMO_IDS, demo_folder, is_demo
from holdfast.models.model_folder import check_is_folder

Progress = Callable[[str, float], None]
OnBytes: TypeAlias = Callable[[int, int], None]
"""Called with the fetched and the missing bytes, by several threads. An exception ends the download."""
_STAGE = "download"
# what mlx-lm fetches, without Python files, which only models with code of their own need
_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
_CODE_PATTERN = "*.py"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_SPARE_BYTES = 256 << 20  # to leave free on the disk
_LOOKUP_SECONDS = 2.5  # to look up the Hub's name; nothing else limits that
_PATIENCE_SECONDS = 2.0  # until a warning that the Hub is slow
# for any answer of the Hub; huggingface_hub itself tries for 23 s and prints each attempt
_REACH_SECONDS = 10.0
_logger = logging.getLogger(__name__)
_SHA256 = re.compile(r"[0-9a-f]{64}")  # of files in Git LFS and Xet, such as weights
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    name: a bundled id, a folder, or a Hub id. revision: empty for the Hub's default.
    """

    kind: Literal["bundled", "folder", "hub"]
    name: str
    revision: str = ""


def model_source(model: str, *, revision: str = "") -> ModelSource:
    """The source of a bundled id, a folder or a Hub id (`owner/name`, `owner/name@revision`).

    An existing folder comes before a Hub id. Raises ModelLoadError for anything else.
    """
    if is_demo(model):
        return ModelSource(kind="bundled", name=model or DEMO_ID)
    folder = Path(os.path.expanduser(model))
    if folder.exists():
        return ModelSource(kind="folder", name=str(folder))
    hub = hub_source(model, revision=revision)
    if hub is None:
        near = difflib.get_close_matches(model, DEMO_IDS, n=1)
        if near:
            raise ModelLoadError(
                f"there is no model folder {model}; did you mean the bundled {near[0]}?"
            )
        if "/" in model or "\\" in model:
            check_is_folder(folder)
        raise ModelLoadError(
            f"there is no model folder {model}; a model on the Hub is written owner/name"
        )
    return hub


def hub_source(model: str, *, revision: str = "") -> ModelSource | None:
    """The model of the Hub with this id (`owner/name`, `owner/name@revision`); None for other texts."""
    hub = _HUB_ID.fullmatch(model)
    if hub is None:
        return None
    return ModelSource(kind="hub", name=hub["id"], revision=hub["revision"] or revision)


def served_id(settings: ModelSettings) -> str:
    """The id under which the model is served: its name in the settings, else folder name or id."""
    if settings.name:
        return settings.name
    source = model_source(settings.path, revision=settings.revision)
    return Path(source.name).resolve().name if source.kind == "folder" else source.name


def check_present(settings: ModelSettings) -> None:
    """Raise ModelLoadError if the model is a missing or invalid folder. Uses no network."""
    source = model_source(settings.path, revision=settings.revision)
    if source.kind == "folder":
        check_is_folder(Path(source.name))


def resolve_model(settings: ModelSettings, *, progress: Progress) -> Path:
    """The local folder of the model; fetches it from the Hub if necessary. Blocks.

    progress: called by several threads with "download" and the fraction of bytes, if something is
    fetched. Raises ModelLoadError with one line.
    """
    source = model_source(settings.path, revision=settings.revision)
    if source.kind == "bundled":
        return demo_folder(source.name)
    if source.kind == "folder":
        check_is_folder(Path(source.name))
        return Path(source.name)
    fetched = fetch(
        source,
        with_code=settings.trust_remote_code,
        # 1.0 only once, at the end
        on_bytes=lambda done, total: progress(_STAGE, min(done / total, 0.999)),
    )
    if fetched.new_files:
        check_files(fetched.new_files)
        progress(_STAGE, 1.0)
    return fetched.folder


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """A snapshot of a model in the Hub's cache. new_files: fetched just now, not checked yet."""

    folder: Path
    new_files: tuple[Path, ...] = ()


def fetch(source: ModelSource, *, with_code: bool = False, on_bytes: OnBytes) -> FetchedModel:
    """Fetch a model of the Hub into its cache; complete files in the cache are kept.

    Without a network, a complete revision in the cache is used. Raises ModelLoadError.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError

    patterns = [*_PATTERNS, _CODE_PATTERN] if with_code else _PATTERNS
    wanted: dict[str, Any] = {
        "repo_id": source.name,
        "revision": source.revision or None,
        "allow_patterns": patterns,
    }
    with hub_errors(source):
        try:
            check_reachable()
        except (ConnectionError, TimeoutError, ModelLoadError) as error:
            return FetchedModel(folder=_from_cache(source, wanted, error))
        try:
            files = snapshot_download(**wanted, dry_run=True, tqdm_class=_bar_class(None))
        except DryRunError as error:
            return FetchedModel(folder=_from_cache(source, wanted, error))
        missing = [file for file in files if file.will_download]
        missing_bytes = sum(file.file_size or 0 for file in missing)
        if not files:
            raise ModelLoadError(
                f"{source.name} on the Hub has no files of an MLX model (config.json, "
                "model*.safetensors)"
            )
        if missing_bytes:
            _check_disk(source, missing_bytes)
            on_bytes(0, missing_bytes)
        count = _counter(total_bytes=missing_bytes, on_bytes=on_bytes) if missing_bytes else None
        folder = Path(snapshot_download(**wanted, tqdm_class=_bar_class(count)))
        return FetchedModel(
            folder=folder, new_files=tuple(folder / file.filename for file in missing)
        )


@contextlib.contextmanager
def hub_errors(source: ModelSource) -> Iterator[None]:
    """Turn errors of the Hub into a ModelLoadError with one line that says what to do."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, XetDownloadError

    try:
        yield
    except HFValidationError as error:
        raise ModelLoadError(
            f"{source.name} is neither a model folder nor an id on the Hub (owner/name)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise _explained(source, error.__cause__ or error) from error
    except (OSError, XetDownloadError, _network_error()) as error:
        raise _explained(source, error) from error


def check_reachable() -> None:
    """Check that the Hub answers, unless HF_HUB_OFFLINE is set.

    Uses a thread, because nothing limits the time of a name lookup. Raises ConnectionError or
    TimeoutError if there is no answer, and ModelLoadError if the request could not be sent.
    """
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    endpoint = constants.ENDPOINT
    is_found = threading.Event()
    outcome: list[Exception | None] = []

    def ask() -> None:
        try:
            if not urllib.request.getproxies():  # a proxy looks the name up itself
                socket.getaddrinfo(urlsplit(endpoint).hostname, None)
            is_found.set()
            httpx.head(endpoint, timeout=_REACH_SECONDS)
            outcome.append(None)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:
            # also bad addresses and certificates, and proxies that need another package
            outcome.append(error)
        finally:
            is_found.set()

    asking = threading.Thread(target=ask, name="hub-reach", daemon=True)
    asking.start()
    if not is_found.wait(_LOOKUP_SECONDS):
        raise TimeoutError(
            f"the name in {endpoint} could not be looked up within {_LOOKUP_SECONDS} s"
        )
    asking.join(_PATIENCE_SECONDS)
    if asking.is_alive():
        _logger.warning("%s is slow to answer; waiting up to %.0f s", endpoint, _REACH_SECONDS)
        asking.join(_REACH_SECONDS - _PATIENCE_SECONDS)
    if asking.is_alive():
        raise TimeoutError(f"no answer from {endpoint} within {_REACH_SECONDS:.0f} s")
    if not outcome:
        raise ModelLoadError(f"{endpoint} could not be reached, for the reason above")
    error = outcome[0]
    if isinstance(error, (httpx.HTTPError, socket.gaierror)):
        raise ConnectionError(f"{endpoint}: {error}")
    if error is not None:
        raise ModelLoadError(f"{endpoint} could not be reached: {_one_line(error)}")


def _counter(*, total_bytes: int, on_bytes: OnBytes) -> Callable[[float], None]:
    """Adds up the bytes that several threads fetch."""
    done_bytes = 0
    lock = threading.Lock()

    def add(count: float) -> None:
        nonlocal done_bytes
        with lock:
            done_bytes += int(count)
            on_bytes(min(max(done_bytes, 0), total_bytes), total_bytes)

    return add


def _bar_class(add: Callable[[float], None] | None) -> type[Any]:
    """A progress bar for huggingface_hub that draws nothing and counts bytes."""

    class Bar:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.total = options.get("total")
            self.n = 0.0
            # version 2 has two bars of bytes: from the network, and the larger one to disk
            self._counts = options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            self.format_dict: dict[str, Any] = {}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, count: float | None = 1) -> None:
            if add is not None and self._counts:
                add(count or 0)

        def __getattr__(self, name: str) -> Any:
            # all other methods only draw
            if name.startswith("__") or name in ("get_lock", "set_lock"):
                raise AttributeError(name)
            return lambda *args, **options: None

    return Bar


def _from_cache(source: ModelSource, wanted: dict[str, Any], reason: Exception) -> Path:
    """The snapshot in the cache, if the Hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(**wanted, local_files_only=True))
    except LocalEntryNotFoundError:
        raise _explained(source, reason.__cause__ or reason) from reason


def _check_disk(source: ModelSource, missing_bytes: int) -> None:
    from huggingface_hub.constants import HF_HUB_CACHE

    place = Path(os.path.expanduser(HF_HUB_CACHE))  # may not exist yet
    while not place.exists() and place != place.parent:
        place = place.parent
    free = shutil.disk_usage(place).free
    if missing_bytes + _SPARE_BYTES > free:
        raise ModelLoadError(
            f"{missing_bytes / 1e9:.1f} GB of {source.name} are missing, but only "
            f"{free / 1e9:.1f} GB are free in {HF_HUB_CACHE}; set HF_HOME to another disk"
        )


def _explained(source: ModelSource, error: BaseException) -> ModelLoadError:
    """The error in one line that says what to do."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        IncompleteSnapshotError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, ModelLoadError):
        return error
    name = source.name
    is_unknown = isinstance(
        error, (RepositoryNotFoundError, RevisionNotFoundError)
    ) and not isinstance(error, GatedRepoError)
    kind = NoSuchModel if is_unknown else ModelLoadError
    match error:
        case GatedRepoError():
            text = f"{name} is gated: accept its terms on the Hub and set HF_TOKEN"
        case RevisionNotFoundError():
            text = f"{name} has no revision {source.revision or 'main'} on the Hub"
        case RepositoryNotFoundError() if get_token():
            text = (
                f"there is no folder {name} here and no model {name} on the Hub, or your token may "
                "not see it"
            )
        case RepositoryNotFoundError():
            text = (
                f"there is no folder {name} here and no model {name} on the Hub, or it is private "
                "and HF_TOKEN is not set"
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            text = f"the Hub refuses access to {name}: set HF_TOKEN to a token that may read it"
        case HfHubHTTPError():
            text = (
                f"the Hub answered {error.response.status_code} when asked for {name}; try again "
                "later"
            )
        case OfflineModeIsEnabled():
            text = (
                f"{name} is neither a folder here nor completely in the cache, and HF_HUB_OFFLINE "
                "forbids to fetch it"
            )
        case IncompleteSnapshotError():
            text = (
                f"{name} is in the cache only in part, and the Hub cannot be reached to fetch the "
                "rest"
            )
        case OSError() if error.errno == errno.ENOSPC:
            text = f"the disk is full: {name} could not be fetched completely"
        case OSError() if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            text = (
                f"the cache folder {error.filename} cannot be written: set HF_HOME to one that can"
            )
        case _ if isinstance(error, (_network_error(), ConnectionError, TimeoutError)):
            text = (
                f"the Hub cannot be reached, and {name} is neither a folder here nor completely in "
                f"the cache ({_one_line(error)})"
            )
        case _:
            text = f"{name} could not be fetched: {_one_line(error)}"
    return kind(text)


def _network_error() -> type[Exception]:
    """The base class of errors of huggingface_hub's HTTP library, which depends on its version."""
    from huggingface_hub import errors

    root: type[Exception] = vars(errors)["HTTPError"]
    return root


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


def check_files(files: Iterable[Path], *, read: Callable[[int], None] = lambda size: None) -> None:
    """Compare files of a snapshot with their hashes; removes damaged ones to be fetched again.

    In the Hub's cache a file's name is its hash. read: called with the bytes of each chunk. Raises
    ModelLoadError that names the damaged files.
    """
    damaged = [file for file in files if not _is_whole(file, read)]
    for file in damaged:
        os.unlink(file.resolve())
        file.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(sorted(file.name for file in damaged))
        raise ModelLoadError(
            f"damaged during the download, and removed: {names}; try again to fetch it"
        )


def _is_whole(file: Path, read: Callable[[int], None]) -> bool:
    """Also True for files that were copied instead of linked, whose hash is unknown."""
    blob = file.resolve()
    if _SHA256.fullmatch(blob.name):
        digest = hashlib.sha256()
    elif _GIT_SHA1.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return True
    with blob.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
            read(len(chunk))
    return digest.hexdigest() == blob.name
