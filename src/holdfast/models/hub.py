"""The boundary to the Hub: checks that it can be reached, resolves revisions, validates its
answers, and explains its errors.

Imports huggingface_hub ("the library") only to fetch something, because that takes 0.2 to 0.3 s. Its
answers may come from a mirror that HF_ENDPOINT names, so they are not trusted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from holdfast.errors import ModelLoadError, NoSuchModel

# for looking up the Hub's host name; no timeout of the HTTP library limits that time
_LOOKUP_SECONDS = 2.5
_PATIENCE_SECONDS = 2.0  # how long to wait before the warning that the Hub is slow
# how long to wait for the Hub's first answer; huggingface_hub itself tries for 23 s and prints each
# attempt
_REACH_SECONDS = 10.0
# how long to wait for the check whether a cached model is the newest version
_ASK_SECONDS = 2.0
# the longest silence of the Hub; for some requests, the library would wait forever
_SILENCE_SECONDS = 30.0
REVISION = re.compile(r"(?!\.)[\w.-]+(/(?!\.)[\w.-]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# a commit or hash of an answer: the library puts these into paths unchanged
_NAME = re.compile(r"[\w+=~-][\w.+=~-]{0,254}")
_COMMIT_HEADER = "x-repo-commit"
_ETAG_HEADERS = ("etag", "x-linked-etag")
# an ETag that is used as the name of a file: short enough for endings, and without their dots
_PLAIN_ETAG = re.compile(r"[A-Za-z0-9_+=~-]{1,200}")
_ETAG_DIGITS = 40  # of the hash that replaces an ETag
_TEMPORARY_STATUSES = frozenset({408, 425, 429})  # below 500; a later request may succeed
# keys of answers whose values are hashes, and paths of files
_HASH_KEYS = ("sha", "oid", "blobId", "xetHash", "sha256")
_PATH_KEYS = ("path", "rfilename")
# what the library raises if an answer is incomplete or malformed
_UNEXPECTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a model comes from.

    name: a bundled id, a folder, or a Hub id. revision: empty for the Hub's default.
    """

    kind: Literal["bundled", "folder", "hub"]
    name: str
    revision: str = ""

    def __post_init__(self) -> None:
        """Raise ModelLoadError if the revision is not valid, because it names a file in the cache."""
        if self.revision and not REVISION.fullmatch(self.revision):
            raise ModelLoadError(f"{self.revision!r} is not a branch, tag or commit on the Hub")

    @property
    def place(self) -> str:
        """The Hub id, or the folder without links, which tell whether two models are the same."""
        return str(Path(self.name).resolve()) if self.kind == "folder" else self.name


def check_reachable() -> None:
    """Check that the Hub answers, unless HF_HUB_OFFLINE is set.

    Runs on a thread, because the time of a DNS lookup cannot be limited. Raises ConnectionError or
    TimeoutError if the Hub does not answer, and ModelLoadError if the request could not be sent.
    """
    from urllib.request import getproxies

    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return
    endpoint = constants.ENDPOINT
    lookup_ended = threading.Event()
    failures: list[Exception] = []

    def ask_hub() -> None:
        try:
            if not getproxies():  # a proxy looks the name up itself
                socket.getaddrinfo(urlsplit(endpoint).hostname, None)
            lookup_ended.set()
            httpx.head(endpoint, timeout=_REACH_SECONDS)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:
            # includes invalid addresses and certificates, and proxies that need a package that is
            # missing
            failures.append(error)
        finally:
            lookup_ended.set()

    asking = threading.Thread(target=ask_hub, name="hub-reach", daemon=True)
    asking.start()
    if not lookup_ended.wait(_LOOKUP_SECONDS):
        raise TimeoutError(
            f"the name in {endpoint} could not be looked up within {_LOOKUP_SECONDS} s"
        )
    asking.join(_PATIENCE_SECONDS)
    if asking.is_alive():
        _logger.warning("%s is slow to answer; waiting up to %.0f s", endpoint, _REACH_SECONDS)
        asking.join(_REACH_SECONDS - _PATIENCE_SECONDS)
    if asking.is_alive():
        raise TimeoutError(f"no answer from {endpoint} within {_REACH_SECONDS:.0f} s")
    if failures:
        error = failures[0]
        if isinstance(error, (httpx.HTTPError, socket.gaierror)):
            raise ConnectionError(f"{endpoint}: {error}")
        raise ModelLoadError(f"{endpoint} could not be reached: {_one_line(error)}")


def newest_commit(source: ModelSource) -> str:
    """The commit at which the revision of a model is on the Hub now.

    Use it within `hub_errors`. Raises ModelLoadError if the Hub names none.
    """
    from huggingface_hub import HfApi

    if _COMMIT.fullmatch(source.revision):
        return source.revision
    info = HfApi().repo_info(source.name, revision=source.revision or None, timeout=_REACH_SECONDS)
    if not isinstance(info.sha, str) or not _COMMIT.fullmatch(info.sha):
        raise ModelLoadError(f"the Hub names no commit of {source.name}")
    return info.sha


def newer_commit(source: ModelSource, commit: str) -> str:
    """The newest commit of a cached model; empty if the cached commit is the newest, or if the Hub
    does not answer within _ASK_SECONDS.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or source.revision == commit:
        return ""

    answers: list[str | ModelLoadError] = []

    def ask_hub() -> None:
        try:
            with hub_errors(source):
                answers.append(newest_commit(source))
        except ModelLoadError as error:
            answers.append(error)

    # on a thread, because nothing limits the time of a DNS lookup
    asking = threading.Thread(target=ask_hub, name="hub-question", daemon=True)
    asking.start()
    asking.join(_ASK_SECONDS)
    answer = answers[0] if answers else ModelLoadError(f"no answer within {_ASK_SECONDS:g} s")
    if isinstance(answer, ModelLoadError):
        _logger.warning("%s is used as it is in the cache: %s", source.name, answer)
        return ""
    return "" if answer == commit else answer


def _check_answers() -> None:
    """Make huggingface_hub refuse answers that name files outside its cache.

    The library uses ETags, commits and hashes as file names, so a mirror could make it write files
    anywhere. Answers are checked as they arrive, so no call of the library can bypass the check. An
    ETag may be any text, so one that is not a plain name is replaced by its hash, except an empty
    one: it does not tell files apart, so it counts as missing.
    Also limits how long the Hub may be silent.
    """
    from huggingface_hub import set_client_factory
    from huggingface_hub.utils import _http

    current_factory = vars(_http)["_GLOBAL_CLIENT_FACTORY"]
    if getattr(current_factory, "checks_answers", False):
        return

    def checked_client() -> Any:
        client = current_factory()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check_answer]}
        client.timeout = _SILENCE_SECONDS
        return client

    vars(checked_client)["checks_answers"] = True
    set_client_factory(checked_client)


def _check_answer(response: Any) -> None:
    """Replace unusual ETags of an answer of the Hub, and raise ModelLoadError if the answer names a
    file outside the cache.
    """
    host = response.url.host
    for header in _ETAG_HEADERS:
        # the library strips an ETag in this way
        if not response.headers.get(header, "").lstrip("W/").strip('"'):
            response.headers.pop(header, None)
        elif (etag := _plain_value(response.headers.get(header))) and not _PLAIN_ETAG.fullmatch(
            etag
        ):
            digest = hashlib.sha256(etag.encode("utf-8", "surrogatepass")).hexdigest()
            # with a prefix, because the cache takes a bare hash for that of the file's content
            response.headers[header] = f'"etag-{digest[:_ETAG_DIGITS]}"'
    if (commit := response.headers.get(_COMMIT_HEADER)) is not None:
        _check_name(_plain_value(commit), key=_COMMIT_HEADER, host=host)
    is_json = "json" in response.headers.get("content-type", "")
    path = response.url.path
    is_description = "/api/" in path and "/resolve/" not in path  # not a streamed file
    if response.is_success and is_json and is_description:
        response.read()
        try:
            content = response.json()
        except (ValueError, RecursionError) as error:
            raise ModelLoadError(f"{host} did not answer with JSON: {_one_line(error)}") from None
        _check_content(content, host=host)


def _plain_value(header: str | None) -> str:
    """The value of an ETag or commit header without W/ and quotation marks; empty if it is missing."""
    return "" if header is None else header.removeprefix("W/").strip('"')


def _check_content(content: Any, *, host: str) -> None:
    """Raise ModelLoadError if the description of a model, or the list of its files, names a file
    outside the cache.
    """
    entries = content if isinstance(content, list) else [content]
    if isinstance(content, Mapping) and isinstance(content.get("siblings"), list):
        entries = [content, *content["siblings"]]
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise ModelLoadError(f"{host} did not answer as the Hub does")
        lfs = entry.get("lfs")
        for part in (entry, lfs if isinstance(lfs, Mapping) else {}):
            for key in _HASH_KEYS:
                if part.get(key) is not None:
                    _check_name(part[key], key=key, host=host)
        for key in _PATH_KEYS:
            if entry.get(key) is not None:
                _check_path(entry[key], host=host)


def _check_name(name: object, *, key: str, host: str) -> None:
    """Raise ModelLoadError unless a commit or hash is a plain file name. key: its key in the answer."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ModelLoadError(f"the answer of {host} is refused: it has {key} {_shortened(name)}")


def _check_path(path: object, *, host: str) -> None:
    """Raise ModelLoadError if a file's path leads out of the model's folder."""
    parts = path.split("/") if isinstance(path, str) else [""]
    is_safe = all(part.isprintable() and part not in ("", ".", "..") for part in parts)
    if not is_safe or "\\" in str(path):
        raise ModelLoadError(f"the answer of {host} is refused: it names a file {_shortened(path)}")


def _shortened(value: object) -> str:
    return repr(value)[:100]


@contextlib.contextmanager
def hub_errors(source: ModelSource) -> Iterator[None]:
    """Check the Hub's answers within the block, and turn its errors into a ModelLoadError whose
    message says in one line what to do.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, XetDownloadError

    _check_answers()
    try:
        yield
    except HFValidationError as error:
        raise ModelLoadError(
            f"{source.name} is neither a model folder nor an id on the Hub (owner/name)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise explained(source, error.__cause__ or error) from error
    except (OSError, XetDownloadError, network_error()) as error:
        raise explained(source, error) from error
    except _UNEXPECTED as error:
        raise ModelLoadError(
            f"{source.name} could not be fetched, because the Hub did not answer as expected "
            f"({_one_line(error)})"
        ) from error


def explained(source: ModelSource, error: BaseException) -> ModelLoadError:
    """Return an error whose message is one line and says what to do."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if isinstance(error, ModelLoadError):
        return error
    if isinstance(error, GatedRepoError):  # this is also a RepositoryNotFoundError
        return ModelLoadError(
            f"{source.name} is gated: accept its terms on the Hub and set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return NoSuchModel(f"{source.name} has no revision {source.revision or 'main'} on the Hub")
    if isinstance(error, RepositoryNotFoundError):
        return NoSuchModel(_not_found_message(source.name))
    if isinstance(error, HfHubHTTPError):
        return ModelLoadError(_refused_message(source.name, error.response.status_code))
    return ModelLoadError(_not_fetched_message(source.name, error))


def may_pass(error: BaseException) -> bool:
    """Whether a transfer that failed with this error may succeed if it is tried again."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        return status >= 500 or status in _TEMPORARY_STATUSES
    return isinstance(error, (network_error(), ConnectionError, TimeoutError))


def interrupted(source: ModelSource, error: BaseException) -> ModelLoadError:
    """The error for a download that was given up after several tries: says how to continue it."""
    from huggingface_hub.errors import HfHubHTTPError

    reason = _one_line(error)
    if isinstance(error, HfHubHTTPError):
        reason = f"the Hub answered {error.response.status_code}"
    revision = f" --revision {source.revision}" if source.revision else ""
    return ModelLoadError(
        f"the download of {source.name} was interrupted ({reason}); what has arrived is kept, and "
        f"this command continues from there: holdfast models pull {source.name}{revision}"
    )


def _not_found_message(name: str) -> str:
    """The Hub answers 404 for private models, too, so the message mentions the token."""
    from huggingface_hub import get_token

    hint = "or it is private and HF_TOKEN is not set"
    if get_token():
        hint = "or your token has no access to it"
    return f"there is no folder {name} here and no model {name} on the Hub, {hint}"


def _refused_message(name: str, status: int) -> str:
    if status in (401, 403):
        return f"the Hub refuses access to {name}: set HF_TOKEN to a token that may read it"
    return f"the Hub answered {status} when asked for {name}; try again later"


def _not_fetched_message(name: str, error: BaseException) -> str:
    """Why a model could not be fetched, for errors that are not an answer of the Hub."""
    from huggingface_hub.errors import IncompleteSnapshotError, OfflineModeIsEnabled

    match error:
        case OfflineModeIsEnabled():
            return (
                f"{name} is neither a folder here nor completely in the cache, and HF_HUB_OFFLINE "
                "forbids fetching it"
            )
        case IncompleteSnapshotError():
            return (
                f"only a part of {name} is in the cache, and the Hub cannot be reached to fetch "
                "the rest"
            )
        case OSError(errno=errno.ENOSPC):
            return (
                f"the disk is full: {name} could not be fetched completely; free some space and "
                "try again"
            )
        case OSError(errno=errno.EACCES | errno.EPERM | errno.EROFS):
            return f"the cache folder {error.filename} cannot be written: change it with HF_HOME"
    if isinstance(error, (network_error(), ConnectionError, TimeoutError)):
        return (
            f"the Hub cannot be reached, and {name} is neither a folder here nor completely in "
            f"the cache ({_one_line(error)})"
        )
    return f"{name} could not be fetched: {_one_line(error)}"


def network_error() -> type[Exception]:
    """The base class of errors of the HTTP library that this version of huggingface_hub uses."""
    from huggingface_hub import errors

    base_class: type[Exception] = vars(errors)["HTTPError"]
    return base_class


def _one_line(error: BaseException) -> str:
    """The type and message of an error, for the end of another message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")
