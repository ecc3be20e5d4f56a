"""What can be done with sessions, named branches of what is kept: the table of it, the command, the
answer. Leaf module.
"""

from __future__ import annotations

import uuid
from typing import Literal, TypeAlias

import msgspec

from holdfast.errors import SessionFailure

LONGEST_SESSION_ID = 256
MOST_METADATA_PAIRS = 16  # as OpenAI's metadata, and so are the lengths
LONGEST_METADATA_KEY, LONGEST_METADATA_VALUE = 64, 512
LONGEST_TTL_SECONDS = 10 * 365 * 86_400


OperationName: TypeAlias = Literal[
    "list", "open", "import", "export", "get", "update", "fork", "close"
]
# seconds since its last use; None: it never ends by itself
Ttl: TypeAlias = float | msgspec.UnsetType | None


class SessionOperation(msgspec.Struct, frozen=True):
    """One thing that can be done with sessions.

    HTTP's routes are made from it; the command line and the library go by it.
    """

    name: OperationName
    method: str
    path: str  # of HTTP, below SESSIONS_PATH
    takes: tuple[str, ...]  # fields of SessionCommand, besides those that each operation has
    title: str  # in the description of the API, as is the summary
    summary: str


SESSIONS_PATH = "/v1/sessions"
_OF_ONE = "/{session_id}"
_OPERATIONS = (
    SessionOperation("list", "GET", "", ("limit",), "list_sessions", "The sessions of a model, the last used first."),
    SessionOperation(
        "open", "POST", "", ("session_id", "ttl_seconds", "pinned", "metadata"), "open_session", "Begin a session."
    ),
    SessionOperation(
        "import", "POST", "/import", ("path", "session_id"), "import_session",
        "Take in a session from a file that was exported; it keeps its name unless `id` gives "
        "another one.",
    ),
    SessionOperation(
        "export", "GET", f"{_OF_ONE}/export", ("session_id", "path"), "export_session",
        "A session as one file, for another server with the same model, or to be kept.",
    ),
    SessionOperation("get", "GET", _OF_ONE, ("session_id",), "get_session", "One session."),
    SessionOperation(
        "update", "PATCH", _OF_ONE, ("session_id", "ttl_seconds", "pinned", "metadata"), "change_session",
        "Pin or unpin a session, or change how long it lives or its metadata.",
    ),
    SessionOperation(
        "fork", "POST", f"{_OF_ONE}/fork", ("session_id", "new_session_id", "ttl_seconds", "pinned"), "fork_session",
        "Begin a session where another one is; both go on from there, and share what they have in "
        "common.",
    ),
    SessionOperation(
        "close", "DELETE", _OF_ONE, ("session_id", "forget"), "close_session",
        "End a session. What it has read stays while there is room; with `forget`, what nobody "
        "else needs of it is deleted.",
    ),
)  # fmt: skip
SESSION_OPERATIONS: dict[OperationName, SessionOperation] = {
    operation.name: operation for operation in _OPERATIONS
}


def _new_call_id() -> str:
    return uuid.uuid4().hex


class SessionCommand(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something to be done with a tenant's sessions.

    Command of the link, answered by one `SessionAnswer`.

    Of the fields from `session_id` on, those count that the operation `takes`.
    """

    operation: OperationName
    tenant: str
    call_id: str = msgspec.field(default_factory=_new_call_id)
    session_id: str = ""  # of an import: what it is called here; empty: as in the file
    new_session_id: str = ""
    # left out: it stays, or is as the settings have it, or as the forked one's
    ttl_seconds: Ttl = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    forget: bool = False  # delete what no other session and no other branch stands on
    path: str = ""  # of the exported file
    limit: int = 1000  # list at most so many


# Whether a session's branches are kept from eviction. over_quota: only its beginning is, it has
# grown beyond what may be pinned.
PinState: TypeAlias = Literal["none", "kept", "over_quota"]


class SessionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it is now. Times are seconds since the epoch."""

    session_id: str
    created_at: float
    last_used_at: float
    expires_at: float | None
    pinned: bool
    pin_state: PinState
    requests: int
    branches: int
    tokens: int  # of the branch that was used last
    kept_tokens: int  # of these, in RAM or on disk
    ram_tokens: int
    disk_tokens: int  # on disk only
    # of those in RAM: in a live state, so that the next turn begins without a copy
    live_tokens: int
    kept_bytes: int  # of all branches in RAM and on disk, what several share counted once
    metadata: dict[str, str]
    forked_from: str = ""


class SessionAnswer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to one session command: the session it was about, or all of them, or why not."""

    call_id: str
    sessions: tuple[SessionInfo, ...] = ()
    failure: SessionFailure | None = None
    message: str = ""


def is_session_id(text: str) -> bool:
    """Whether a text can be the id of a session: it stands in paths, headers and logs."""
    return 0 < len(text) <= LONGEST_SESSION_ID and text.isprintable() and "/" not in text


def is_fit_metadata(metadata: dict[str, str]) -> bool:
    """Whether metadata may be kept: not too much, and text that UTF-8 can carry."""
    if len(metadata) > MOST_METADATA_PAIRS:
        return False
    return all(
        len(key) <= LONGEST_METADATA_KEY
        and len(value) <= LONGEST_METADATA_VALUE
        and _is_text(key)
        and _is_text(value)
        for key, value in metadata.items()
    )


def is_fit_ttl(seconds: float | None) -> bool:
    """Whether a session may live so long after its last use; None: until it is closed."""
    return seconds is None or 0 < seconds <= LONGEST_TTL_SECONDS


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
