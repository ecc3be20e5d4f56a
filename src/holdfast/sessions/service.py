"""The worker's sessions: carries out commands, notes where requests have left their tokens. Device thread only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from holdfast.errors import SessionRefused
from holdfast.messages.sessions import (
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
    is_fit_metadata,
    is_fit_ttl,
    is_session_id,
)
from holdfast.prefix.cache import PrefixCache
from holdfast.prefix.ram import Residence
from holdfast.sessions.pins import SessionPins
from holdfast.sessions.record import BadRecord, decode_record, encode_record, record_name
from holdfast.sessions.registry import SessionRegistry
from holdfast.sessions.session import Session
from holdfast.sessions.transfer import Export, Import, Transfers
from holdfast.store.block import TOKEN_BYTES

RECORD_SECONDS = 0.5  # records of sessions in use are written so often at most
EXPIRY_SECONDS = 1.0  # between looks at whose time is over

logger = logging.getLogger("holdfast.sessions")


class SessionDesk:
    """All sessions of one worker."""

    def __init__(
        self,
        memory: PrefixCache,
        *,
        most: int = 1000,
        ttl_seconds: float | None = 604800.0,
        pinned_percent: int = 50,
        context_tokens: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._memory, self._clock = memory, clock
        self._pinned_percent = pinned_percent
        self._registry = SessionRegistry(most=most, ttl_seconds=ttl_seconds)
        self._pins = SessionPins(memory, quota_bytes=self._quota_bytes)
        memory.index.limit_pins(memory.index.ram_budget_bytes * pinned_percent // 100)
        self._transfers = Transfers(memory, context_tokens=context_tokens, check_room=self._check_room)
        self._dirty: dict[str, Session] = {}
        self._asked_records: Future[dict[str, bytes]] | None = None
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

    def used(self, session_id: str, *, tenant: str, chain: bytes | bytearray) -> None:
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
        session.use(self._memory.index.branch(chain, tenant=tenant), now=now)
        self._changed(session)

    def tend(self) -> list[SessionAnswer]:
        """Go on with transfers, end sessions whose time is over, write records; returns answers that are due."""
        answers = [self._ended(transfer) for transfer in self._transfers.advance()] if self._transfers.is_busy else []
        if answers:
            return answers  # before anything else can go wrong
        now = self._clock()
        if now - self._looked_at >= EXPIRY_SECONDS:
            self._looked_at = now
            self._expire()
        if self._dirty and now - self._recorded_at >= RECORD_SECONDS:
            self._write_records()
        return answers

    def close(self) -> None:
        """Write what is not written yet."""
        self._write_records()
        self._transfers.close()

    def abandon(self) -> None:
        """End the threads; nothing else can be done any more."""
        self._transfers.close()

    def _carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        _check(command)
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
        needed = {key for other in self._registry.of(session.tenant) for branch in other.branches for key in branch.keys}
        for branch in session.branches:
            self._memory.index.forget_branch(branch, needed=needed)

    def _ended(self, transfer: Export | Import) -> SessionAnswer:
        call_id = transfer.command.call_id
        try:
            if transfer.failure is not None:
                raise transfer.failure
            session = transfer.session if isinstance(transfer, Export) else self._taken_in(transfer)
        except SessionRefused as refusal:
            return SessionAnswer(call_id=call_id, failure=refusal.failure, message=str(refusal))
        return self._answer(call_id, session)

    def _check_room(self, transfer: Import) -> None:
        """Refuse a file that cannot come in, before any of it does and anything has to leave for it. Raises SessionRefused."""
        assert transfer.header is not None
        tenant = transfer.command.tenant
        self._refuse_taken(transfer.command.session_id or transfer.header.session_id, tenant=tenant)
        self._registry.victims(tenant, sessions=1)
        quota_bytes, free_bytes = self._quota_bytes(), self._budget_bytes() - self._pins.pinned_bytes
        if transfer.nbytes > quota_bytes:
            message = f"the file holds {transfer.nbytes:,} bytes, a session may bring {quota_bytes:,} (store.pinned_percent)"
            raise SessionRefused(SessionFailure.OVER_QUOTA, message)
        if transfer.nbytes > free_bytes:
            message = f"the file holds {transfer.nbytes:,} bytes, {max(0, free_bytes):,} are not pinned: unpin a session"
            raise SessionRefused(SessionFailure.NO_ROOM, message)

    def _taken_in(self, transfer: Import) -> Session:
        assert transfer.header is not None
        header, tenant = transfer.header, transfer.command.tenant
        session_id = transfer.command.session_id or header.session_id
        self._refuse_taken(session_id, tenant=tenant)
        branches = tuple(self._memory.index.branch(chain, tenant=tenant) for chain in transfer.chains)
        if any(branch.tokens < len(chain) // TOKEN_BYTES for branch, chain in zip(branches, transfer.chains, strict=True)):
            raise SessionRefused(SessionFailure.NO_ROOM, "there is no room for all of the session")
        self._make_room(tenant)
        session = self._registry.open(
            session_id, tenant=tenant, now=self._clock(), ttl_seconds=header.ttl_seconds, metadata=header.metadata
        )
        session.branches = branches
        self._changed(session)
        return session

    def _answer(self, call_id: str, session: Session) -> SessionAnswer:
        return SessionAnswer(call_id=call_id, sessions=(self._info(session),))

    def _info(self, session: Session) -> SessionInfo:
        library = self._memory.index
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
        self._dirty[record_name(session)] = session
        if session.pinned or self._clock() - self._recorded_at >= RECORD_SECONDS:
            self._write_records()  # before the pins, so that none is without a session that can take it back
        self._pins.settle(session)

    def _write_records(self) -> None:
        self._recorded_at = self._clock()
        while self._dirty:
            name, session = self._dirty.popitem()
            if self._memory.store is not None:
                self._memory.store.put_record(name, encode_record(session))

    def _take_over(self) -> None:
        """Go on with the sessions that an earlier worker on this store has left."""
        if self._memory.store is None:
            return
        for session in self._decoded(self._memory.store.records(), tells=True).values():
            self._registry.put(session)
        for session in self._registry:
            self._pins.settle(session)
        self._expire()
        self._make_room("", sessions=0)

    def _decoded(self, records: dict[str, bytes], *, tells: bool = False) -> dict[str, Session]:
        """Sessions by the names of their records. Those of other versions are left alone."""
        found: dict[str, Session] = {}
        for name, data in records.items():
            try:
                found[name] = decode_record(data)
            except BadRecord as bad:
                if tells:
                    logger.warning("a session's record cannot be used: %s", bad)
        return found

    def _expire(self) -> None:
        """End sessions whose time is over. With a store only when it has told of another worker that may have used them since."""
        over = self._registry.expired(self._clock())
        store = self._memory.store
        if not over:
            self._asked_records = None
            return
        recorded: dict[str, Session] = {}
        if store is not None:
            if self._asked_records is None:
                self._asked_records = store.ask_records()
            if not self._asked_records.done():
                return
            if not self._asked_records.cancelled() and self._asked_records.exception() is None:
                recorded = self._decoded(self._asked_records.result())
            self._asked_records = None
        for session in over:
            other = recorded.get(record_name(session))
            if other is not None and other.last_used_at > session.last_used_at:
                self._pins.drop(session)
                self._registry.put(other)
                self._pins.settle(other)
        for session in over:
            if self._registry.find(session.session_id, tenant=session.tenant) is session:
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
        return self._budget_bytes() * self._pinned_percent // 100

    def _budget_bytes(self) -> int:
        on_disk = None if self._memory.store is None else self._memory.store.statistics()
        if on_disk is None or on_disk.mode != "writing":
            return self._memory.index.ram_budget_bytes
        return on_disk.allowed_bytes


def _check(command: SessionCommand) -> None:
    """Refuse what could not be kept or named. The server has refused it before; the library's callers come here."""
    opened = command.new_session_id if isinstance(command, ForkSession) else None
    if isinstance(command, OpenSession | ImportSession):
        opened = command.session_id
    is_named_by_file = isinstance(command, ImportSession) and not opened
    if opened is not None and not is_named_by_file and not is_session_id(opened):
        raise SessionRefused(SessionFailure.INVALID, f"not the id of a session: {opened!r}")
    metadata = command.metadata if isinstance(command, OpenSession | UpdateSession) else {}
    if isinstance(metadata, dict) and not is_fit_metadata(metadata):
        raise SessionRefused(SessionFailure.INVALID, "metadata takes up to 16 pairs of texts, of at most 64 and 512 characters")
    ttl = command.ttl_seconds if isinstance(command, OpenSession | UpdateSession | ForkSession) else None
    if ttl is not msgspec.UNSET and not is_fit_ttl(ttl):
        raise SessionRefused(SessionFailure.INVALID, "a session lives for more than 0 seconds and at most ten years")
