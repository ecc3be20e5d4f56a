"""Hooks that report events within the server and its workers to the checks."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.errors import HoldfastError
from holdfast.front.fleet.slot import ModelSlot
from holdfast.front.link.worker_link import WorkerLink
from holdfast.store import io_thread, maintenance
from holdfast.store.block import Block, BlockKey, Entry
from holdfast.store.folder import Records, StoreFolder
from holdfast.store.io_thread import IoThread
from holdfast.store.maintenance import StoreMaintenance
from holdfast.store.write_ahead import Mailbox, WriteAhead
from holdfast.wire.commands import SequenceControl, SequenceRequest, WorkerControl
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.plan import Draft
from holdfast.worker.loop import device_steps
from holdfast.worker.loop.drafts import Drafts
from holdfast.worker.loop.loop import WorkerLoop
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.live_tier import LiveTier
from holdfast.worker.prefix.lookup import ReusePlan
from holdfast.worker.prefix.tiers import RamTier
from holdfast.worker.sessions.registry import SessionRegistry
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.image_process import ImageProcess
from tests.simulation.checks import running


def install() -> None:
    """Hook the links, the rounds of workers' loops, the store, sessions and drafts."""
    send, deliver, receive = WorkerLink.send, WorkerLink._handle_events, WorkerLoop._receive

    def watched_send(link: WorkerLink, command: Any) -> bool:
        if isinstance(command, SequenceRequest) and link.is_open:
            running[-1].links.sent(link, command)
        if isinstance(command, SequenceControl | WorkerControl) and link.is_open:
            running[-1].links.controlled(link, command)
        if isinstance(command, SequenceRequest | SessionCommand) and command.session_id:
            running[-1].links.commanded(link, command)
        return send(link, command)

    def watched_deliver(link: WorkerLink, events: list[Any]) -> None:
        running[-1].links.came(link, events)
        deliver(link, events)

    def watched_receive(loop: WorkerLoop, *, is_busy: bool) -> Any:
        inbox = loop._inbox
        poll = inbox.receive

        def watched(*, timeout_seconds: float) -> Any:
            running[-1].workers.at_round(loop, timeout_seconds=timeout_seconds)
            return poll(timeout_seconds=timeout_seconds)

        loop._inbox = _Watched(inbox, watched)  # type: ignore[assignment]
        try:
            return receive(loop, is_busy=is_busy)
        finally:
            loop._inbox = inbox

    salvage = io_thread.salvage

    def watched_salvage(folder: StoreFolder) -> int:
        left = running[-1].store.left_by_the_dead()
        saved = salvage(folder)
        running[-1].store.salvaged(left)
        return saved

    io_thread.salvage = watched_salvage
    finish, removed = Mailbox.finish, IoThread.remove
    expired = SessionRegistry.expired

    def watched_expired(registry: SessionRegistry, now: float) -> Any:
        found = expired(registry, now)
        running[-1].workers.expired(found)
        return found

    SessionRegistry.expired = watched_expired  # type: ignore[method-assign]

    def watched_finish(mailbox: Mailbox, keys: Iterable[BlockKey], *, stored: bool) -> None:
        keys = list(keys)
        if stored:
            running[-1].store.stored(keys)
        finish(mailbox, keys, stored=stored)

    def watched_unlink(maintenance: StoreMaintenance, entries: Iterable[Entry]) -> list[Entry]:
        entries = list(entries)
        running[-1].store.evicted(entries)
        running[-1].store.gave_up(entry.block.key for entry in entries)
        return unlink(maintenance, entries)

    def watched_remove(io: IoThread, keys: tuple[BlockKey, ...]) -> None:
        running[-1].store.gave_up(keys)
        removed(io, keys)
        running[-1].store.unwanted(keys, to_retry=io._to_remove)

    def watched_delete(
        maintenance: StoreMaintenance, keys: Iterable[BlockKey], *, model: str
    ) -> list[BlockKey]:
        keys = tuple(keys)
        running[-1].store.gave_up(keys)  # they may have been stored since they were given up
        return delete(maintenance, keys, model=model)

    def watched_unreadable(index: PrefixIndex, keys: Iterable[BlockKey]) -> Any:
        keys = tuple(keys)
        running[-1].store.refused(keys)
        return unreadable(index, keys)

    put, removed_record = Records.put, Records.remove

    def watched_put(records: Records, name: str, data: bytes) -> None:
        path = records._path(name)
        running[-1].store.writes_record(path, data + records._checksum(name, data))
        put(records, name, data)
        running[-1].store.wrote_record(path)

    def watched_remove_record(records: Records, name: str) -> None:
        running[-1].store.writes_record(records._path(name), None)
        removed_record(records, name)

    Records.put, Records.remove = watched_put, watched_remove_record  # type: ignore[method-assign]

    def watched_count(drafts: Drafts, sequence: Any, draft: Draft, *, accepted: int) -> None:
        running[-1].workers.verified(sequence, draft, accepted=accepted)
        count(drafts, sequence, draft, accepted=accepted)

    count = Drafts.count
    Drafts.count = watched_count  # type: ignore[method-assign]
    put_in_ram, evict, accept = RamTier.put, RamTier.evict, PrefixIndex.accept

    def watched_put_in_ram(ram: RamTier, key: BlockKey, *args: Any, **more: Any) -> None:
        put_in_ram(ram, key, *args, **more)
        running[-1].workers.used(ram, (key,))

    def watched_evict(ram: RamTier, key: BlockKey) -> None:
        running[-1].workers.evicts(ram, key)
        evict(ram, key)

    def watched_accept(index: PrefixIndex, plan: ReusePlan) -> None:
        running[-1].workers.used(index.ram, plan.keys)
        running[-1].store.used(plan.keys)
        accept(index, plan)

    reclaim = LiveTier.reclaim

    def watched_reclaim(live: LiveTier, nbytes: int) -> None:
        before = live._chains.parked
        reclaim(live, nbytes)
        running[-1].workers.reclaimed(before, live._chains.parked)

    LiveTier.reclaim = watched_reclaim  # type: ignore[method-assign]
    write, touch = WriteAhead.write, IoThread.touch

    def watched_write(ahead: WriteAhead, block: Block, *args: Any, **more: Any) -> None:
        running[-1].store.used((block.key,))
        write(ahead, block, *args, **more)

    def watched_touch(io: IoThread, keys: Iterable[BlockKey]) -> None:
        keys = tuple(keys)
        running[-1].store.used(keys)
        touch(io, keys)

    choose_victims = maintenance.choose_victims

    def watched_choose(entries: Sequence[Entry], **more: Any) -> list[Entry]:
        victims = choose_victims(entries, **more)
        running[-1].store.chose(entries, victims, in_use=more.get("in_use", ()))
        return victims

    WriteAhead.write, IoThread.touch = watched_write, watched_touch  # type: ignore[method-assign]
    maintenance.choose_victims = watched_choose
    RamTier.put = watched_put_in_ram  # type: ignore[method-assign]
    RamTier.evict = watched_evict  # type: ignore[method-assign]
    PrefixIndex.accept = watched_accept  # type: ignore[method-assign]
    unreadable = PrefixIndex.unreadable
    PrefixIndex.unreadable = watched_unreadable
    unlink, delete = StoreMaintenance._unlink, StoreMaintenance.remove
    StoreMaintenance.remove = watched_delete  # type: ignore[method-assign]
    Mailbox.finish = watched_finish
    StoreMaintenance._unlink = watched_unlink
    IoThread.remove = watched_remove
    for kind, name, event in _CACHE_EVENTS:
        _tell(kind, name, event)
    log_failure = device_steps.log_failure

    @contextlib.contextmanager
    def watched_log_failure(message: str, *names: object, **more: Any) -> Iterator[None]:
        with log_failure(message, *names, **more):
            try:
                yield
            except Exception as error:
                running[-1].swallowed(error)
                raise

    mark_failed = ModelSlot._mark_failed

    def watched_mark_failed(slot: ModelSlot, error: HoldfastError) -> None:
        running[-1].refusals.gave_up(slot.state, error)
        mark_failed(slot, error)

    ModelSlot._mark_failed = watched_mark_failed  # type: ignore[method-assign]
    device_call = device_steps.device_call

    @contextlib.contextmanager
    def watched_device_call() -> Iterator[None]:
        with device_call():
            try:
                yield
            except Exception as error:
                running[-1].swallowed(error)
                raise

    modules: list[Any] = list(sys.modules.values())
    for module in modules:
        if getattr(module, "log_failure", None) is log_failure:
            module.log_failure = watched_log_failure
        if getattr(module, "device_call", None) is device_call:
            module.device_call = watched_device_call
    WorkerLink.send = watched_send  # type: ignore[method-assign]
    WorkerLink._handle_events = watched_deliver  # type: ignore[method-assign]
    WorkerLoop._receive = watched_receive  # type: ignore[method-assign]


# what happens in caches and stores: class, method and name
_CACHE_EVENTS = (
    (PrefixIndex, "_evict", "a block leaves RAM"),
    (PrefixIndex, "_lose_key", "a block is lost"),
    (PrefixIndex, "fill", "a block is stored again"),
    (PrefixIndex, "mark_suspect", "a block cannot be read"),
    (PrefixIndex, "unreadable", "a block is damaged or gone"),
    (PrefixIndex, "forget", "blocks are forgotten"),
    (LiveTier, "end_chain", "a live state ends"),
    (LiveTier, "seclude", "a state is quantized"),
    (IoThread, "remove", "files are deleted"),
    (IoThread, "_pause", "the store pauses"),
    (IoThread, "_count_evicted", "files are evicted"),
    (StoreMaintenance, "recheck_file", "a file is read again"),
    (ImageProcess, "_begin_next", "an image is processed"),
    (ImageProcess, "_handle_failure", "the image process fails"),
    (FeatureCache, "_read", "features are read"),
    (FeatureCache, "_write", "features are written"),
)


def _tell(kind: type, name: str, event: str) -> None:
    """Let the search know what happens in which order."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def told(*args: Any, **more: Any) -> Any:
        running[-1].saw_in_cache(event)
        return method(*args, **more)

    setattr(kind, name, told)


@dataclass
class _Watched:
    inbox: Any
    receive: Any
