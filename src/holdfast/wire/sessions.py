"""Messages about sessions, which are named branches of the prefix cache: the table of operations,
the command, the answer.
"""

from __future__ import annotations

import uuid
from typing import Literal, TypeAlias

import msgspec

from holdfast.errors import SessionFailure
from holdfast.wire.kv import CacheScope

LONGEST_SESSION_ID = 256
# those of OpenAI's API
MOST_METADATA_PAIRS = 16
LONGEST_METADATA_KEY = 64
LONGEST_METADATA_VALUE = 512
LONGEST_TTL_SECONDS = 10 * 365 * 86_400


OperationName: TypeAlias = Literal[
    "list", "open", "import", "export", "get", "update", "fork", "close"
]
# seconds since the last use; None: the session never expires
Ttl: TypeAlias = float | msgspec.UnsetType | None


class SessionOperation(msgspec.Struct, frozen=True):
    """One operation on sessions. HTTP routes, commands and library are generated from the table."""

    name: OperationName
    method: str
    path: str  # the HTTP path below SESSIONS_PATH
    # the fields of SessionCommand that this operation uses, besides those of every operation
    takes: tuple[str, ...]
    title: str  # the name in the description of the API
    summary: str


SESSIONS_PATH = "/v1/sessions"
_ONE = "/{session_id}"  # path of one session
_OPERATIONS = (
    SessionOperation("list", "GET", "", ("limit",), "list_sessions", "List the sessions of a model, most recently used first."),
    SessionOperation(
        "open", "POST", "", ("session_id", "ttl_seconds", "pinned", "metadata"), "open_session", "Open a session."
    ),
    SessionOperation(
        "import", "POST", "/import", ("path", "session_id"), "import_session",
        "Import an exported session. The session keeps its id unless `id` is set.",
    ),
    SessionOperation(
        "export", "GET", f"{_ONE}/export", ("session_id", "path"), "export_session",
        "Export a session as one file, for a backup or another server with the same model.",
    ),
    SessionOperation("get", "GET", _ONE, ("session_id",), "get_session", "Get one session."),
    SessionOperation(
        "update", "PATCH", _ONE, ("session_id", "ttl_seconds", "pinned", "metadata"), "change_session",
        "Pin or unpin a session, or change its expiry or metadata.",
    ),
    SessionOperation(
        "fork", "POST", f"{_ONE}/fork", ("session_id", "new_session_id", "ttl_seconds", "pinned"), "fork_session",
        "Open a session that continues from the current state of another one. The two sessions "
        "share the common prefix.",
    ),
    SessionOperation(
        "close", "DELETE", _ONE, ("session_id", "forget"), "close_session",
        "Close a session. Its prefix stays cached while there is room. With `forget`, the part of "
        "the prefix that no other session shares is deleted.",
    ),
)  # fmt: skip
SESSION_OPERATIONS: dict[OperationName, SessionOperation] = {
    operation.name: operation for operation in _OPERATIONS
}


def _new_call_id() -> str:
    return uuid.uuid4().hex


class SessionCommand(CacheScope, frozen=True, kw_only=True, tag=True):
    """An operation on a tenant's sessions. The worker answers it with one `SessionAnswer`.

    Of the fields from `session_id` on, only those in the operation's `SessionOperation.takes` are
    used.
    """

    operation: OperationName
    call_id: str = msgspec.field(default_factory=_new_call_id)
    session_id: str = ""  # for an import: the id of the new session; empty: the id in the file
    new_session_id: str = ""  # for a fork
    # if unset: unchanged (update), the default (open), or the value of the forked session (fork)
    ttl_seconds: Ttl = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    forget: bool = False  # whether to delete cached blocks that no other session or branch shares
    path: str = ""  # path of the file to export or import
    limit: int = 1000  # the maximum number of sessions in a list


# Whether a session's branches are protected from eviction. over_quota: the session exceeds the
# quota for pins, so only its first part is protected. incomplete: a part is gone, for example
# because its file was damaged; the session's next request recomputes it.
PinState: TypeAlias = Literal["none", "kept", "over_quota", "incomplete"]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The current status of a session. Times are seconds since the epoch."""

    session_id: str
    created_at: float
    last_used_at: float
    expires_at: float | None  # None: never
    pinned: bool
    pin_state: PinState
    requests: int
    branches: int
    tokens: int  # in the branch that was used last
    kept_tokens: int  # of `tokens`: cached in RAM or on disk
    ram_tokens: int  # of `kept_tokens`: in RAM
    disk_tokens: int  # of `kept_tokens`: on disk only
    # of `ram_tokens`: in a live state, so that the next turn begins without a copy
    live_tokens: int
    kept_bytes: int  # cached blocks of all branches, in RAM and on disk; shared blocks count once
    metadata: dict[str, str]
    forked_from: str = ""  # id of the session; empty: not forked


class SessionAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to a session command: the sessions concerned, or why the command failed."""

    call_id: str
    sessions: tuple[SessionInfo, ...] = ()
    failure: SessionFailure | None = None  # None: it succeeded
    message: str = ""  # why it failed


def is_session_id(text: str) -> bool:
    """Whether a text can be a session's id. The id is used in paths, headers and logs."""
    return 0 < len(text) <= LONGEST_SESSION_ID and text.isprintable() and "/" not in text


def is_valid_metadata(metadata: dict[str, str]) -> bool:
    """Whether metadata is within the limits and can be encoded as UTF-8."""
    if len(metadata) > MOST_METADATA_PAIRS:
        return False
    return all(
        len(key) <= LONGEST_METADATA_KEY
        and len(value) <= LONGEST_METADATA_VALUE
        and _is_text(key)
        and _is_text(value)
        for key, value in metadata.items()
    )


def is_valid_ttl(seconds: float | None) -> bool:
    """Whether a time to live is valid. None is valid: the session lives until it is closed."""
    return seconds is None or 0 < seconds <= LONGEST_TTL_SECONDS


def _is_text(text: str) -> bool:
    """Whether the text has no lone surrogates, which UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
