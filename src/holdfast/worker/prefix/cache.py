"""The prefix cache: finds the blocks and states that a request can start from, restores them, and
stores new ones.

A *block* has the keys and values of up to BLOCK_TOKENS tokens, a *state* (checkpoint) what window and
recurrent layers hold after a token. A *live state* is all of this in a sequence's own buffers, while
it runs or is *parked* (has ended, and is kept until its memory is needed). Other sequences can start
from blocks and a state, or from a live state. Sequences hold keys and values in one of several
*forms*: native or quantized.

Device thread only. The store's threads see bytes, never arrays.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import mlx.core as mx
import msgspec

from holdfast.store.block import Block, BlockKey, BlockUnreadable, ReadFailed, StoredBlock
from holdfast.store.store import BlockStore
from holdfast.wire.cache_map import CacheMap, CacheMapQuestion
from holdfast.wire.events import CacheFigures, CacheOutcome
from holdfast.wire.requests import TOKEN_BYTES
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.engine.plan import BLOCK_TOKENS
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.codec import PayloadFormat, check_sizes, check_values, to_bytes
from holdfast.worker.kv.layer import SnapshotMismatch
from holdfast.worker.kv.live import Snapshot
from holdfast.worker.prefix.cache_map import CacheUser, RecentMaps, cache_map
from holdfast.worker.prefix.chain import Cursor, Root
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.live_tier import LiveTier
from holdfast.worker.prefix.lookup import CachedStart, LiveChain, Lookup, ReusePlan, Shortfall
from holdfast.worker.prefix.tiers import Residence

MOST_BRANCH_POINTS = 8  # of one prompt, at which states are saved
# distance between the states saved in a long prompt, if the model can resume only at saved states
BOUNDARY_TOKENS = 1024
TEND_SECONDS = 0.25  # between two questions to the store about what it has saved
OFFER_AGAIN_SECONDS = 30.0  # between two offers of unsaved blocks
BLOCKS_OFFERED_AGAIN = 64  # in one offer
# at shutdown, for saving blocks that the store had no room for; the front waits twice as long
CLOSING_SECONDS = 4.0
BLOCKS_AT_A_TIME = 8  # of those read from disk, taken between two steps

logger = logging.getLogger("holdfast.cache")


class PrefixCache:
    """The prefix cache of one model: its index, its store and its live states."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        store: BlockStore | None,
        payloads: PayloadFormat,
        most_parked_bytes: int | None = None,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        """most_parked_bytes: limit for the live states of ended sequences; 0: none is parked; None:
        as many as fit. fingerprints: None: only that of the index.
        """
        self.fingerprints = fingerprints or Fingerprints(index.fingerprint)
        self.index = index
        self.store = store
        self._payloads = payloads
        self._model_form = payloads.model
        self.live = LiveTier(index, payloads=payloads, most_parked_bytes=most_parked_bytes)
        self._maps = RecentMaps(clock=time.perf_counter)  # the latest cache maps
        self._asked_store_at = self._offered_at = 0.0
        loaded_blocks = index.load()
        if loaded_blocks:
            logger.info(
                "the store has %d block%s of this model",
                loaded_blocks,
                "" if loaded_blocks == 1 else "s",
            )

    # -- start from the cache

    def boundaries(self, prompt_tokens: int, branch_points: Sequence[int] = ()) -> tuple[int, ...]:
        """The positions at which spans of a prompt must end so that a state can be saved.

        The positions are at regular intervals, at branch points, and before the last token: since
        the last token is always prefilled again, a repeated prompt can resume right before it.
        """
        if self._model_form.resumes_anywhere:
            return ()
        positions = {
            *range(BOUNDARY_TOKENS, prompt_tokens, BOUNDARY_TOKENS),
            *branch_points[:MOST_BRANCH_POINTS],
            prompt_tokens - 1,
        }
        return tuple(sorted(each for each in positions if 0 < each < prompt_tokens))

    def lookup(
        self,
        chain: bytes,
        *,
        root: Root,
        in_blocks_only: bool = False,
        may_move: bool = True,
    ) -> Lookup:
        """Find the cached prefix of a sequence whose known tokens are `chain` (packed).

        Also starts to read the blocks that are only on disk. in_blocks_only: whether live states
        are excluded. may_move: whether the sequence may take over a parked state, because its own
        state will be parked, which is just as useful.
        """
        asked_at = time.perf_counter()
        plan = self._plan(chain, root, limit=_most_reusable_tokens(chain))
        lookup = Lookup(
            chain=chain,
            root=root,
            plan=plan,
            hold=self.index.ram.pinned(plan.keys),
            asked_at=asked_at,
            may_move=may_move,
            in_blocks_only=in_blocks_only,
        )
        if not in_blocks_only:
            lookup.base = self.live.claim(lookup)
        self._begin_reading(lookup)
        return lookup

    def cached_tokens(self, chain: bytes, *, root: Root, may_move: bool = True) -> int:
        """The number of tokens of a chain that a sequence in this form would not prefill: what
        `lookup` would find, in blocks or in a live state. Stored tokens that cannot be resumed from
        do not count.
        """
        in_blocks = self._plan(chain, root, limit=_most_reusable_tokens(chain)).tokens
        in_live_state = self.live.resumable_tokens(
            chain, root=root, tokens_in_blocks=in_blocks, may_move=may_move
        )
        return max(in_blocks, in_live_state)

    def advance(self, lookup: Lookup) -> bool:
        """Take blocks that were read from disk; returns whether the whole plan is in RAM.

        The request starts from the blocks before the first one that cannot be used. Each call
        takes only a few blocks, so that decoding streams are hardly delayed.
        """
        read_keys = [key for key, future in lookup.awaited.items() if future.done()]
        if not all(self._accept_block(lookup, key) for key in read_keys[:BLOCKS_AT_A_TIME]):
            self._plan_again(lookup)
            return False
        if lookup.awaited:
            return False
        if not self._gather_payloads(
            lookup
        ):  # a block was forgotten since then because of another request
            self._plan_again(lookup)
            return False
        if lookup.fetched_at is None:
            lookup.fetched_at = time.perf_counter()
        return True

    def _accept_block(self, lookup: Lookup, key: BlockKey) -> bool:
        """Take a block that was read; returns False if it cannot be used."""
        try:
            payload = self.decoded(lookup.awaited.pop(key).result(), root=lookup.root)
        except (ReadFailed, SnapshotMismatch) as failure:
            logger.warning(
                "a stored block cannot be used; its tokens are prefilled again: %s", failure
            )
            if isinstance(failure, BlockUnreadable):
                self.index.mark_suspect(key)
                lookup.end_before(key)
                return False
            self.index.unreadable((key,))
            if isinstance(failure, SnapshotMismatch) and self.store is not None:
                self.store.remove((key,))
            return False
        lookup.fetched[key] = payload
        self.index.restored(key, payload)
        return True

    def _gather_payloads(self, lookup: Lookup) -> bool:
        """Collect all payloads of the plan; returns False if one is gone."""
        for key in lookup.missing_keys:
            payload = lookup.fetched.get(key) or self.payload(key)
            if payload is None:
                # a live state has the block, but its values are not finite
                if self.index.residence(key) is Residence.RAM:
                    self._forget((key,))
                return False
            lookup.fetched[key] = payload
        return True

    def payload(self, key: BlockKey) -> Snapshot | None:
        """The payload of a key from RAM, or a copy from a live state; None if neither has it."""
        payload = self.index.ram.get(key)
        return payload if isinstance(payload, Snapshot) else self.live.copy_from_holder(key)

    def snapshots(self, lookup: Lookup) -> list[Snapshot]:
        """The blocks and the state from which the engine starts the sequence, after the tokens of
        the live state that was claimed. Records that they were used.
        """
        self.live.share_buffers(lookup)
        snapshots: list[Snapshot] = []
        begin = lookup.base_tokens
        for block in lookup.missing_blocks:
            cut = lookup.fetched[block.key].cut(block.end - begin, offset=begin - block.start)
            snapshots.append(replace(cut, start=begin))
            begin = block.end
        self.index.accept(lookup.plan)
        if (state := lookup.missing_state) is not None:
            snapshots.append(lookup.fetched[state.key])
        return snapshots

    def _plan(self, chain: bytes, root: Root, *, limit: int) -> ReusePlan:
        """Plan which blocks, of at most `limit` tokens, a sequence with this chain reuses."""
        return self.index.planner.plan(
            chain, root=root, resumable_anywhere=self._model_form.resumes_anywhere, limit=limit
        )

    def _plan_again(self, lookup: Lookup) -> None:
        """Repeat a lookup whose blocks or live state were lost before the sequence started."""
        lookup.hold.close()
        limit = _most_reusable_tokens(lookup.chain)
        if lookup.limit_tokens is not None:
            limit = min(limit, lookup.limit_tokens)
        planned_tokens = lookup.plan.tokens
        lookup.plan = self._plan(lookup.chain, lookup.root, limit=limit)
        if lookup.limit_tokens is not None:
            unused = max(0, planned_tokens - lookup.plan.tokens)
            shortfall = Shortfall(CacheOutcome.UNREADABLE, unused)
            lookup.plan = replace(lookup.plan, shortfall=shortfall)
        lookup.hold = self.index.ram.pinned(lookup.plan.keys)
        if lookup.base is not None:
            lookup.drop_base()
            lookup.base = self.live.claim(lookup)
        self._begin_reading(lookup)

    def _begin_reading(self, lookup: Lookup) -> None:
        """Begin to read the plan's blocks from disk that are not in memory, unless they are being read
        already.
        """
        to_read = set(lookup.plan.to_read)
        being_read = lookup.awaited
        lookup.awaited = {}
        for key in lookup.missing_keys:
            if key not in to_read or key in lookup.fetched:
                continue
            if key in being_read:
                lookup.awaited[key] = being_read[key]
            elif self.store is not None:
                lookup.awaited[key] = self.store.read(key)

    # -- store new blocks

    def store_snapshots(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        snapshots: Sequence[Snapshot],
        *,
        live: LiveChain | None = None,
    ) -> tuple[BlockKey, ...]:
        """Store snapshots of a sequence with the packed tokens `chain`.

        Returns the new keys, and moves `cursor` to the end of the stored part. Snapshots of tokens
        after the chain are not stored; if a value is not finite, none is. live: the sequence's live
        chain, which also holds these tokens.
        """
        if not all(snapshot.is_finite for snapshot in snapshots):
            return ()
        blocks = [
            self._store_snapshot(cursor, chain, snapshot, live=live) for snapshot in snapshots
        ]
        if live is not None:
            self._fill_gaps(cursor, live)
        return tuple([block.key for block in blocks if block is not None])

    def _store_snapshot(
        self,
        cursor: Cursor,
        chain: bytes | bytearray,
        snapshot: Snapshot,
        *,
        live: LiveChain | None,
    ) -> Block | None:
        """Store the tokens of a block that are not stored yet, or a state if all tokens before it
        are stored.

        Returns the new block; None if there is nothing to store, or no room.
        """
        end = min(snapshot.end, len(chain) // TOKEN_BYTES)
        self.index.tree.advance(cursor, chain, end=end)
        start = cursor.position
        if not snapshot.tokens:
            fits = snapshot.layers == self._model_form.layers and 0 < snapshot.start <= min(
                start, end
            )
            if not fits:
                return None
            place = cursor.back_at(end)
            return self._offer_to_store(self.index.insert_checkpoint(place, snapshot), snapshot)
        if not snapshot.start <= start < end:
            return None  # all of it is stored, or the tokens before it are not
        if snapshot.is_quantized and end % BLOCK_TOKENS:
            return None  # no sequence could continue there
        payload = snapshot.cut(end - start, offset=start - snapshot.start)
        mx.eval(payload.arrays)
        packed = bytes(chain[start * TOKEN_BYTES : end * TOKEN_BYTES])
        # A live state counts as a holder of a block only if it has the block in the same form. It
        # will quantize its last block later, but an incomplete block is stored as native.
        is_held = live is not None and live.root.form_at(end) == live.root.form
        holder = live if is_held else None
        return self._offer_to_store(
            self.index.insert(cursor, packed, payload, holder=holder), payload
        )

    def _fill_gaps(self, cursor: Cursor, live: LiveChain) -> None:
        """Store missing or unreadable blocks before a cursor again, from a live chain that has
        computed their tokens.
        """
        for key in self.index.to_fill(cursor):
            start, tokens = self.index.tree.run_of(key)
            if live.root.form_at(start + tokens) != live.root.form:
                continue  # stored as native, but this state has quantized the tokens since then
            payload = self.live.copy_of(live, key)
            if payload is not None:
                self._offer_to_store(self.index.fill(key, payload, holder=None), payload)

    def _offer_to_store(self, block: Block | None, payload: Snapshot) -> Block | None:
        """Give a new block to the store, if there is one. If copying it fails, it is offered again
        later. Returns the block.
        """
        if block is not None and self.store is not None:
            try:
                stored = encoded(block, payload)
            except Exception:
                self.index.disk_changed(lost=(block.key,))
                raise
            self.store.put(stored)
        return block

    # -- forget

    def distrust(self, start: CachedStart, computed: Sequence[BlockKey]) -> None:
        """Forget what a failed sequence has computed, and damaged state that it started from. If no
        block is damaged, the blocks that it started from stay, as suspects (`CachedStart.blocks`).

        computed: the keys of the blocks that the sequence has added to the cache.
        """
        self._forget(computed)
        if start.may_blame_live and start.live is not None:
            start.live.is_stale = True
        elif start.may_be_blamed and start.cursor is not None:
            root = start.cursor.root
            damaged = next((key for key in start.blocks if not self._is_sound(key, root)), None)
            if damaged is not None:
                self._forget((damaged,))  # and all blocks after it
                start.blocks = ()

    def blame(self, start: CachedStart) -> None:
        """Forget the suspects of a sequence that has succeeded without them: the blocks with which it
        has failed before.
        """
        suspects = start.blocks
        start.blocks = ()
        self._forget(suspects)

    def _forget(self, keys: Sequence[BlockKey]) -> None:
        self.index.forget(keys, cause=CacheOutcome.UNREADABLE)

    def _is_sound(self, key: BlockKey, root: Root) -> bool:
        """Whether a block is in memory, has the model's form and contains only finite values."""
        payload = self.payload(key)
        if payload is None:
            return False
        forms = self._payloads.forms(
            start=payload.start,
            tokens=payload.tokens,
            form=root.form if payload.is_quantized else "native",
        )
        parts = to_bytes(payload)
        try:
            check_sizes(forms, parts)
            check_values(forms, parts)
        except SnapshotMismatch:
            return False
        return True

    # -- housekeeping

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        """Limit blocks in RAM to `nbytes`, and also the bytes of parked states (None: as many as
        fit). Evicts the excess.
        """
        self.live.limit_parked(most_parked_bytes)
        self.index.set_ram_budget(nbytes)

    def maintain(self) -> None:
        """Drop stale live states, and blocks in RAM that exceed a lowered limit. Periodically, ask
        the store which blocks it has saved or lost, and offer it unsaved blocks again. Call this
        often.
        """
        self.live.drop_stale()
        self.index.evict_excess()
        now = time.perf_counter()
        if self.store is None or now - self._asked_store_at < TEND_SECONDS:
            return
        self._asked_store_at = now
        self._learn_changes(self.store)
        if now - self._offered_at >= OFFER_AGAIN_SECONDS:
            self._offered_at = now
            self._offer_unsaved()

    def _learn_changes(self, store: BlockStore) -> None:
        """Learn from the store which blocks it has saved or lost since the last call."""
        changes = store.changes()
        if changes.stored or changes.lost:
            self.index.disk_changed(stored=changes.stored, lost=changes.lost)

    def _offer_unsaved_at_shutdown(self, store: BlockStore) -> None:
        """At shutdown, offer the store the blocks that it refused before, and wait until it has
        written all, accepts no more, or the time is up.
        """
        ends_at = time.perf_counter() + CLOSING_SECONDS
        unsaved_before = math.inf
        while store.flush(max(0.0, ends_at - time.perf_counter())):
            self._learn_changes(store)
            if not 0 < (unsaved := len(self.index.unsaved())) < unsaved_before:
                return
            unsaved_before = unsaved
            self._offer_unsaved()

    def _offer_unsaved(self) -> None:
        """Offer the store the blocks that it could not take because its queue or the disk was
        full.
        """
        for block in self.index.unsaved()[:BLOCKS_OFFERED_AGAIN]:
            payload = self.payload(block.key)
            if payload is not None:
                self.index.begin_saving(block)
                self._offer_to_store(block, payload)

    def map(
        self, question: CacheMapQuestion, *, users: Callable[[], Sequence[CacheUser]]
    ) -> CacheMap:
        """Summarize what is cached, or was a moment ago. users: the sessions, the last used first."""
        return self._maps.answer(
            question,
            lambda asked: cache_map(
                self.index,
                asked,
                fingerprints=self.fingerprints,
                users=users(),
                chains=self.live.chains,
            ),
        )

    def figures(self) -> CacheFigures:
        """Figures of RAM, live states and store."""
        store = None if self.store is None else self.store.statistics()
        held = self.live.held
        return msgspec.structs.replace(
            self.index.figures(),
            store=store,
            parked_sequences=held.parked,
            parked_bytes=held.parked_bytes,
        )

    def close(self, *, saves_all: bool = False) -> None:
        """Write queued blocks, and if `saves_all` also those that the store has refused, and end
        the threads of the store.
        """
        if self.store is not None:
            try:
                if saves_all:
                    self._offer_unsaved_at_shutdown(self.store)
            finally:
                self.store.close()

    # -- bytes

    def check(self, stored: StoredBlock, *, root: Root) -> None:
        """Raise SnapshotMismatch unless the bytes of a stored block fit the block, its root and the
        model, and all values are finite. Any thread.
        """
        block = stored.block
        form = _checked_form(stored, root)
        forms = self._payloads.forms(start=block.start, tokens=block.tokens, form=form)
        check_sizes(forms, stored.parts)
        check_values(forms, stored.parts)

    def decoded(self, stored: StoredBlock, *, root: Root) -> Snapshot:
        """The payload of a stored block. Raises SnapshotMismatch if its bytes do not fit."""
        block = stored.block
        form = _checked_form(stored, root)
        return self._payloads.snapshot(
            stored.parts, start=block.start, tokens=block.tokens, form=form
        )


def encoded(block: Block, payload: Snapshot) -> StoredBlock:
    """A block with the bytes of its payload, for the store or a file; `decoded` reverses it."""
    return StoredBlock(block=block, parts=to_bytes(payload), form=payload.form)


def _most_reusable_tokens(chain: bytes) -> int:
    # the last token is always prefilled, because the next one is sampled from its logits
    return len(chain) // TOKEN_BYTES - 1


def _checked_form(stored: StoredBlock, root: Root) -> KVBits:
    """The form of a stored block, which is that of its root's chains at its end. Raises
    SnapshotMismatch if its header states another one, or if its length is impossible.
    """
    block = stored.block
    if block.tokens > BLOCK_TOKENS or (block.kind == "state") != (block.tokens == 0):
        raise SnapshotMismatch(f"a stored {block.kind} of {block.tokens} tokens is impossible")
    form: KVBits = "native"
    if block.kind == "kv":
        form = root.form_at(block.start + block.tokens)
    # A file that states none is one of an earlier version. It is used only if that version had the
    # same fingerprint, and so the same code of the cache; the sizes of its parts are checked as well.
    if stored.form not in (None, form):
        raise SnapshotMismatch(
            f"block {block.key.hex()[:12]} is in the form {stored.form!r:.40} instead of {form!r}"
        )
    return form
