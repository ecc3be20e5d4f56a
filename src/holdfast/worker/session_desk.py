"""The worker's sessions: carries out commands, notes where requests have left their tokens. Device thread only."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable

import msgspec

from holdfast.cache.tiers import Residence
from holdfast.errors import SessionRefused
from holdfast.session_messages import (
    CloseSession,
    ExportSession,
    ForkSession,
    GetSession,
    ImportSession,
    ListSessions,
    OpenSession,
    SessionAnswer,
    SessionCommand,
    SessionFailure,
    SessionInfo,
    UpdateSession,
)
from holdfast.sessions.record import BadRecord, decode_record, encode_record, record_name
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.session import Session
from holdfast.worker.memory import Memory
from holdfast.worker.session_pins import SessionPins
from holdfast.worker.session_transfer import Export, Import, Transfers

RECORD_SECONDS = 0.5  # records of sessions in use are written so often at most
EXPIRY_SECONDS = 1.0  # between looks at whose time is over

logger = logging.getLogger("holdfast.sessions")


class SessionDesk:
    """All sessions of one worker."""

    def __init__(
        self,
        memory: Memory,
        *,
        most: int = 1000,
        ttl_seconds: float | None = 604800.0,
        pinned_percent: int = 50,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._memory, self._clock = memory, clock
        self._pinned_percent = pinned_percent
        self._registry = SessionRegistry(most=most, ttl_seconds=ttl_seconds)
        self._pins = SessionPins(memory, quota_bytes=self._quota_bytes)
        self._transfers = Transfers(memory)
        self._dirty: dict[str, Session] = {}
        self._recorded_at = self._looked_at = 0.0
        self._take_over()

    @property
    def is_busy(self) -> bool:
        """Whether a file is being written or taken in: the loop must not sleep then."""
        return self._transfers.is_busy

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """The answer to a command; None when it comes later, out of `tend`."""
        self._expire()
        try:
            return self._carry_out(command)
        except SessionRefused as refusal:
            return SessionAnswer(call_id=command.call_id, failure=refusal.failure, message=str(refusal))

    def used(self, session_id: str, *, tenant: str, chain: array[int]) -> None:
        """A request of a session has ended and what it leaves is put away. A session that is not there begins with it."""
        now = self._clock()
        session = self._registry.find(session_id, tenant=tenant)
        if session is None:
            try:
                self._make_room(tenant)
                session = self._registry.open(session_id, tenant=tenant, now=now)
            except SessionRefused as refusal:
                logger.warning("a request's session cannot be opened: %s", refusal)
                return
        session.use(self._memory.library.branch(chain, salt=tenant), now=now)
        self._changed(session)

    def tend(self) -> list[SessionAnswer]:
        """Go on with transfers, end sessions whose time is over, write records; returns answers that are due."""
        answers = [self._ended(transfer) for transfer in self._transfers.advance()] if self._transfers.is_busy else []
        now = self._clock()
        if now - self._looked_at >= EXPIRY_SECONDS:
            self._looked_at = now
            self._expire()
        if self._dirty and now - self._recorded_at >= RECORD_SECONDS:
            self._write_records()
        return answers

    def close(self) -> None:
        """Write what is not written yet."""
        self._transfers.close()
        self._write_records()

    def _carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        registry, now = self._registry, self._clock()
        if isinstance(command, ListSessions):
            found = tuple(self._info(session) for session in registry.of(command.tenant)[: command.limit])
            return SessionAnswer(call_id=command.call_id, sessions=found)
        if isinstance(command, ImportSession):
            if command.session_id:
                self._refuse_taken(command.session_id, tenant=command.tenant)
            self._transfers.begin_import(command)
            return None
        if isinstance(command, OpenSession):
            self._refuse_taken(command.session_id, tenant=command.tenant)
            self._make_room(command.tenant)
            session = registry.open(
                command.session_id,
                tenant=command.tenant,
                now=now,
                ttl_seconds=command.ttl_seconds,
                pinned=command.pinned,
                metadata=command.metadata,
            )
            self._changed(session)
            return self._answer(command.call_id, session)
        session = registry.get(command.session_id, tenant=command.tenant)
        if isinstance(command, GetSession):
            return self._answer(command.call_id, session)
        if isinstance(command, ExportSession):
            self._transfers.begin_export(command, session)
            return None
        if isinstance(command, CloseSession):
            answer = self._answer(command.call_id, session)
            self._close(session, forget=command.forget)
            return answer
        if isinstance(command, ForkSession):
            return self._answer(command.call_id, self._fork(command, session))
        self._update(command, session)
        return self._answer(command.call_id, session)

    def _fork(self, command: ForkSession, session: Session) -> Session:
        self._refuse_taken(command.new_session_id, tenant=command.tenant)
        if command.pinned and not self._pins.fits(session):
            raise self._over_quota()
        self._make_room(command.tenant, but=session)
        fork = self._registry.fork(
            session,
            session_id=command.new_session_id,
            now=self._clock(),
            ttl_seconds=command.ttl_seconds,
            pinned=command.pinned,
        )
        self._changed(fork)
        return fork

    def _update(self, command: UpdateSession, session: Session) -> None:
        if command.pinned is True and not session.pinned and not self._pins.fits(session):
            raise self._over_quota()
        if command.pinned is not msgspec.UNSET:
            session.pinned = command.pinned
        if command.ttl_seconds is not msgspec.UNSET:
            session.ttl_seconds = command.ttl_seconds
        if command.metadata is not msgspec.UNSET:
            session.metadata = dict(command.metadata)
        session.last_used_at = self._clock()
        self._changed(session)

    def _close(self, session: Session, *, forget: bool = False) -> None:
        self._pins.drop(session)
        self._registry.close(session)
        self._dirty.pop(record_name(session), None)
        if self._memory.store is not None:
            self._memory.store.remove_record(record_name(session))
        if forget:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        """Delete the ends of a session's branches, up to where something else stands on them."""
        needed = {key for other in self._registry for branch in other.branches for key in branch.keys}
        for branch in session.branches:
            self._memory.library.forget_branch(branch, needed=needed)

    def _ended(self, transfer: Export | Import) -> SessionAnswer:
        call_id = transfer.command.call_id
        try:
            if transfer.failure is not None:
                raise transfer.failure
            session = transfer.session if isinstance(transfer, Export) else self._taken_in(transfer)
        except SessionRefused as refusal:
            return SessionAnswer(call_id=call_id, failure=refusal.failure, message=str(refusal))
        return self._answer(call_id, session)

    def _taken_in(self, transfer: Import) -> Session:
        assert transfer.header is not None
        header, tenant = transfer.header, transfer.command.tenant
        session_id = transfer.command.session_id or header.session_id
        self._refuse_taken(session_id, tenant=tenant)
        self._make_room(tenant)
        session = self._registry.open(
            session_id, tenant=tenant, now=self._clock(), ttl_seconds=header.ttl_seconds, metadata=header.metadata
        )
        session.branches = tuple(self._memory.library.branch(chain, salt=tenant) for chain in transfer.chains)
        self._changed(session)
        return session

    def _answer(self, call_id: str, session: Session) -> SessionAnswer:
        return SessionAnswer(call_id=call_id, sessions=(self._info(session),))

    def _info(self, session: Session) -> SessionInfo:
        library = self._memory.library
        branch = session.branches[0] if session.branches else None
        kept = ram = at = 0
        for step in () if branch is None else library.kept_part(branch).steps:
            kept = step.end
            if library.residence(step.key) is not Residence.DISK:
                ram += step.end - at
            at = step.end
        keys = {key for each in session.branches for key in each.keys}
        return SessionInfo(
            session_id=session.session_id,
            created_at=session.created_at,
            last_used_at=session.last_used_at,
            expires_at=session.expires_at,
            pinned=session.pinned,
            pin_state=self._pins.state_of(session),
            requests=session.requests,
            branches=len(session.branches),
            tokens=0 if branch is None else branch.tokens,
            kept_tokens=kept,
            ram_tokens=ram,
            disk_tokens=kept - ram,
            kept_bytes=sum(library.size_of(key) for key in keys),
            metadata=session.metadata,
            forked_from=session.forked_from,
        )

    def _changed(self, session: Session) -> None:
        self._pins.settle(session)
        self._dirty[record_name(session)] = session
        if self._clock() - self._recorded_at >= RECORD_SECONDS:
            self._write_records()

    def _write_records(self) -> None:
        self._recorded_at = self._clock()
        dirty, self._dirty = self._dirty, {}
        if self._memory.store is not None:
            for name, session in dirty.items():
                self._memory.store.put_record(name, encode_record(session))

    def _take_over(self) -> None:
        """Go on with the sessions that an earlier worker on this store has left."""
        for session in self._recorded(tells=True).values():
            self._registry.put(session)
        for session in self._registry:
            self._pins.settle(session)
        self._expire()
        self._make_room("", sessions=0)

    def _recorded(self, *, tells: bool = False) -> dict[str, Session]:
        """The sessions that the store has records of, by the records' names. Those of other versions are left alone."""
        found: dict[str, Session] = {}
        for name, data in ({} if self._memory.store is None else self._memory.store.records()).items():
            try:
                found[name] = decode_record(data)
            except BadRecord as bad:
                if tells:
                    logger.warning("a session's record cannot be used: %s", bad)
        return found

    def _expire(self) -> None:
        over = self._registry.expired(self._clock())
        if not over:
            return
        recorded = self._recorded()  # another worker of this model may have used them since
        for session in over:
            other = recorded.get(record_name(session))
            if other is not None and other.last_used_at > session.last_used_at:
                self._pins.drop(session)
                self._registry.put(other)
                self._pins.settle(other)
        for session in self._registry.expired(self._clock()):
            self._close(session)

    def _make_room(self, tenant: str, *, but: Session | None = None, sessions: int = 1) -> None:
        """End sessions until so many more can be opened. Raises SessionRefused when too many are pinned."""
        for victim in self._registry.victims(tenant, sessions=sessions, but=but):
            self._close(victim)

    def _refuse_taken(self, session_id: str, *, tenant: str) -> None:
        if self._registry.find(session_id, tenant=tenant) is not None:
            raise SessionRefused(SessionFailure.EXISTS, f"there is a session {session_id!r} already")

    def _over_quota(self) -> SessionRefused:
        return SessionRefused(
            SessionFailure.OVER_QUOTA,
            f"pinned sessions may keep {self._quota_bytes():,} bytes, and keep {self._pins.pinned_bytes:,}: unpin another one",
        )

    def _quota_bytes(self) -> int:
        store = self._memory.store
        budget = self._memory.library.ram_budget_bytes if store is None else store.statistics().allowed_bytes
        return budget * self._pinned_percent // 100
