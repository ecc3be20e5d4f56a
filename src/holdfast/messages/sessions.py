"""Frozen messages about sessions, named branches of what is kept. Leaf module; the link carries them like `messages`."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

LONGEST_SESSION_ID = 256
MOST_METADATA_PAIRS = 16  # as OpenAI's metadata, and so are the lengths
LONGEST_METADATA_KEY, LONGEST_METADATA_VALUE = 64, 512
LONGEST_TTL_SECONDS = 10 * 365 * 86_400


class OpenSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin a session. Command of the link, answered by one `SessionAnswer` like all that follow."""

    call_id: str
    tenant: str
    session_id: str
    ttl_seconds: float | msgspec.UnsetType | None = msgspec.UNSET  # since its last use; None: it never ends by itself
    pinned: bool = False
    metadata: dict[str, str] = {}


class ListSessions(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for the sessions of a tenant, the last used first."""

    call_id: str
    tenant: str
    limit: int = 1000


class GetSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ask for one session."""

    call_id: str
    tenant: str
    session_id: str


class UpdateSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Change a session; what is left out stays."""

    call_id: str
    tenant: str
    session_id: str
    ttl_seconds: float | msgspec.UnsetType | None = msgspec.UNSET
    pinned: bool | msgspec.UnsetType = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ForkSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin a session where another one is; both go on from there."""

    call_id: str
    tenant: str
    session_id: str
    new_session_id: str
    ttl_seconds: float | msgspec.UnsetType | None = msgspec.UNSET  # left out: as the other's
    pinned: bool = False


class CloseSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a session. What it has read stays as long as there is room, unless it is to be forgotten."""

    call_id: str
    tenant: str
    session_id: str
    forget: bool = False  # delete what no other session and no other branch stands on


class ExportSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Write a session into a portable file."""

    call_id: str
    tenant: str
    session_id: str
    path: str


class ImportSession(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take in a session from a portable file."""

    call_id: str
    tenant: str
    path: str
    session_id: str = ""  # empty: as it is called in the file


SessionCommand: TypeAlias = (
    OpenSession | ListSessions | GetSession | UpdateSession | ForkSession | CloseSession | ExportSession | ImportSession
)


class PinState(enum.Enum):
    """Whether a session's branches are kept from eviction."""

    NONE = "none"
    KEPT = "kept"
    OVER_QUOTA = "over_quota"  # it has grown beyond what may be pinned: only its beginning is


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
    kept_bytes: int  # of all branches in RAM and on disk, what several share counted once
    metadata: dict[str, str]
    forked_from: str = ""


class SessionFailure(enum.Enum):
    """Why a session command was not carried out."""

    NOT_FOUND = "not_found"
    EXISTS = "exists"
    OVER_QUOTA = "over_quota"
    NO_ROOM = "no_room"  # neither RAM nor disk can take it in
    TOO_MANY = "too_many"
    BAD_FILE = "bad_file"
    OTHER_MODEL = "other_model"
    INVALID = "invalid"  # not the id of a session, or what it is to have cannot be kept
    BUSY = "busy"  # too many exports and imports are under way
    OFF = "off"  # this worker keeps nothing
    FAILED = "failed"


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
        len(key) <= LONGEST_METADATA_KEY and len(value) <= LONGEST_METADATA_VALUE and _is_text(key) and _is_text(value)
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
