"""Finds the local folder of a named model: a bundled model, a folder, or a model of the Hub, of which
it chooses and downloads the files.

Uses the Hub's own cache and variables (HF_HOME, HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Never
imports MLX. Imports huggingface_hub only to fetch or remove something, because that takes 0.2 to
0.3 s.

In the Hub's cache, a repository folder contains a model: its files as blobs, named by their hashes; a
snapshot folder for each commit, with links to blobs; and refs, which tell the commit of a branch or tag.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeAlias

from holdfast.config import ModelSettings
from holdfast.errors import DamagedModel, ModelLoadError, NoSuchModel, UnusableModel
from holdfast.files import atomic_write
from holdfast.models.adapter_folder import SEPARATOR
from holdfast.models.hub import (
    REVISION,
    ModelSource,
    check_reachable,
    explained,
    hub_errors,
    network_error,
    newer_commit,
    newest_commit,
)
from holdfast.models.hub_transfer import (
    fetch_blobs,
    partial_bytes,
    remove_partial_files,
    repository_folder,
)
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import check_is_folder

DEMO_ID = "holdfast-demo"
DEMO_IDS = (DEMO_ID, "holdfast-demo-draft")
Progress: TypeAlias = Callable[[str, float], None]  # takes a stage and the fraction that is done
OnBytes: TypeAlias = Callable[[int, int], None]
"""A function that several threads call with the bytes fetched so far and the bytes to fetch.

An exception stops the download.
"""
PullStage: TypeAlias = Literal["download", "checking"]
OnStep: TypeAlias = Callable[[PullStage, int, int], None]
"""A function that several threads call with the stage, the bytes done and the bytes in total.

An exception stops the pull.
"""
# the files that mlx-lm fetches, except Python files: only models with their own code need those
_FILE_PATTERNS = [
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
_HUB_ID = re.compile(rf"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>{REVISION.pattern}))?")
_CACHE_PREFIX = "models--"  # of repository folders
_SPARE_BYTES = 256 << 20  # space to leave free on the disk
_SHA256 = re.compile(r"[0-9a-f]{64}")  # the cache names files from Git LFS and Xet by this hash
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
_CHUNK_BYTES = 8 << 20
_logger = logging.getLogger(__name__)


def model_source(model: str, *, revision: str = "") -> ModelSource:
    """Return the source of a bundled id, a folder or a Hub id (`owner/name`,
    `owner/name@revision`).

    An existing folder takes precedence over a Hub id. Raises ModelLoadError for anything else.
    """
    if is_demo(model):
        return ModelSource(kind="bundled", name=model or DEMO_ID)
    folder = Path(os.path.expanduser(model))
    if os.path.exists(folder):  # unlike Path.exists, returns False for a name that is too long
        return ModelSource(kind="folder", name=str(folder))
    hub = hub_source(model, revision=revision)
    if hub is not None:
        return hub
    base, _, adapter = model.rpartition(SEPARATOR)
    if base and (is_demo(base) or hub_source(base) or os.path.exists(os.path.expanduser(base))):
        raise ModelLoadError(
            f"{model} is not a model, but names an adapter of {base}; to serve it: holdfast serve "
            f"{base} --adapter {adapter}=FOLDER"
        )
    similar_ids = difflib.get_close_matches(model, DEMO_IDS, n=1)
    if similar_ids:
        raise ModelLoadError(
            f"there is no model folder {model}; did you mean the bundled {similar_ids[0]}?"
        )
    if "/" in model or "\\" in model:
        check_is_folder(folder)
    raise ModelLoadError(
        f"there is no model folder {model}; the id of a model on the Hub has the form owner/name"
    )


def source_of(settings: ModelSettings) -> ModelSource:
    """Return the source of the model that the settings name. Raises ModelLoadError."""
    return model_source(settings.path, revision=settings.revision)


def hub_source(model: str, *, revision: str = "") -> ModelSource | None:
    """Return the Hub model with this id (`owner/name`, `owner/name@revision`); None if the text is
    not a Hub id. Raises ModelLoadError if `revision` is not a valid revision.
    """
    hub = _HUB_ID.fullmatch(model)
    if hub is None:
        return None
    return ModelSource(kind="hub", name=hub["id"], revision=hub["revision"] or revision)


def is_demo(model: str) -> bool:
    """Whether this is the id of a bundled model. An empty text means the first bundled model."""
    return model == "" or model in DEMO_IDS


def demo_folder(model: str = DEMO_ID) -> Path:
    """The folder of a bundled model. Raises ModelLoadError if there is no such model."""
    if not is_demo(model):
        raise ModelLoadError(
            f"{model!r} is not a bundled model; the bundled models are {', '.join(DEMO_IDS)}"
        )
    name = model or DEMO_ID
    folder = Path(str(resources.files("holdfast.models"))) / "bundled" / name
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"there is no bundled model {name} here; install Holdfast again")
    return folder


def served_id(settings: ModelSettings) -> str:
    """The id under which a model is served: `model.name`, or else the name of its folder, or its
    Hub id.
    """
    if settings.name:
        return settings.name
    source = source_of(settings)
    return Path(source.name).resolve().name if source.kind == "folder" else source.name


def check_present(settings: ModelSettings) -> None:
    """Raise ModelLoadError if the model is a folder that is missing or invalid. Uses no network."""
    source = source_of(settings)
    if source.kind == "folder":
        check_is_folder(Path(source.name))


def resolve_model(settings: ModelSettings, *, progress: Progress) -> Path:
    """Return the local folder of a model that can be loaded. Fetches it from the Hub if necessary.
    Blocks.

    progress: during a download, several threads call it with "download" and the fetched fraction of
    the bytes. Raises ModelLoadError with a one-line message; UnusableModel if its files are damaged
    or in an unsupported format.
    """
    source = source_of(settings)
    if source.kind == "bundled":
        return demo_folder(source.name)
    if source.kind == "folder":
        check_loadable(Path(source.name))
        return Path(source.name)
    selection = _selection(source, with_code=settings.trust_remote_code)
    try:
        # 1.0 only once, when all files are fetched
        folder, new_files = _fetch(
            source,
            selection,
            lambda done_bytes, total_bytes: progress(
                "download", min(done_bytes / total_bytes, 0.999)
            ),
        )
    except ModelLoadError as error:  # for example, because the disk is full
        with hub_errors(source):
            cached_folder = _complete_in_cache(source, selection)
        if cached_folder is None:
            raise
        _logger.warning("%s is used as it is in the cache: %s", source.name, error)
        folder, new_files = cached_folder, ()
    if new_files:
        check_files(new_files)
        progress("download", 1.0)
    check_snapshot(source, folder)
    return folder


def check_snapshot(source: ModelSource, folder: Path) -> Mapping[str, Any]:
    """Like `check_loadable`, for a model from the Hub: the message says how to download it again."""
    try:
        return check_loadable(folder)
    except DamagedModel as error:
        revision = f" --revision {source.revision}" if source.revision else ""
        command = f"holdfast models pull {source.name}{revision}"
        advice = ":" if str(error).endswith("again") else "; download it again:"
        raise DamagedModel(f"{error}{advice} {command}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledModel:
    """A model in the Hub's cache, with all its files and correct hashes."""

    folder: Path
    files: int  # how many
    file_bytes: int


def pull_model(source: ModelSource, *, with_code: bool = False, on_step: OnStep) -> PulledModel:
    """Fetch a model from the Hub and check all of its files. Resumes an interrupted download.

    Files that are damaged in the cache are fetched again. with_code: whether to fetch Python files,
    too. Raises ModelLoadError.
    """
    try:
        return _pull(source, with_code=with_code, on_step=on_step)
    except DamagedModel as error:  # the damaged files have been removed
        _logger.warning("%s: %s", source.name, error)
        return _pull(source, with_code=with_code, on_step=on_step)


def _pull(source: ModelSource, *, with_code: bool, on_step: OnStep) -> PulledModel:
    """As `pull_model`, but raises DamagedModel for damaged files, which it removes."""
    selection = _selection(source, with_code=with_code)
    folder, _ = _fetch(
        source,
        selection,
        lambda done_bytes, total_bytes: on_step("download", done_bytes, total_bytes),
    )
    files = [file for file in folder.rglob("*") if file.is_file()]
    total_bytes = sum(file.stat().st_size for file in files)
    checked_bytes = 0

    def count_checked(chunk_bytes: int) -> None:
        nonlocal checked_bytes
        checked_bytes += chunk_bytes
        on_step("checking", checked_bytes, total_bytes)

    check_files(files, read=count_checked)
    return PulledModel(folder=folder, files=len(files), file_bytes=total_bytes)


def _selection(source: ModelSource, *, with_code: bool) -> Mapping[str, Any]:
    """The arguments of huggingface_hub's `snapshot_download` that select the files of a model."""
    return {
        "repo_id": source.name,
        "allow_patterns": [*_FILE_PATTERNS, _CODE_PATTERN] if with_code else _FILE_PATTERNS,
    }


def _fetch(
    source: ModelSource, selection: Mapping[str, Any], on_bytes: OnBytes
) -> tuple[Path, tuple[Path, ...]]:
    """Fetch a model into the Hub's cache.

    A model that is complete there is fetched only if the Hub promptly reports a newer version.
    Files that are already complete are not fetched again.

    selection: `_selection`. Returns the snapshot folder and the fetched files, which are not checked
    yet. Without a network, it uses a revision that is complete in the cache. Raises ModelLoadError.
    """
    with hub_errors(source):
        cached_folder = _complete_in_cache(source, selection)
        if cached_folder is not None and not newer_commit(source, cached_folder.name):
            return cached_folder, ()
        return _fetch_newest(source, selection, on_bytes)


def _fetch_newest(
    source: ModelSource, selection: Mapping[str, Any], on_bytes: OnBytes
) -> tuple[Path, tuple[Path, ...]]:
    """Download what is missing of the newest commit; without the Hub, use the cached commit.
    Returns the folder and the new files.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import DryRunError, HfHubHTTPError, OfflineModeIsEnabled

    try:
        check_reachable()
        commit = newest_commit(source)
        arguments = {**selection, "revision": commit}
        files = snapshot_download(**arguments, dry_run=True, tqdm_class=_bar_class(None))
    except (
        *(ConnectionError, TimeoutError, ModelLoadError, DryRunError, HfHubHTTPError),
        *(OfflineModeIsEnabled, network_error()),
    ) as error:
        return _from_cache(source, selection, error), ()
    if not files:
        raise UnusableModel(
            f"{source.name} on the Hub has no files of an MLX model (config.json, "
            "model*.safetensors)"
        )
    missing = [file for file in files if file.will_download]
    missing_bytes = sum(file.file_size or 0 for file in missing)
    cache = Path(os.path.expanduser(constants.HF_HUB_CACHE))
    repository = repository_folder(cache, source.name)
    add_bytes = None
    if missing_bytes:
        _check_disk_space(source, missing_bytes - partial_bytes(repository))
        on_bytes(0, missing_bytes)
        add_bytes = _counter(total_bytes=missing_bytes, on_bytes=on_bytes)
        names = [file.filename for file in missing]
        fetch_blobs(source, commit, names, cache=cache, add=add_bytes)
    folder = Path(snapshot_download(**arguments, tqdm_class=_bar_class(add_bytes)))
    if source.revision != commit:
        _write_ref(repository, source.revision or "main", commit)
    remove_partial_files(repository)
    return folder, tuple(folder / file.filename for file in missing)


def _complete_in_cache(source: ModelSource, selection: Mapping[str, Any]) -> Path | None:
    """The snapshot folder of a model in the cache; None if a file is missing or damaged."""
    try:
        folder = _from_cache(source, selection, ModelLoadError("it is not in the cache"))
        check_loadable(folder)
    except ModelLoadError:
        return None
    return folder


def _write_ref(repository: Path, revision: str, commit: str) -> None:
    """Record in the cache which commit a revision is at. Called only for a complete model."""
    file = repository / "refs" / revision
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.is_file() or file.read_text() != commit:
            with atomic_write(file) as opened:
                opened.write(commit.encode())
    except OSError as error:  # a read-only cache is used unchanged
        _logger.warning("%s cannot be written: %s", file, error)


def _counter(*, total_bytes: int, on_bytes: OnBytes) -> Callable[[float], None]:
    """Return a function that adds up the bytes that several threads fetch."""
    done_bytes = 0
    lock = threading.Lock()

    def add_bytes(byte_count: float) -> None:
        nonlocal done_bytes
        with lock:
            done_bytes += int(byte_count)
            on_bytes(min(max(done_bytes, 0), total_bytes), total_bytes)

    return add_bytes


def _bar_class(add_bytes: Callable[[float], None] | None) -> type[Any]:
    """Create a progress bar class for huggingface_hub that draws nothing and only counts bytes.

    add_bytes: the function that counts them; None: bytes are not counted.
    """

    class Bar:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.total = options.get("total")
            self.n = 0.0
            # version 2 has two bars of bytes: one from the network, and a larger one to disk
            self._counts_bytes = (
                options.get("unit") == "B" and options.get("desc") != "Downloading bytes"
            )
            self.format_dict: dict[str, Any] = {}

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, count: float | None = 1) -> None:
            if add_bytes is not None and self._counts_bytes:
                add_bytes(count or 0)

        def __getattr__(self, name: str) -> Any:
            # all other methods only draw, so they do nothing here
            if name.startswith("__") or name in ("get_lock", "set_lock"):
                raise AttributeError(name)
            return lambda *args, **options: None

    return Bar


def _from_cache(source: ModelSource, selection: Mapping[str, Any], reason: Exception) -> Path:
    """Return the model's snapshot folder in the cache, for use without the Hub. Raises ModelLoadError,
    which explains `reason`, why the Hub is not used, if the cache does not have the model.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    try:
        revision = source.revision or None
        return Path(snapshot_download(**selection, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        cause = reason.__cause__ if isinstance(reason, DryRunError) else None
        raise explained(source, cause or reason) from reason


def _check_disk_space(source: ModelSource, missing_bytes: int) -> None:
    """Raise ModelLoadError if the missing files do not fit on the disk of the cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(os.path.expanduser(HF_HUB_CACHE))  # it may not exist yet
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free_bytes = shutil.disk_usage(folder).free
    if missing_bytes + _SPARE_BYTES > free_bytes:
        raise ModelLoadError(
            f"{missing_bytes / 1e9:.1f} GB of {source.name} are missing, but only "
            f"{free_bytes / 1e9:.1f} GB are free in {HF_HUB_CACHE}; set HF_HOME to another disk"
        )


def check_files(
    files: Iterable[Path], *, read: Callable[[int], None] = lambda chunk_bytes: None
) -> None:
    """Compare the files of a snapshot with their hashes, which are their names in the Hub's cache.

    Damaged files are removed, so that the next download fetches them again. read: called with the
    number of bytes of each chunk. Raises DamagedModel with the names of the damaged files.
    """
    damaged = [file for file in files if not _has_right_hash(file, read)]
    for file in damaged:
        os.unlink(file.resolve())
        file.unlink(missing_ok=True)
    if damaged:
        names = ", ".join(sorted(file.name for file in damaged))
        raise DamagedModel(
            f"files damaged by the download were removed: {names}; they must be fetched again"
        )


def _has_right_hash(file: Path, read: Callable[[int], None]) -> bool:
    """Whether a file matches its hash.

    Also True for copied (not linked) files, whose hash is unknown.
    """
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


def hub_cache_folder(environ: Mapping[str, str]) -> Path:
    """The folder of the Hub's cache, which may not exist. Follows huggingface_hub's `constants`."""
    home = environ.get("HOME") or "~"
    caches = environ.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    hub_home = environ.get("HF_HOME") or os.path.join(caches, "huggingface")
    path = (
        environ.get("HF_HUB_CACHE")
        or environ.get("HUGGINGFACE_HUB_CACHE")
        or os.path.join(hub_home, "hub")
    )
    # unlike Path.expanduser, this does not raise for a user without a home
    return Path(os.path.expanduser(os.path.expandvars(path)))


def cached_models(cache: Path) -> dict[str, Path]:
    """Return the models in a Hub cache, id → folder, sorted by id. Some may be incomplete."""
    folders = {_hub_id(name): _snapshot(cache / name) for name in _repository_names(cache)}
    return {hub_id: folder for hub_id, folder in folders.items() if folder is not None}


def _repository_names(cache: Path) -> list[str]:
    """The names of the models' folders in a Hub cache, sorted."""
    try:
        return sorted(name for name in os.listdir(cache) if name.startswith(_CACHE_PREFIX))
    except OSError:
        return []


def local_folder(source: ModelSource, environ: Mapping[str, str]) -> Path | None:
    """Return the folder of a model; None if that revision was never fetched.

    Raises ModelLoadError.
    """
    match source.kind:
        case "bundled":
            return demo_folder(source.name)
        case "folder":
            return Path(source.name)
    repository = _CACHE_PREFIX + source.name.replace("/", "--")
    return _snapshot(hub_cache_folder(environ) / repository, source.revision)


def hub_model_of(settings: ModelSettings, cache: Path) -> ModelSource | None:
    """Return the Hub model that the settings name, by its id or its folder in the cache; None for
    other models.
    """
    path = Path(settings.path)
    if path.is_relative_to(cache) and path != cache:
        name = path.relative_to(cache).parts[0]
        if name.startswith(_CACHE_PREFIX):
            return ModelSource(kind="hub", name=_hub_id(name))
    is_here = is_demo(settings.path) or os.path.exists(os.path.expanduser(settings.path))
    return None if is_here else hub_source(settings.path, revision=settings.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptedDownload:
    """The remains of a download that was never completed; can be removed like a model."""

    repository: Path  # its folder in the cache

    @property
    def expected_freed_size(self) -> int:
        """The bytes that `execute` frees."""
        return sum(file.stat().st_size for file in self.repository.rglob("*") if file.is_file())

    def execute(self) -> None:
        """Remove the files."""
        shutil.rmtree(self.repository)


def interrupted_downloads(cache: Path) -> dict[str, InterruptedDownload]:
    """The models in a Hub cache that were never downloaded completely, by id."""
    return {
        _hub_id(name): InterruptedDownload(repository=cache / name)
        for name in _repository_names(cache)
        if _snapshot(cache / name) is None and any((cache / name / "blobs").glob("*"))
    }


def removal_of(hub_id: str, cache: Path) -> Any:
    """Return an object that removes all revisions of a model: huggingface_hub's
    DeleteCacheStrategy, or an InterruptedDownload.

    Its `execute()` removes them. Raises NoSuchModel if the cache does not contain the model.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache_info = scan_cache_dir(cache)
    except CacheNotFound:
        raise NoSuchModel(
            f"{hub_id} has not been downloaded: there is no Hub cache at {cache}"
        ) from None
    revisions = [
        revision.commit_hash
        for repository in cache_info.repos
        if (repository.repo_type, repository.repo_id) == ("model", hub_id)
        for revision in repository.revisions
    ]
    if not revisions and (interrupted := interrupted_downloads(cache).get(hub_id)) is not None:
        return interrupted
    if not revisions:
        raise NoSuchModel(
            f"{hub_id} is not in the Hub's cache; `holdfast models ls` lists the models there"
        )
    return cache_info.delete_revisions(*revisions)


def _hub_id(name: str) -> str:
    """The id of the model whose repository folder has this name."""
    return name.removeprefix(_CACHE_PREFIX).replace("--", "/")


def _snapshot(repository: Path, revision: str = "") -> Path | None:
    """Return the snapshot folder of a revision; None if it does not exist.

    Without a revision, return the folder of the main branch, or that of the latest snapshot
    without a main branch.
    """
    ref = repository / "refs" / (revision or "main")
    try:
        snapshots = {path.name: path for path in (repository / "snapshots").iterdir()}  # by commit
        commit = ref.read_text().strip() if ref.is_file() else revision
        if commit in snapshots or revision:
            return snapshots.get(commit)
        return max(snapshots.values(), key=lambda path: path.stat().st_mtime, default=None)
    except (OSError, UnicodeDecodeError):
        return None
