"""One session: a name for what one agent, or one conversation, has read; and its record, which a
store keeps beside the blocks.

Pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec

from holdfast.worker.prefix.chain import Branch

MOST_BRANCHES = 8  # an agent's side conversations must not push out its main one


@dataclass(slots=True, kw_only=True)
class Session:
    """A session of a tenant. Times are seconds since the epoch."""

    session_id: str
    tenant: str
    created_at: float
    last_used_at: float
    ttl_seconds: float | None  # since its last use; None: it never ends by itself
    pinned: bool = False
    metadata: dict[str, str] = field(default_factory=dict)
    forked_from: str = ""
    requests: int = 0
    branches: tuple[Branch, ...] = ()  # the last used first

    @property
    def expires_at(self) -> float | None:
        """When it ends if nobody uses it any more."""
        return None if self.ttl_seconds is None else self.last_used_at + self.ttl_seconds

    def use(self, branch: Branch, *, now: float) -> None:
        """A request of the session has ended, and this is where it has left its tokens.

        A chain that goes on from another one takes its place; what is only a beginning of another
        one adds nothing.
        """
        self.requests += 1
        self.last_used_at = now
        if not branch.blocks:
            return
        others = [other for other in self.branches if not branch.extends(other)]
        longer = next((other for other in others if other.extends(branch)), None)
        if longer is not None:
            others.remove(longer)
        self.branches = (longer or branch, *others)[:MOST_BRANCHES]


_FORMAT = 2
_decoder = msgspec.msgpack.Decoder(tuple[int, Session])


def record_name(session: Session) -> str:
    """The name of a session's record: letters and digits, the same whenever tenant and id are."""
    named = f"{len(session.tenant)}/{session.tenant}/{session.session_id}"
    return hashlib.blake2b(named.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def encode_record(session: Session) -> bytes:
    """A session as bytes."""
    return msgspec.msgpack.encode((_FORMAT, session))


def decode_record(data: bytes) -> Session:
    """A session from its bytes. Raises ValueError for what is none of this format."""
    try:
        version, session = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError) as error:
        raise ValueError(f"not a session: {error}") from error
    if version != _FORMAT:
        raise ValueError(f"a session of format {version}, this version reads {_FORMAT}")
    return session
