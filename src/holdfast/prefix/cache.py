"""What was read stays read: finds what a request can begin from, fetches it from disk, takes in what sequences compute.

Device thread only. The store's threads see bytes, never arrays.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx

from holdfast.engine.keeping import Kept, Prefix
from holdfast.engine.plan import KeepPolicy
from holdfast.kv.codec import (
    Description,
    Payload,
    check_run,
    check_state,
    check_values,
    pack,
    run_from_bytes,
    state_from_bytes,
    to_bytes,
    unpack,
)
from holdfast.kv.form import Codec, ModelForm
from holdfast.kv.snapshot import KVBlock, SnapshotMismatch, StateCheckpoint, all_finite
from holdfast.messages.figures import CacheFigures
from holdfast.prefix.addition import Addition
from holdfast.prefix.evicted import EvictionCause
from holdfast.prefix.index import PrefixIndex
from holdfast.prefix.lookup import Lookup
from holdfast.prefix.report import figures_of
from holdfast.prefix.reuse import ReusePlan
from holdfast.prefix.tree import BLOCK_TOKENS
from holdfast.store.block import Block, BlockKey, BlockKind, ReadFailed, StoredBlock
from holdfast.store.store import BlockStore

KEPT_BLOCK_TOKENS = 256
MOST_BRANCH_POINTS = 8
BOUNDARY_TOKENS = 1024  # between states of a long prompt, for models that resume only there
TEND_SECONDS = 0.25
OFFER_AGAIN_SECONDS = 30.0
BLOCKS_OFFERED_AGAIN = 64
BLOCKS_AT_A_TIME = 8

logger = logging.getLogger("holdfast.cache")


class PrefixCache:
    """The library of one model, its store, and the way between them and the engine."""

    def __init__(self, library: PrefixIndex, *, store: BlockStore | None, form: ModelForm, codec: Codec = "native") -> None:
        self._library, self._store = library, store
        self._form, self._codec = form, codec
        self._tended_at = self._offered_at = 0.0
        loaded = library.load()
        if loaded.placed:
            logger.info("the store has %d block%s of this model", loaded.placed, "" if loaded.placed == 1 else "s")

    @property
    def library(self) -> PrefixIndex:
        """The book of what is kept."""
        return self._library

    @property
    def store(self) -> BlockStore | None:
        """The disk side, if a folder is set."""
        return self._store

    @property
    def keeps_anything(self) -> bool:
        """Whether there is any use in asking."""
        return True

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Where spans of a prompt have to end, for a state to be taken: every so often, at branch points, before the last token.

        The last token is read again in any case, so that a repeated prompt can begin right before it.
        """
        if self._form.resumes_anywhere:
            return ()
        marks = {*range(BOUNDARY_TOKENS, prompt_tokens, BOUNDARY_TOKENS), *branch_points[:MOST_BRANCH_POINTS], prompt_tokens - 1}
        return tuple(sorted(mark for mark in marks if 0 < mark < prompt_tokens))

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> KeepPolicy:
        """What the engine is to copy out of a sequence with such a prompt while it runs."""
        marks = self.boundaries(prompt_tokens, branch_points) or (prompt_tokens,)
        return KeepPolicy(run_tokens=KEPT_BLOCK_TOKENS, boundaries=frozenset(marks))

    def lookup(self, tokens: array[int], *, tenant: str = "") -> Lookup:
        """Find what a sequence that knows `tokens` can begin from, and begin to fetch what of it is on disk."""
        plan = self._plan(tokens, tenant)
        lookup = Lookup(tokens=tokens, tenant=tenant, plan=plan, hold=self._library.hold(plan.keys), asked_at=time.perf_counter())
        self._fetch(lookup)
        return lookup

    def advance(self, lookup: Lookup) -> bool:
        """Take what has come from the disk; whether all of the plan is in RAM now.

        What cannot be read is forgotten, and the request begins from what remains. Takes a few blocks at a time, so that streams
        that are decoding meanwhile hardly feel it.
        """
        done = [key for key, future in lookup.awaited.items() if future.done()]
        if not all(self._take(lookup, key) for key in done[:BLOCKS_AT_A_TIME]):
            self._plan_again(lookup)
            return False
        if lookup.awaited:
            return False
        if not self._gather(lookup):  # something was forgotten on another request's account
            self._plan_again(lookup)
            return False
        if lookup.fetched_at is None:
            lookup.fetched_at = time.perf_counter()
        return True

    def _take(self, lookup: Lookup, key: BlockKey) -> bool:
        """Take a block that was read; False when it cannot be used."""
        try:
            payload = self._payload_of(lookup.awaited.pop(key).result())
        except (ReadFailed, SnapshotMismatch) as failure:
            logger.warning("a stored block cannot be used, its tokens are read again: %s", failure)
            self._library.unreadable((key,))
            return False
        lookup.fetched[key] = payload
        self._library.restored(key, payload)
        return True

    def _gather(self, lookup: Lookup) -> bool:
        """Take hold of every payload of the plan, whatever becomes of it in the library; False when one is not there."""
        for key in lookup.plan.keys:
            payload = lookup.fetched.get(key) or self._library.payload(key)
            if not isinstance(payload, KVBlock | StateCheckpoint):
                return False
            lookup.fetched[key] = payload
        return True

    def prefix(self, lookup: Lookup) -> Prefix | None:
        """What to give the engine; None when there is nothing. Counts as a use."""
        plan = lookup.plan
        if plan.tokens == 0:
            return None
        runs: list[KVBlock] = []
        for piece in plan.pieces:
            kept = lookup.fetched[piece.key]
            assert isinstance(kept, KVBlock)
            runs.append(replace(unpack(kept.cut(piece.tokens, offset=piece.offset)), start=piece.start))
        self._library.accept(plan)
        return Prefix(runs=tuple(runs), state=self._state_of(lookup))

    def _state_of(self, lookup: Lookup) -> StateCheckpoint | None:
        if lookup.plan.state is None:
            return None
        state = lookup.fetched[lookup.plan.state.key]
        assert isinstance(state, StateCheckpoint)
        return state

    def insert(self, tokens: array[int], kept: Kept, *, tenant: str = "") -> tuple[BlockKey, ...]:
        """Take in what was copied out of a sequence that knows `tokens`; returns what is new of it.

        Longer than what it knows is not kept, and nothing that holds values which are not finite.
        """
        if not kept.is_finite:
            logger.debug("what request %s has read is not kept: it holds values that are not finite", kept.request_id)
            return ()
        added = [key for run in kept.runs for key in self._keep_run(tokens, run, tenant)]
        if kept.state is not None:
            added += self.keep_state(tokens, kept.state, tenant=tenant)
        return tuple(added)

    def keep_state(self, tokens: array[int], state: StateCheckpoint, *, tenant: str) -> tuple[BlockKey, ...]:
        """Take in a state that has seen the first of these tokens; one that has seen more is not kept. Returns what is new."""
        if not 0 < state.position <= len(tokens):
            return ()
        return self._save_new(self._library.add_state(tokens[: state.position], payload=state, tenant=tenant), state)

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget blocks that cannot be trusted, with all that stands behind them, in RAM and on disk; returns what that was."""
        return self._library.forget(keys, cause=EvictionCause.UNTRUSTED)

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Of a chain, forget everything from the first block on that is not known to be sound; returns what that was.

        Known to be sound is what is in RAM, has the model's form and holds finite values only.
        """
        first = next((key for key in keys if not self._is_sound(key)), None)
        return () if first is None else self.forget((first,))

    def _is_sound(self, key: BlockKey) -> bool:
        payload = self._library.payload(key)
        if not isinstance(payload, KVBlock | StateCheckpoint):
            return False
        meta, parts = to_bytes(payload)
        try:
            self.check("state" if isinstance(payload, StateCheckpoint) else "kv", meta, parts)
        except SnapshotMismatch:
            return False
        return True

    def tend(self) -> None:
        """Now and then: learn from the store what became durable and what was lost."""
        now = time.perf_counter()
        if self._store is None or now - self._tended_at < TEND_SECONDS:
            return
        self._tended_at = now
        changes = self._store.changes()
        if changes.stored or changes.lost:
            self._library.disk_changed(stored=changes.stored, lost=changes.lost)
        if now - self._offered_at >= OFFER_AGAIN_SECONDS:
            self._offered_at = now
            self._offer_again()

    def _offer_again(self) -> None:
        """Give the store once more what it had no room or no disk for."""
        for block in self._library.unsaved()[:BLOCKS_OFFERED_AGAIN]:
            payload = self._library.payload(block.key)
            if isinstance(payload, KVBlock | StateCheckpoint):
                self._library.save_again(block)
                self._save(block, payload)

    def figures(self) -> CacheFigures:
        """What is kept."""
        return figures_of(self._library.statistics(), None if self._store is None else self._store.statistics())

    def close(self) -> None:
        """Write what is queued and end the store's threads."""
        if self._store is not None:
            self._store.close()

    def _plan(self, tokens: array[int], tenant: str) -> ReusePlan:
        return self._library.plan(tokens, tenant=tenant, resumable_anywhere=self._form.resumes_anywhere, limit=len(tokens) - 1)

    def _plan_again(self, lookup: Lookup) -> None:
        lookup.hold.release()
        lookup.plan = self._plan(lookup.tokens, lookup.tenant)
        lookup.hold = self._library.hold(lookup.plan.keys)
        self._fetch(lookup)

    def _fetch(self, lookup: Lookup) -> None:
        wanted = [key for key in lookup.plan.to_read if key not in lookup.fetched]
        lookup.awaited = {key: future for key, future in lookup.awaited.items() if key in wanted}
        if self._store is not None:
            lookup.awaited |= {key: self._store.read(key) for key in wanted if key not in lookup.awaited}

    def _payload_of(self, stored: StoredBlock) -> Payload:
        block, parts = stored.block, tuple(memoryview(part) for part in stored.parts)
        payload = self.decoded(block.kind, stored.meta, parts)
        if isinstance(payload, StateCheckpoint):
            if payload.position != block.start:
                raise SnapshotMismatch("a stored state stands elsewhere than its block")
        elif payload.tokens != block.tokens:
            raise SnapshotMismatch("a stored run has another length than its tokens")
        return payload

    def describe(self, kind: BlockKind, meta: bytes, part_bytes: Sequence[int]) -> Description:
        """What a run or state is, by its description, if this model can have it. Any thread. Raises SnapshotMismatch."""
        if kind == "state":
            return check_state(meta, part_bytes, model=self._form)
        run = check_run(meta, part_bytes, model=self._form, codec=self._codec)
        if run.length > BLOCK_TOKENS:
            raise SnapshotMismatch(f"a run of {run.length} tokens is longer than a block")
        return run

    def check(self, kind: BlockKind, meta: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """The same, and that every value is finite. Any thread. Raises SnapshotMismatch."""
        check_values(self.describe(kind, meta, _sizes(parts)).arrays, parts)

    def decoded(self, kind: BlockKind, meta: bytes, parts: Sequence[memoryview]) -> Payload:
        """A run or state of this model out of its bytes. Raises SnapshotMismatch for what is none."""
        self.describe(kind, meta, _sizes(parts))
        return state_from_bytes(meta, parts) if kind == "state" else run_from_bytes(meta, parts)

    def _keep_run(self, tokens: array[int], run: KVBlock, tenant: str) -> tuple[BlockKey, ...]:
        if min(run.start + run.tokens, len(tokens)) <= run.start:
            return ()
        return self.keep_packed(tokens[: run.start + run.tokens], pack(run, self._codec), tenant=tenant)

    def keep_packed(self, tokens: array[int], run: KVBlock, *, tenant: str) -> tuple[BlockKey, ...]:
        """Take in what is not there yet of a run that begins at its `start` among `tokens`; returns what is new."""
        end = min(run.start + run.tokens, len(tokens))
        start = max(run.start, self._library.missing(tokens[:end], tenant=tenant))
        if start >= end:
            return ()
        packed = run.cut(end - start, offset=start - run.start)
        mx.eval(packed.arrays)
        if packed.codec != "native" and not all_finite(packed.arrays).item():  # a scale beyond the range of its type
            return ()
        return self._save_new(self._library.add_run(tokens[:end], start=start, payload=packed, tenant=tenant), packed)

    def _save_new(self, addition: Addition, payload: Payload) -> tuple[BlockKey, ...]:
        if addition.new_block is None:
            return ()
        self._save(addition.new_block, payload)
        return (addition.new_block.key,)

    def _save(self, block: Block, payload: Payload) -> None:
        if self._store is not None:
            meta, parts = to_bytes(payload)
            self._store.put(StoredBlock(block=block, meta=meta, parts=parts))


def _sizes(parts: Sequence[bytes | memoryview]) -> list[int]:
    return [memoryview(part).nbytes for part in parts]
