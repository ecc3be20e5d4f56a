"""Carries out commands on the sessions of a worker, and records which tokens their requests have
processed. The sessions' *records* in the store let a later worker, or another one on the same store,
continue them.

Device thread only.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future

import msgspec

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.machine.retention_clock import RetentionClock
from holdfast.store.block import BlockKey
from holdfast.store.folder import ReadRecords
from holdfast.wire.events import CacheOutcome
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.wire.sessions import (
    OperationName,
    SessionAnswer,
    SessionCommand,
    SessionInfo,
    is_session_id,
    is_valid_metadata,
    is_valid_ttl,
)
from holdfast.worker.prefix.cache import PrefixCache
from holdfast.worker.prefix.cache_map import CacheUser
from holdfast.worker.prefix.chain import Root
from holdfast.worker.prefix.tiers import Residence
from holdfast.worker.sessions.registry import (
    Session,
    SessionPins,
    SessionRegistry,
    decode_record,
    encode_record,
)
from holdfast.worker.sessions.session_file import Manifest, SessionFile
from holdfast.worker.sessions.transfer import Transfer, Transfers

RECORD_SECONDS = 0.5  # between writes of the records of sessions in use
EXPIRY_SECONDS = 1.0  # between checks for expired sessions
REREAD_SECONDS = 30.0  # between attempts to read records that could not be read

logger = logging.getLogger("holdfast.worker.sessions")


class SessionService:
    """All sessions of one worker."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        most: int = 1000,
        ttl_seconds: float | None = 604800.0,
        pinned_percent: int = 50,
        context_tokens: int,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cache = cache
        self._now = clock
        # the wall clock, but a jump far ahead is not trusted: sessions would expire
        self._retention_clock = RetentionClock(wall=clock, steady=steady)
        self._pinned_percent = pinned_percent
        self._registry = SessionRegistry(most=most, ttl_seconds=ttl_seconds)
        self._pins = SessionPins(cache, quota_bytes=self._quota_bytes)
        ram_bytes = cache.index.ram.budget_bytes
        cache.index.pins.most_held_bytes = ram_bytes * pinned_percent // 100
        self._transfers = Transfers(
            cache,
            context_tokens=context_tokens,
            check_room=self._check_room,
            register=self._open_imported,
        )
        self._operations: dict[OperationName, Callable[[SessionCommand], SessionAnswer | None]] = {
            "list": self._list,
            "open": self._open,
            "import": self._import,
            "export": self._export,
            "get": self._get,
            "update": self._update,
            "fork": self._fork,
            "close": self._close,
        }
        # changed since their record was written, by record name
        self._unwritten: dict[str, Session] = {}
        self._unreadable: set[str] = set()  # records that could not be read
        # the records, while they are being read
        self._records_future: Future[ReadRecords | None] | None = None
        # Names of earlier workers' records that could not be read yet; None: all. They are
        # not overwritten before they have been read.
        self._unread: frozenset[str] | None = None
        self._read_at = 0.0  # when records were last read
        # when records were last written, and when sessions last expired
        self._recorded_at = self._expiry_checked_at = 0.0
        self._load_records()

    @property
    def is_busy(self) -> bool:
        """Whether an export or import is under way; if so, the loop must not sleep."""
        return self._transfers.is_busy

    def carry_out(self, command: SessionCommand) -> SessionAnswer | None:
        """Carry out a command; returns its answer, or None if `maintain` returns it later."""
        self._expire()
        try:
            _check_command(command)
            return self._operations[command.operation](command)
        except SessionRefused as refusal:
            return _refusal_answer(command, refusal)

    def is_open(self, session_id: str, *, tenant: str) -> bool:
        return self._registry.find(session_id, tenant=tenant) is not None

    def request_accepted(self, session_id: str, *, tenant: str) -> None:
        """Open the session of an accepted request if the tenant has none with this id, so that it
        can be shown and changed during its first answer, and is recorded if the worker dies.
        """
        if not self.is_open(session_id, tenant=tenant):
            with contextlib.suppress(SessionRefused):  # `request_ended` logs it
                self._make_room(tenant)
                self._record_change(self._registry.open(session_id, tenant=tenant, now=self._now()))

    def request_ended(
        self,
        session_id: str,
        *,
        root: Root,
        chain: bytes | bytearray,
        is_alternative: bool = False,
    ) -> None:
        """Record that a request of a session has ended and that its blocks are committed.

        root: of the chain. Opens the session if the root's tenant has none with this id.
        is_alternative: see `SequenceRequest`.
        """
        now = self._now()
        tenant = root.tenant
        session = self._registry.find(session_id, tenant=tenant)
        if session is None:
            try:
                self._make_room(tenant)
                session = self._registry.open(session_id, tenant=tenant, now=now)
            except SessionRefused as refusal:
                logger.warning("the session of a request cannot be opened: %s", refusal)
                return
        branch = self._cache.index.branch(chain, root=root)
        if not is_alternative:
            session.use(branch, now=now)
        else:
            session.add_alternative(branch, now=now)
        self._record_change(session)

    def add_running_request(self, session_id: str, *, root: Root, chain: bytes | bytearray) -> None:
        """Add what a running request has stored so far to a session that is about to be closed.
        Opens the session if necessary, without evicting another one.
        """
        session = self._registry.find(session_id, tenant=root.tenant)
        if session is None:
            session = self._registry.open(session_id, tenant=root.tenant, now=self._now())
        branch = self._cache.index.branch(chain, root=root)
        session.branches = (*session.branches, branch)  # even beyond the limit: all are forgotten

    def users(self) -> list[CacheUser]:
        """The sessions of all tenants with the chains that they use, the last used first."""
        sessions = sorted(self._registry, key=lambda each: each.last_used_at, reverse=True)
        return [CacheUser(each.session_id, each.tenant, each.branches) for each in sessions]

    def maintain(self) -> list[SessionAnswer]:
        """Continue transfers, close expired sessions and write records. Returns the answers to
        commands whose transfers have ended.
        """
        possible = [self._answer_to_ended(transfer) for transfer in self._transfers.advance()]
        answers = [answer for answer in possible if answer is not None]
        if answers:
            return answers  # now, because an exception in the following work would lose them
        now = self._retention_clock()
        if now - self._expiry_checked_at >= EXPIRY_SECONDS:
            self._expiry_checked_at = now
            self._expire()
        if self._unwritten and now - self._recorded_at >= RECORD_SECONDS:
            self._write_records()
        return answers

    def close(self, *, writes_records: bool = True) -> None:
        """Stop all transfers, and write the records that are not written yet, if wanted."""
        if writes_records:
            self._read_at = 0.0  # retry the records that could not be read
            self._write_records()
        self._transfers.close()

    # -- operations

    def _list(self, command: SessionCommand) -> SessionAnswer:
        return self._answer(command, *self._registry.of(command.tenant)[: command.limit])

    def _get(self, command: SessionCommand) -> SessionAnswer:
        return self._answer(command, self._registry.get(command.session_id, tenant=command.tenant))

    def _open(self, command: SessionCommand) -> SessionAnswer:
        self._registry.refuse_taken(command.session_id, tenant=command.tenant)
        self._make_room(command.tenant)
        session = self._registry.open(
            command.session_id,
            tenant=command.tenant,
            now=self._now(),
            ttl_seconds=command.ttl_seconds,
            pinned=command.pinned is True,
            metadata=command.metadata,
        )
        self._record_change(session)
        return self._answer(command, session)

    def _fork(self, command: SessionCommand) -> SessionAnswer:
        session = self._registry.get(command.session_id, tenant=command.tenant)
        self._registry.refuse_taken(command.new_session_id, tenant=command.tenant)
        self._check_pin(command, session)
        self._make_room(command.tenant, keep=session)
        fork = self._registry.open(
            command.new_session_id,
            tenant=command.tenant,
            now=self._now(),
            ttl_seconds=session.ttl_seconds
            if command.ttl_seconds is msgspec.UNSET
            else command.ttl_seconds,
            pinned=command.pinned is True,
            metadata=session.metadata,
        )
        fork.branches = session.branches[:1]
        fork.forked_from = session.session_id
        self._record_change(fork)
        return self._answer(command, fork)

    def _update(self, command: SessionCommand) -> SessionAnswer:
        session = self._registry.get(command.session_id, tenant=command.tenant)
        if not session.pinned:
            self._check_pin(command, session)
        if command.pinned is not msgspec.UNSET:
            session.pinned = command.pinned
        if command.ttl_seconds is not msgspec.UNSET:
            session.ttl_seconds = command.ttl_seconds
        if command.metadata is not msgspec.UNSET:
            session.metadata = dict(command.metadata)
        session.last_used_at = self._now()
        self._record_change(session)
        return self._answer(command, session)

    def _close(self, command: SessionCommand) -> SessionAnswer:
        session = self._registry.get(command.session_id, tenant=command.tenant)
        answer = self._answer(command, session)
        # before its record is removed: until then, another worker can still open the session
        if command.forget:
            self._pins.drop(session)
            self._forget_branches(session)
        self._end_session(session)
        return answer

    def _export(self, command: SessionCommand) -> None:
        self._transfers.begin_export(
            command, self._registry.get(command.session_id, tenant=command.tenant)
        )

    def _import(self, command: SessionCommand) -> None:
        self._registry.refuse_taken(command.session_id, tenant=command.tenant)
        self._transfers.begin_import(command)

    # -- import and export, closing

    def _end_session(self, session: Session) -> None:
        """Remove a session and its record, and unpin its blocks, which stay cached."""
        self._pins.drop(session)
        self._registry.close(session)
        self._unwritten.pop(session.record_name, None)
        if self._cache.store is not None:
            self._cache.store.remove_record(session.record_name)

    def _forget_branches(self, session: Session) -> None:
        """Delete the branches of a session, except blocks that another session or chain needs."""
        needed = self._keys_of(session.tenant, without=session)
        for branch in session.branches:
            self._cache.index.forget_branch(branch, needed=needed)
        self._cache.live.forget_session(session.session_id, tenant=session.tenant)

    def _keys_of(self, tenant: str, *, without: Session | None = None) -> set[BlockKey]:
        """The keys of all blocks and states of a tenant's sessions, except one session."""
        sessions = [each for each in self._registry.of(tenant) if each is not without]
        return {key for each in sessions for branch in each.branches for key in branch.keys}

    def _check_room(self, command: SessionCommand, file: SessionFile) -> None:
        """Raise SessionRefused if a file does not fit, before blocks are evicted for it."""
        self._registry.refuse_taken(
            command.session_id or file.manifest.session_id, tenant=command.tenant
        )
        self._registry.victims(command.tenant)  # raises if there are too many sessions
        quota_bytes = self._quota_bytes()
        free_bytes = self._budget_bytes() - self._pins.pinned_bytes
        if file.nbytes > quota_bytes:
            message = (
                f"the file has {file.nbytes:,} bytes, but an imported session may have at most "
                f"{quota_bytes:,} (store.pinned_percent)"
            )
            raise SessionRefused(SessionFailure.OVER_QUOTA, message)
        if file.nbytes > free_bytes:
            message = (
                f"the file has {file.nbytes:,} bytes, but only {max(0, free_bytes):,} are "
                "unpinned: unpin a session"
            )
            raise SessionRefused(SessionFailure.NO_ROOM, message)

    def _open_imported(
        self, command: SessionCommand, manifest: Manifest, chains: Sequence[bytes]
    ) -> Session:
        """Open a session for imported chains. Raises SessionRefused if they are not all stored."""
        session_id = command.session_id or manifest.session_id
        tenant = command.tenant
        self._registry.refuse_taken(session_id, tenant=tenant)
        branches = tuple(
            self._cache.index.branch(
                chain, root=self._cache.index.root(tenant=tenant, form=branch.form)
            )
            for branch, chain in zip(manifest.branches, chains, strict=True)
        )
        if any(
            branch.tokens < len(chain) // TOKEN_BYTES
            for branch, chain in zip(branches, chains, strict=True)
        ):
            raise SessionRefused(
                SessionFailure.NO_ROOM,
                "the cache has not enough room for the whole session: unpin or close another one",
            )
        self._make_room(tenant)
        session = self._registry.open(
            session_id,
            tenant=tenant,
            now=self._now(),
            ttl_seconds=manifest.ttl_seconds,
            metadata=manifest.metadata,
        )
        session.branches = branches
        self._record_change(session)
        return session

    def _answer_to_ended(self, transfer: Transfer) -> SessionAnswer | None:
        """The answer to an ended transfer; None if an export starts again after losing a block."""
        if transfer.lost and self._cache.store is not None:
            self._cache.index.unreadable(transfer.lost)
            # keys in memory whose values are not finite
            index = self._cache.index
            stored = [key for key in transfer.lost if index.residence(key) is not None]
            damaged = [key for key in stored if self._cache.payload(key) is None]
            index.forget(damaged, cause=CacheOutcome.UNREADABLE)
            return self.carry_out(transfer.command)
        if transfer.failure is not None:
            return _refusal_answer(transfer.command, transfer.failure)
        assert transfer.session is not None
        return self._answer(transfer.command, transfer.session)

    def _answer(self, command: SessionCommand, *sessions: Session) -> SessionAnswer:
        return SessionAnswer(
            call_id=command.call_id, sessions=tuple(map(self._session_info, sessions))
        )

    def _session_info(self, session: Session) -> SessionInfo:
        """What users see of a session: its data, and where the tokens of its main branch are."""
        index = self._cache.index
        branch = session.branches[0] if session.branches else None
        kept_tokens = ram_tokens = live_tokens = 0
        for block in () if branch is None else index.kept_part(branch).blocks:
            # only the beginning counts as live: a request could not start from a later part
            if live_tokens == kept_tokens and index.holder_of(block.key) is not None:
                live_tokens = block.end
            if index.residence(block.key) is not Residence.DISK:
                ram_tokens += block.end - kept_tokens
            kept_tokens = block.end
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
            kept_tokens=kept_tokens,
            ram_tokens=ram_tokens,
            disk_tokens=kept_tokens - ram_tokens,
            live_tokens=live_tokens,
            kept_bytes=sum(index.size_of(key) for key in keys),
            metadata=session.metadata,
            forked_from=session.forked_from,
        )

    def _record_change(self, session: Session) -> None:
        """Let the record and the pins of a session that has changed be updated: the record now or
        soon, the pins now.
        """
        self._unwritten[session.record_name] = session
        if session.pinned or self._retention_clock() - self._recorded_at >= RECORD_SECONDS:
            # Record the session before pinning its blocks: only a recorded session can release the pins.
            self._write_records()
        self._pins.sync(session)

    def _write_records(self) -> None:
        """Write the records of changed sessions, except those of which an earlier worker's record is
        not read yet: it would be overwritten.
        """
        self._recorded_at = self._retention_clock()
        if (
            self._are_unread(self._unwritten)
            and self._recorded_at - self._read_at >= REREAD_SECONDS
        ):
            self._load_records()
        for name, session in tuple(self._unwritten.items()):
            if self._are_unread((name,)):
                continue
            del self._unwritten[name]
            if self._cache.store is not None:
                self._cache.store.put_record(name, encode_record(session))

    def _are_unread(self, names: Iterable[str]) -> bool:
        """Whether an earlier worker's record may have one of these names, but is not read yet."""
        return self._unread is None or not self._unread.isdisjoint(names)

    def _load_records(self) -> None:
        """Load the sessions of earlier workers on this store, as far as they can be read."""
        if self._cache.store is None:
            self._unread = frozenset()
            return
        records = self._cache.store.records()
        if records is None:
            self._read_at = self._retention_clock()
            return
        decoded = self._decode_records(records.found)
        recorded = [session for name, session in decoded.items() if self._are_unread((name,))]
        self._unread = records.unread
        self._retention_clock.start_from_stamps(session.last_used_at for session in recorded)
        self._read_at = self._retention_clock()
        for session in recorded:
            newer = self._registry.find(session.session_id, tenant=session.tenant)
            if newer is not None:  # used before its record could be read
                session.merge(newer)
                self._unwritten[session.record_name] = session
            self._registry.put(session)
            self._pins.sync(session)
        self._expire()
        self._make_room("", sessions=0)

    def _decode_records(self, records: Mapping[str, bytes]) -> dict[str, Session]:
        """Decode the records of sessions, by record name. Unreadable records (for example of other
        versions) are skipped, and logged once.
        """
        sessions: dict[str, Session] = {}
        for name, data in records.items():
            if name in self._unreadable:
                continue
            try:
                sessions[name] = decode_record(data)
            except ValueError as error:
                self._unreadable.add(name)
                logger.warning("a session's record cannot be used: %s", error)
        return sessions

    def _expire(self) -> None:
        """Close expired sessions, unless another worker on the same store has used them since.

        The store's records tell this. Until they are read, no session is closed.
        """
        expired = self._registry.expired(self._retention_clock())
        store = self._cache.store
        if not expired:
            self._records_future = None
            return
        recorded: dict[str, Session] = {}
        if store is not None:
            if self._records_future is None:
                self._records_future = store.ask_records()
            if not self._records_future.done():
                return
            done_future = self._records_future
            self._records_future = None
            if not done_future.cancelled() and done_future.exception() is None:
                records = done_future.result()
                # not before the other records are known
                if records is None:
                    return
                expired = [each for each in expired if each.record_name not in records.unread]
                recorded = self._decode_records(records.found)
        for session in expired:
            record = recorded.get(session.record_name)
            if record is not None and record.last_used_at > session.last_used_at:
                self._pins.drop(session)
                self._registry.put(record)
                self._pins.sync(record)
        for session in expired:
            if self._registry.find(session.session_id, tenant=session.tenant) is session:
                self._end_session(session)

    def _make_room(self, tenant: str, *, keep: Session | None = None, sessions: int = 1) -> None:
        """Close sessions until `sessions` new ones can be opened.

        keep: a session not to close. Raises SessionRefused if too many are pinned.
        """
        for victim in self._registry.victims(tenant, sessions=sessions, keep=keep):
            self._end_session(victim)

    def _check_pin(self, command: SessionCommand, session: Session) -> None:
        """Raise SessionRefused if a command pins a session that does not fit in the quota."""
        if command.pinned is True and not self._pins.fits(session):
            message = (
                f"pinned sessions may have {self._quota_bytes():,} bytes in total, and already have "
                f"{self._pins.pinned_bytes:,}: unpin another one"
            )
            raise SessionRefused(SessionFailure.OVER_QUOTA, message)

    def _quota_bytes(self) -> int:
        """How many bytes all pinned sessions may have in total."""
        return self._budget_bytes() * self._pinned_percent // 100

    def _budget_bytes(self) -> int:
        """How many bytes blocks may take where they last: on disk, or in RAM if no disk is writable."""
        disk = None if self._cache.store is None else self._cache.store.statistics()
        if disk is None or disk.mode != "writing":
            return self._cache.index.ram.budget_bytes
        return disk.allowed_bytes


def _refusal_answer(command: SessionCommand, refusal: SessionRefused) -> SessionAnswer:
    return SessionAnswer(call_id=command.call_id, failure=refusal.failure, message=str(refusal))


def _check_command(command: SessionCommand) -> None:
    """Raise SessionRefused if an id, the metadata or the time to live is invalid. The server has
    checked them, but the library has not.
    """
    is_named_by_file = command.operation == "import" and not command.session_id
    new_session_id = {
        "open": command.session_id,
        "import": command.session_id,
        "fork": command.new_session_id,
    }.get(command.operation)
    if new_session_id is not None and not is_named_by_file and not is_session_id(new_session_id):
        raise SessionRefused(
            SessionFailure.INVALID,
            f"a session's id must have 1 to 256 printable characters and no slash, "
            f"got {new_session_id!r}",
        )
    if command.metadata is not msgspec.UNSET and not is_valid_metadata(command.metadata):
        raise SessionRefused(
            SessionFailure.INVALID,
            "metadata may have up to 16 keys of at most 64 characters and values of at most 512",
        )
    if command.ttl_seconds is not msgspec.UNSET and not is_valid_ttl(command.ttl_seconds):
        raise SessionRefused(
            SessionFailure.INVALID,
            "a session's time to live must be more than 0 seconds and at most ten years",
        )
