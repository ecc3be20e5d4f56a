"""Sessions as the bytes of their records, which a store keeps beside the blocks."""

from __future__ import annotations

import hashlib

import msgspec

from holdfast.sessions.session import Session

_FORMAT = 2


class BadRecord(ValueError):
    """The bytes are no session of this format."""


class _Record(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    format: int
    session: Session


_decoder = msgspec.msgpack.Decoder(_Record)


def record_name(session: Session) -> str:
    """The name of a session's record: letters and digits, the same whenever tenant and id are."""
    named = f"{len(session.tenant)}/{session.tenant}/{session.session_id}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def encode_record(session: Session) -> bytes:
    """A session as bytes."""
    return msgspec.msgpack.encode(_Record(format=_FORMAT, session=session))


def decode_record(data: bytes) -> Session:
    """A session from its bytes. Raises BadRecord."""
    try:
        record = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise BadRecord(f"not a session: {error}") from error
    if record.format != _FORMAT:
        raise BadRecord(f"a session of format {record.format}, this version reads {_FORMAT}")
    return record.session
