"""What the session endpoints take and give."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from holdfast.wire.sessions import (
    LONGEST_METADATA_KEY,
    LONGEST_METADATA_VALUE,
    LONGEST_SESSION_ID,
    LONGEST_TTL_SECONDS,
    MOST_METADATA_PAIRS,
    SessionInfo,
    is_session_id,
)

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _session_id(text: str) -> str:
    if not is_session_id(text):
        raise ValueError(
            f"a session's id has 1 to {LONGEST_SESSION_ID} printable characters, and no slash"
        )
    return text


SessionId = Annotated[
    str,
    AfterValidator(_session_id),
    Field(
        json_schema_extra={"minLength": 1, "maxLength": LONGEST_SESSION_ID, "pattern": "^[^/]+$"}
    ),
]
TtlSeconds = Annotated[float, Field(gt=0, le=LONGEST_TTL_SECONDS)]
Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=LONGEST_METADATA_KEY)],
        Annotated[str, Field(max_length=LONGEST_METADATA_VALUE)],
    ],
    Field(max_length=MOST_METADATA_PAIRS),
]


class SessionTerms(BaseModel):
    """How long a session stays."""

    model_config = _STRICT

    ttl_seconds: TtlSeconds | None = Field(
        None, description="How long it lives after its last use; null: until it is closed."
    )
    pinned: bool = Field(False, description="Keep what it has read from eviction.")


class SessionForking(SessionTerms):
    """A session that begins where another one is; how long it lives is as there, if nothing is
    said.
    """

    id: SessionId | None = Field(None, description="Its name; made up if not given.")


class SessionChange(SessionTerms):
    """What can be said of a session at any time; what is left out stays."""

    metadata: Metadata = Field({}, description="Up to 16 pairs of strings, for your own use.")


class SessionOpening(SessionChange):
    """A new session."""

    id: SessionId | None = Field(None, description="Its name; made up if not given.")
    model: Annotated[str, Field(min_length=1)] | None = Field(
        None,
        description="Id of the model whose session it is; the first of /v1/models if not given.",
    )


class SessionObject(msgspec.Struct, frozen=True, kw_only=True):
    """A session. Times are seconds since the epoch; tokens are those of the branch that was used
    last.
    """

    id: str
    object: Literal["session"] = "session"
    model: str
    created_at: float
    last_used_at: float
    expires_at: float | None
    pinned: bool
    pin_state: Literal["none", "kept", "over_quota"]
    requests: int
    branches: int
    tokens: int
    kept_tokens: int
    ram_tokens: int
    disk_tokens: int
    live_tokens: int
    kept_bytes: int
    metadata: dict[str, str]
    forked_from: str | None


class SessionList(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions, the last used first."""

    object: Literal["list"] = "list"
    data: list[SessionObject]
    has_more: bool


class SessionDeleted(msgspec.Struct, frozen=True, kw_only=True):
    """What is left of a closed session."""

    id: str
    object: Literal["session.deleted"] = "session.deleted"
    deleted: bool = True


def session_object(info: SessionInfo, *, model: str) -> SessionObject:
    """A session as clients see it."""
    shown = msgspec.to_builtins(info)
    shown["id"] = shown.pop("session_id")
    return msgspec.convert(
        {**shown, "model": model, "forked_from": info.forked_from or None}, SessionObject
    )
