"""What was read stays read: finds what a request can begin from, fetches it from disk, takes in
what sequences compute.

Device thread only. The store's threads see bytes, never arrays.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import mlx.core as mx
import msgspec

from holdfast.store.block import Block, BlockKey, BlockKind, ReadFailed, StoredBlock
from holdfast.store.store import BlockStore
from holdfast.wire.events import CacheOutcome
from holdfast.wire.figures import CacheFigures
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.engine.plan import BLOCK_TOKENS, KeepPolicy
from holdfast.worker.engine.sequence import Kept, Prefix
from holdfast.worker.kv.codec import (
    Description,
    Payload,
    block_from_bytes,
    check_block,
    check_checkpoint,
    check_values,
    checkpoint_from_bytes,
    pack,
    to_bytes,
    unpack,
)
from holdfast.worker.kv.form import Codec, ModelForm
from holdfast.worker.kv.snapshot import KVBlock, SnapshotMismatch, StateCheckpoint, all_finite
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.live import LiveChain
from holdfast.worker.prefix.live_tier import LiveTier
from holdfast.worker.prefix.lookup import Lookup
from holdfast.worker.prefix.piece import Cursor
from holdfast.worker.prefix.ram import Residence
from holdfast.worker.prefix.reuse import ReusePlan

MOST_BRANCH_POINTS = 8
BOUNDARY_TOKENS = 1024  # between states of a long prompt, for models that resume only there
TEND_SECONDS = 0.25
OFFER_AGAIN_SECONDS = 30.0
BLOCKS_OFFERED_AGAIN = 64
CLOSING_SECONDS = 4.0  # for what the store had no room for; who ends a worker gives it twice that
BLOCKS_AT_A_TIME = 8

logger = logging.getLogger("holdfast.cache")


class PrefixCache:
    """The index of one model, its store, and the way between them and the engine."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        store: BlockStore | None,
        form: ModelForm,
        codec: Codec = "native",
        most_parked_bytes: int | None = None,
    ) -> None:
        """most_parked_bytes: of states of sequences that have ended, in live form; 0: none is
        parked, None: as many as fit.
        """
        self._index, self._store = index, store
        self._form, self._codec = form, codec
        self.live = LiveTier(index, form=form, codec=codec, most_parked_bytes=most_parked_bytes)
        self._tended_at = self._offered_at = 0.0
        placed = index.load()
        if placed:
            logger.info(
                "the store has %d block%s of this model", placed, "" if placed == 1 else "s"
            )

    @property
    def index(self) -> PrefixIndex:
        """The book of what is kept."""
        return self._index

    @property
    def store(self) -> BlockStore | None:
        """The disk side, if a folder is set."""
        return self._store

    @property
    def keeps_anything(self) -> bool:
        """Whether there is any use in asking."""
        return True

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """Where spans of a prompt have to end, for a state to be taken: every so often, at branch
        points, before the last token.

        The last token is read again in any case, so that a repeated prompt can begin right before
        it.
        """
        if self._form.resumes_anywhere:
            return ()
        marks = {
            *range(BOUNDARY_TOKENS, prompt_tokens, BOUNDARY_TOKENS),
            *branch_points[:MOST_BRANCH_POINTS],
            prompt_tokens - 1,
        }
        return tuple(sorted(mark for mark in marks if 0 < mark < prompt_tokens))

    def policy(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> KeepPolicy:
        """What the engine is to copy out of a sequence with such a prompt while it runs."""
        marks = self.boundaries(prompt_tokens, branch_points) or (prompt_tokens,)
        return KeepPolicy(block_tokens=BLOCK_TOKENS, boundaries=frozenset(marks))

    def lookup(
        self, chain: bytes, *, tenant: str = "", in_blocks_only: bool = False, may_move: bool = True
    ) -> Lookup:
        """Find what a sequence that knows `chain`, packed tokens, can begin from, and begin to
        fetch what of it is on disk.

        in_blocks_only: not from live states. may_move: it leaves a state that is as good as the one
        it takes over.
        """
        asked_at = time.perf_counter()
        plan = self._plan(chain, tenant)
        lookup = Lookup(
            chain=chain, tenant=tenant, plan=plan, hold=self._index.pinned(plan), asked_at=asked_at
        )
        lookup.may_move, lookup.in_blocks_only = may_move, in_blocks_only
        if not in_blocks_only:
            lookup.base = self.live.claim(lookup)
        self._fetch(lookup)
        return lookup

    def advance(self, lookup: Lookup) -> bool:
        """Take what has come from the disk; whether all of the plan is in RAM now.

        What cannot be read is forgotten, and the request begins from what remains. Takes a few
        blocks at a time, so that streams that are decoding meanwhile hardly feel it.
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
            self._index.unreadable((key,))
            return False
        lookup.fetched[key] = payload
        self._index.restored(key, payload)
        return True

    def _gather(self, lookup: Lookup) -> bool:
        """Take hold of every payload of the plan, whatever becomes of it in the index; False when
        one is not there.
        """
        for key in _missing(lookup):
            payload = lookup.fetched.get(key) or self.payload(key)
            if payload is None:
                # a live state has it, and it is not sound
                if self._index.residence(key) is Residence.RAM:
                    self.forget((key,))
                return False
            lookup.fetched[key] = payload
        return True

    def payload(self, key: BlockKey) -> Payload | None:
        """A payload that is in RAM, or a copy out of a live state; None when it is on disk only."""
        payload = self._index.payload(key)
        return payload if isinstance(payload, KVBlock | StateCheckpoint) else self.live.copied(key)

    def prefix(self, lookup: Lookup) -> Prefix | None:
        """What to give the engine; None when there is nothing.

        Counts as a use. What is moved is the sequence's from now on.
        """
        plan = lookup.plan
        if lookup.cached_tokens == 0:
            return None
        self.live.join(lookup)
        blocks: list[KVBlock] = []
        for piece in lookup.missing_pieces:
            kept = lookup.fetched[piece.key]
            assert isinstance(kept, KVBlock)
            behind = max(0, lookup.base_tokens - piece.start)
            cut = kept.cut(piece.tokens - behind, offset=piece.offset + behind)
            blocks.append(replace(unpack(cut), start=piece.start + behind))
        self._index.accept(plan)
        checkpoint = None if lookup.checkpoint is None else lookup.fetched[lookup.checkpoint.key]
        assert checkpoint is None or isinstance(checkpoint, StateCheckpoint)
        kept_tokens = min(plan.tokens, lookup.cached_tokens)
        return Prefix(
            base=self.live.base(lookup),
            blocks=tuple(blocks),
            state=checkpoint,
            kept_tokens=kept_tokens,
        )

    def cursor(self, *, tenant: str = "") -> Cursor:
        """A cursor before the first token of a chain."""
        return self._index.cursor(tenant=tenant)

    def insert(
        self, cursor: Cursor, chain: bytes | bytearray, kept: Kept, *, live: LiveChain | None = None
    ) -> tuple[BlockKey, ...]:
        """Take in what was copied out of a sequence that knows `chain`, packed tokens; returns what
        is new of it.

        live: the sequence's live chain, which holds all of that.

        `cursor` moves along the chain as far as it is stored then. Longer than what the sequence
        knows is not kept, and nothing that holds values which are not finite.
        """
        if not kept.is_finite:
            logger.debug(
                "what request %s has read is not kept: it holds values that are not finite",
                kept.request_id,
            )
            return ()
        blocks = [
            self.insert_block(cursor, chain, pack(run, self._codec), live=live)
            for run in kept.blocks
        ]
        if kept.state is not None:
            blocks.append(self.insert_checkpoint(cursor, chain, kept.state))
        return tuple([block.key for block in blocks if block is not None])

    def insert_block(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        run: KVBlock,
        *,
        live: LiveChain | None = None,
    ) -> Block | None:
        """Take in what is not stored yet of a run that begins at its `start` in the chain; what is
        new.
        """
        end = min(run.start + run.tokens, len(chain) // TOKEN_BYTES)
        self._index.advance(cursor, chain, end=end)
        start = cursor.position
        if not run.start <= start < end:  # all of it is stored, or what stands before it is not
            return None
        packed = run.cut(end - start, offset=start - run.start)
        mx.eval(packed.arrays)
        # a scale beyond the range of its type
        if packed.codec != "native" and not all_finite(packed.arrays).item():
            return None
        tokens = bytes(chain[start * TOKEN_BYTES : end * TOKEN_BYTES])
        return self._save(self._index.insert(cursor, tokens, packed, holder=live), packed)

    def insert_checkpoint(
        self, cursor: Cursor, chain: bytes | bytearray, state: StateCheckpoint
    ) -> Block | None:
        """Take in a checkpoint that has seen tokens of the chain which are stored; what is new."""
        position = state.position
        if not 0 < position <= len(chain) // TOKEN_BYTES:
            return None
        self._index.advance(cursor, chain, end=position)
        if cursor.position < position:
            return None
        return self._save(self._index.insert_checkpoint(cursor.back_at(position), state), state)

    def forget(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Forget blocks that cannot be trusted, with all that stands behind them, in RAM and on
        disk; returns what that was.
        """
        return self._index.forget(keys, cause=CacheOutcome.UNREADABLE)

    def gone(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Which of these are nowhere any more."""
        return tuple([key for key in keys if self._index.residence(key) is None])

    def forget_unsound(self, keys: Sequence[BlockKey]) -> tuple[BlockKey, ...]:
        """Of a chain, forget everything from the first block on that is not known to be sound;
        returns what that was.

        Known to be sound is what is in RAM, has the model's form and holds finite values only.
        """
        first = next((key for key in keys if not self._is_sound(key)), None)
        return () if first is None else self.forget((first,))

    def _is_sound(self, key: BlockKey) -> bool:
        payload = self.payload(key)
        if payload is None:
            return False
        meta, parts = to_bytes(payload)
        try:
            self.check("state" if isinstance(payload, StateCheckpoint) else "kv", meta, parts)
        except SnapshotMismatch:
            return False
        return True

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Let blocks in RAM and parked states take so much from now on; what is beyond that goes.

        None: as many as fit.
        """
        self.live.limit_parked(most_parked_bytes)
        self._index.set_ram_budget(nbytes)

    def tend(self) -> None:
        """Drop what is not to be trusted; now and then learn from the store what became durable and
        what was lost.
        """
        self.live.drop_stale()
        now = time.perf_counter()
        if self._store is None or now - self._tended_at < TEND_SECONDS:
            return
        self._tended_at = now
        self._learn(self._store)
        if now - self._offered_at >= OFFER_AGAIN_SECONDS:
            self._offered_at = now
            self._offer_again()

    def _learn(self, store: BlockStore) -> None:
        changes = store.changes()
        if changes.stored or changes.lost:
            self._index.disk_changed(stored=changes.stored, lost=changes.lost)

    def offer_rest(self) -> None:
        """RAM is about to go: offer the store what it has refused, until all is taken, or no more,
        or the time is over. Waits.
        """
        if (store := self._store) is None:
            return
        ends_at, left = time.perf_counter() + CLOSING_SECONDS, math.inf
        while store.flush(max(0.0, ends_at - time.perf_counter())):
            self._learn(store)
            if not 0 < (unsaved := len(self._index.unsaved())) < left:
                return
            left = unsaved
            self._offer_again()

    def _offer_again(self) -> None:
        """Give the store once more what it had no room or no disk for."""
        for block in self._index.unsaved()[:BLOCKS_OFFERED_AGAIN]:
            payload = self.payload(block.key)
            if payload is not None:
                self._index.save_again(block)
                self._save(block, payload)

    def figures(self) -> CacheFigures:
        """What is kept."""
        store = None if self._store is None else self._store.statistics()
        held = self.live.held
        return msgspec.structs.replace(
            self._index.figures(),
            store=store,
            parked_sequences=held.parked,
            parked_bytes=held.parked_bytes,
        )

    def close(self) -> None:
        """Write what is queued and end the store's threads."""
        if self._store is not None:
            self._store.close()

    def _plan(self, chain: bytes, tenant: str) -> ReusePlan:
        limit = len(chain) // TOKEN_BYTES - 1  # the last token is always read
        return self._index.plan(
            chain, tenant=tenant, resumable_anywhere=self._form.resumes_anywhere, limit=limit
        )

    def _plan_again(self, lookup: Lookup) -> None:
        lookup.hold.close()
        lookup.plan = self._plan(lookup.chain, lookup.tenant)
        lookup.hold = self._index.pinned(lookup.plan)
        if lookup.base is not None:
            lookup.let_go_of_base()
            lookup.base = self.live.claim(lookup)
        self._fetch(lookup)

    def _fetch(self, lookup: Lookup) -> None:
        on_disk = set(lookup.plan.to_read)
        wanted = [key for key in _missing(lookup) if key in on_disk and key not in lookup.fetched]
        lookup.awaited = {key: future for key, future in lookup.awaited.items() if key in wanted}
        if self._store is not None:
            lookup.awaited |= {
                key: self._store.read(key) for key in wanted if key not in lookup.awaited
            }

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
        """What a run or state is, by its description, if this model can have it.

        Any thread. Raises SnapshotMismatch.
        """
        if kind == "state":
            return check_checkpoint(meta, part_bytes, model=self._form)
        run = check_block(meta, part_bytes, model=self._form, codec=self._codec)
        if run.length > BLOCK_TOKENS:
            raise SnapshotMismatch(f"a run of {run.length} tokens is longer than a block")
        return run

    def check(self, kind: BlockKind, meta: bytes, parts: Sequence[bytes | memoryview]) -> None:
        """The same, and that every value is finite. Any thread. Raises SnapshotMismatch."""
        check_values(self.describe(kind, meta, _sizes(parts)).arrays, parts)

    def decoded(self, kind: BlockKind, meta: bytes, parts: Sequence[memoryview]) -> Payload:
        """A run or state of this model out of its bytes. Raises SnapshotMismatch for what is none."""
        self.describe(kind, meta, _sizes(parts))
        return (
            checkpoint_from_bytes(meta, parts) if kind == "state" else block_from_bytes(meta, parts)
        )

    def _save(self, block: Block | None, payload: Payload) -> Block | None:
        """Give what is new to the store."""
        if block is not None and self._store is not None:
            meta, parts = to_bytes(payload)
            self._store.put(StoredBlock(block=block, meta=meta, parts=parts))
        return block


def _missing(lookup: Lookup) -> list[BlockKey]:
    """What is needed beside the live state, parents before children."""
    keys = [piece.key for piece in lookup.missing_pieces]
    return keys if lookup.checkpoint is None else [*keys, lookup.checkpoint.key]


def _sizes(parts: Sequence[bytes | memoryview]) -> list[int]:
    return [memoryview(part).nbytes for part in parts]
