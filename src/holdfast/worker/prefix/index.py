"""The index of all stored blocks and states of one model: their tokens, their tiers, and the order
of eviction.

Device thread only; no MLX.

A *live chain* is a sequence whose KV is in its own buffers, because it runs or is kept after its end.
It *holds* the blocks whose tokens are all in these buffers. A *state* is a checkpoint of window and
recurrent layers.

The index combines the tree (tokens), the RAM tier (payloads), and the disk (keys only). A block that
leaves RAM stays in the tree if the disk has it or a live chain holds its tokens; otherwise it is
lost. A block that a live chain holds has a payload in RAM only while that payload is being saved.

A lost block stays in the tree, marked as missing, while the disk has blocks after it: reuse ends
before it, but a sequence that recomputes its tokens fills the gap (`fill`), and the blocks after it
become usable again. A block whose file could not be read is not lost but suspect: later plans use
it again, and a sequence that recomputes its tokens in the meantime offers it to the store
again.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import ExitStack

import msgspec

from holdfast.store.block import Block, BlockKey, BlockKind, by_place, child_key, root_key
from holdfast.store.store import BlockStore
from holdfast.wire.events import CacheFigures, CacheOutcome
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.prefix.chain import Branch, ChainBlock, Cursor, Root
from holdfast.worker.prefix.lookup import EvictionHistory, LiveChain, Planner, ReusePlan
from holdfast.worker.prefix.tiers import DiskIndex, Payload, Pins, RamTier, Residence
from holdfast.worker.prefix.tree import PrefixTree

# states that a session keeps per branch: after the last message, before the prompt's last token, at
# the end of the answer
MOST_STATES = 3


class PrefixIndex:
    """All stored blocks and states of one model, for all tenants."""

    def __init__(
        self, *, fingerprint: str, ram_budget_bytes: int, disk: BlockStore | None = None
    ) -> None:
        self.fingerprint = fingerprint
        self._store = disk
        self.tree = PrefixTree()  # the stored chains; only the index changes them
        self.ram = RamTier(ram_budget_bytes)
        self._disk = DiskIndex()
        self.pins = Pins(self.ram, self._disk)
        self._history = EvictionHistory()
        # for each block, the live chains that hold all of its tokens
        self._holders: dict[BlockKey, set[LiveChain]] = {}
        # keys whose payload is gone, although blocks after them are stored
        self.missing: set[BlockKey] = set()
        self._suspects: set[BlockKey] = set()  # blocks that may have made a sequence fail
        self._forgotten: set[BlockKey] = set()  # since the last call of `take_forgotten`
        self.planner = Planner(
            self.tree, self._history, is_in_memory=self._is_in_memory, missing=self.missing
        )

    def __len__(self) -> int:
        return len(self.tree)

    def set_ram_budget(self, nbytes: int) -> None:
        """Change the RAM budget; evicts the excess, except held blocks."""
        self.ram.budget_bytes = nbytes
        self.evict_excess()
        self.ram.tolerated_bytes = max(nbytes, self.ram.resident_bytes)

    def evict_excess(self) -> None:
        """Evict blocks that exceed the RAM budget, because they were held when it was lowered."""
        while not self.ram.fits(0) and (victim := self.ram.next_to_leave()) is not None:
            self._evict(victim)
        still_tolerated = max(self.ram.budget_bytes, self.ram.resident_bytes)
        self.ram.tolerated_bytes = min(self.ram.tolerated_bytes, still_tolerated)

    def load(self) -> int:
        """Add the blocks on disk to the index; returns how many were added.

        Call it again to see what other processes have stored. Blocks are not counted if other
        blocks contain all of their tokens; blocks whose parent is unknown cannot be added.
        """
        added_blocks = 0
        for entry in () if self._store is None else sorted(self._store.entries(), key=by_place):
            key = entry.block.key
            try:
                self.tree.insert(entry.block)
            except ValueError:
                continue
            if not self.tree.has_node(key):
                continue
            node = self.tree.node(key)
            node.nbytes = node.nbytes or entry.file_bytes
            if not entry.is_missing:
                self._disk.found(key)
                self.missing.discard(key)
                self.pins.sync(key)
                added_blocks += 1
            elif not self._is_in_a_tier(key):
                self.missing.add(key)
        for key in tuple(self.missing):
            self._drop_unneeded_missing(key)
        return added_blocks

    def _is_in_a_tier(self, key: BlockKey) -> bool:
        """Whether RAM, the disk or a live chain has the payload of a key."""
        return key in self.ram or key in self._disk or key in self._holders

    # -- reuse

    def root(self, *, tenant: str = "", form: KVBits = "native") -> Root:
        """The root of a tenant's chains of this model. form: how their sequences hold keys and
        values.
        """
        return Root(root_key(self.fingerprint, tenant, form), tenant, form)

    def accept(self, plan: ReusePlan) -> None:
        """Record that a sequence has started from a plan: all keys of the plan were used."""
        self.ram.touch(plan.keys)
        on_disk = [key for key in plan.keys if key in self._disk]
        if self._store is not None and on_disk:
            self._store.touch(on_disk)

    def residence(self, key: BlockKey) -> Residence | None:
        """The tier that has the payload of a key; None if no tier has it."""
        if not self.tree.has_node(key) or key in self.missing:
            return None
        if key not in self.ram and key not in self._holders:
            return Residence.DISK
        return Residence.BOTH if key in self._disk else Residence.RAM

    def restored(self, key: BlockKey, payload: Payload) -> bool:
        """Put a payload that was read from disk into RAM, if there is room; returns whether it is
        in RAM now.
        """
        self._suspects.discard(key)
        if not self.tree.has_node(key) or key in self.ram or key in self._holders:
            return key in self.ram
        is_in_ram = self._store_in_ram(key, payload)
        self._drop_unneeded_missing(key)
        return is_in_ram

    def _is_in_memory(self, key: BlockKey) -> bool:
        """Whether the payload of a key is available without reading from disk."""
        return key in self.ram or (key in self._holders and key not in self._disk)

    def hold_blocks(self, keys: Iterable[BlockKey]) -> ExitStack:
        """Hold keys and all keys before them in RAM and in the tree until the returned stack is
        closed.
        """
        return self.ram.pinned(self.tree.with_ancestors(keys))

    # -- add

    def insert(
        self, cursor: Cursor, packed: bytes, payload: Payload, *, holder: LiveChain | None = None
    ) -> Block | None:
        """Add a block of 1 to BLOCK_TOKENS packed tokens at a cursor. None of them may be stored.

        The cursor must have just been advanced; it moves past these tokens. With a disk, the caller
        gives the returned block to the store and reports the outcome to `disk_changed`. Returns
        None if there is neither room nor a disk. holder: a live chain that also has the tokens.
        """
        return self._add(cursor, "kv", packed, payload, holder=holder)

    def insert_checkpoint(self, cursor: Cursor, payload: Payload) -> Block | None:
        """Add a state at a cursor that was just advanced. Returns the same as `insert`; also None
        if there already is a state at this position.
        """
        stored_key = self.tree.checkpoint_at(cursor)
        if stored_key is not None:
            self.restored(stored_key, payload)
            return None
        return self._add(cursor, "state", b"", payload) if cursor.position else None

    def _add(
        self,
        cursor: Cursor,
        kind: BlockKind,
        packed: bytes,
        payload: Payload,
        *,
        holder: LiveChain | None = None,
    ) -> Block | None:
        """Append a block to a chain. Returns None if there is no room for it and neither the store
        nor a live chain holds it.
        """
        parent_key = cursor.parent_key
        parent_tokens = cursor.parent_tokens
        is_wanted = holder is None or self._store is not None
        has_room = is_wanted and self._make_room(payload.nbytes, before=parent_key, keep=parent_key)
        if not has_room and self._store is None and holder is None:
            return None
        key = child_key(parent_key, parent_tokens, packed, kind)
        block = Block(
            key=key,
            parent_key=parent_key,
            parent_tokens=parent_tokens,
            kind=kind,
            start=cursor.position,
            packed_tokens=packed,
        )
        self.tree.append(cursor, block).nbytes = payload.nbytes
        if has_room:
            self._put_in_ram(key, payload)
        if self._store is not None:
            self.begin_saving(block)
        if holder is not None:
            self.begin_holding(holder, (key,))
        return block

    def to_fill(self, cursor: Cursor) -> Iterator[BlockKey]:
        """Yield the blocks that are missing or suspect and whose tokens are all before a valid
        cursor, in its chain; parents first.

        The caller may fill each one before it takes the next: a missing block is not yielded if
        that has removed it, because everything after it was evicted.
        """
        keys: list[BlockKey] = []
        if self.missing or self._suspects:
            node = cursor.node
            cut = cursor.cut
            while node is not None and node.parent is not None:
                # if the chain leaves a block before its end, it continues with other tokens
                is_whole = cut == node.tokens
                if is_whole and (node.key in self.missing or node.key in self._suspects):
                    keys.append(node.key)
                cut = node.parent_cut
                node = node.parent
        for key in reversed(keys):
            if key in self.missing or key in self._suspects:
                yield key

    def fill(self, key: BlockKey, payload: Payload, *, holder: LiveChain | None) -> Block:
        """Add a payload for a missing or suspect block. Returns the same as `insert`: with a disk,
        the caller gives the block to the store.
        """
        block = self.tree.block_of(key)
        self._suspects.discard(key)
        self.tree.node(key).nbytes = payload.nbytes
        if key not in self.ram:
            self._store_in_ram(key, payload)
        if self._store is not None and not self._disk.is_saving(key):
            self.begin_saving(block)
        if holder is not None:
            self.begin_holding(holder, (key,))
        if self._is_in_a_tier(key):
            self.missing.discard(key)
        return block

    def mark_suspect(self, key: BlockKey) -> None:
        """Record that the file of a block could not be read. It may be readable later."""
        if key in self._disk and self.tree.has_node(key):
            self._suspects.add(key)

    def _store_in_ram(self, key: BlockKey, payload: Payload) -> bool:
        """Put a payload into RAM if there is room."""
        parent = self.tree.parent_of(key) or key
        has_room = self._make_room(payload.nbytes, before=parent, keep=key)
        if has_room:
            self._put_in_ram(key, payload)
        return has_room

    def _put_in_ram(self, key: BlockKey, payload: Payload) -> None:
        """Put a payload into RAM, which must have room for it."""
        self.ram.put(key, payload, parent=self.tree.parent_of(key))
        self.missing.discard(key)
        self.pins.sync(key)

    # -- live chains

    def whole_blocks(self, blocks: Iterable[ChainBlock]) -> list[BlockKey]:
        """Those of a chain's blocks that are stored and are contained completely in the chain."""
        return [
            block.key for block in blocks if self.tree.has_node(block.key) and self._is_whole(block)
        ]

    def _is_whole(self, block: ChainBlock) -> bool:
        """Whether a chain contains all tokens of this stored block, not only the first ones."""
        _, tokens = self.tree.run_of(block.key)
        return block.tokens == tokens

    def holder_of(self, key: BlockKey) -> LiveChain | None:
        """A live chain that holds every token of a block; None if there is none."""
        return next(iter(self._holders.get(key, ())), None)

    def begin_holding(self, chain: LiveChain, keys: Iterable[BlockKey]) -> None:
        """Record that a live chain holds every token of these blocks.

        RAM drops those that the disk has; without a disk, it drops all.
        """
        for key in keys:
            if self.tree.has_node(key):
                self._holders.setdefault(key, set()).add(chain)
                self.missing.discard(key)
                chain.keys.add(key)
                if key in self.ram and (self._store is None or self._disk.is_stored(key)):
                    self.ram.drop(key)

    def held_alone(self, chain: LiveChain, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Those of the given keys that would be lost if a live chain released them; parents
        first.
        """
        alone = [
            key
            for key in keys
            if self._holders.get(key) == {chain} and key not in self.ram and key not in self._disk
        ]
        return sorted(alone, key=self.tree.run_of)

    def end_holding(
        self,
        chain: LiveChain,
        keys: Iterable[BlockKey],
        *,
        copies: Mapping[BlockKey, Payload | None],
    ) -> tuple[BlockKey, ...]:
        """Record that a live chain no longer holds these blocks; returns the lost keys.

        copies: payloads of the blocks that only this chain had, parents first.
        """
        for key, payload in copies.items():
            if payload is not None and self.tree.has_node(key):
                self._store_in_ram(key, payload)
        lost_keys: list[BlockKey] = []
        for key in tuple(keys):
            chain.keys.discard(key)
            holders = self._holders.get(key, set())
            holders.discard(chain)
            if holders or self._holders.pop(key, None) is None:
                continue
            if key not in self.ram and key not in self._disk:
                lost_keys += self._lose_key(key, CacheOutcome.EVICTED)
        return tuple(lost_keys)

    # -- sessions

    def branch(self, packed: bytes | bytearray, *, root: Root) -> Branch:
        """The part of a chain of packed tokens that is in the tree, with its last states. Some of
        its blocks may be missing.
        """
        match = self.tree.match(bytes(packed), root=root)
        return Branch(blocks=match.blocks, states=match.states[-MOST_STATES:], form=root.form)

    def kept_part(self, branch: Branch) -> Branch:
        """The part of a branch that is still stored: its beginning, up to the first lost
        block.
        """
        blocks = tuple(
            itertools.takewhile(lambda block: self.residence(block.key) is not None, branch.blocks)
        )
        end = blocks[-1].end if blocks else 0
        states = tuple(
            state
            for state in branch.states
            if state.position <= end and self.tree.has_node(state.key)
        )
        return msgspec.structs.replace(branch, blocks=blocks, states=states)

    def blocks_of(self, branch: Branch) -> Iterator[Block]:
        """Yield all blocks and states of a stored branch. A block is yielded with all its tokens,
        even if the branch contains only the first ones.
        """
        return map(self.tree.block_of, branch.keys)

    def size_of(self, key: BlockKey) -> int:
        """Bytes of a key's payload or of its file; 0 if the key is not stored."""
        return self.tree.node(key).nbytes if key in self.tree else 0

    def forget_branch(self, branch: Branch, *, needed: Container[BlockKey]) -> tuple[BlockKey, ...]:
        """Remove a branch, from its end back to the first key that other keys depend on or that is
        in `needed`.

        Returns the removed keys.
        """
        first_to_remove: BlockKey | None = None  # found so far, from the end back
        stored = [block for block in branch.blocks if self.tree.has_node(block.key)]
        for block in reversed(stored):
            node = self.tree.node(block.key)
            is_whole = first_to_remove is not None or self._is_whole(block)
            children = {child.key for child in node.children()} - {first_to_remove}
            with_states = (node, *node.states.values(), *node.covered)
            if not is_whole or children or any(each.key in needed for each in with_states):
                break
            first_to_remove = block.key
        if self._store is not None:
            # files of blocks whose parents are unknown; no tree contains them
            self._store.remove(
                [key for key in branch.keys if key not in self.tree and key not in needed]
            )
        return (
            ()
            if first_to_remove is None
            else self.forget((first_to_remove,), cause=CacheOutcome.FORGOTTEN)
        )

    # -- the disk

    def unsaved(self) -> tuple[Block, ...]:
        """Blocks that are only in memory, because the disk did not take them.

        The caller may give them to the store again, after `begin_saving`.
        """
        return tuple(map(self.tree.block_of, self._disk.unsaved))

    def begin_saving(self, block: Block) -> None:
        """Record that a block is given to the store. It stays in RAM until that has saved it."""
        # Evicting the block would free no memory: the store's queue has the same buffers.
        self.ram.hold_keys((block.key,))
        self._disk.begin_saving(block.key)

    def disk_changed(
        self, *, stored: Iterable[BlockKey] = (), lost: Iterable[BlockKey] = ()
    ) -> tuple[BlockKey, ...]:
        """Record changes on disk since the last call; returns the keys that are lost for good.

        lost: keys that were dropped before they were written, evicted, or found missing or damaged.
        """
        stored = tuple(stored)
        lost = tuple(lost)
        for key in stored:
            if self._disk.saved(key):
                self._suspects.discard(key)
                self.ram.release_keys((key,))
                if key in self._holders and key in self.ram:
                    self.ram.drop(key)
        lost_keys: list[BlockKey] = []
        for key in lost:
            was_saving = self._disk.is_saving(key)
            is_lost = self._disk.lost(key)
            if key not in self._disk:
                self._suspects.discard(key)
            if was_saving:
                self.ram.release_keys((key,))
            if is_lost and key not in self.ram and key not in self._holders:
                lost_keys += self._lose_key(key, CacheOutcome.EVICTED)
        for key in (*stored, *lost):
            self.pins.sync(key)
        return tuple(lost_keys)

    def unreadable(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """Record that the files of these keys are damaged or gone; the store reports each loss
        once. Copies in memory stay and are saved again. Keys without another copy are lost, and
        returned.
        """
        lost_keys: list[BlockKey] = []
        for key in keys:
            if self._store is None or key not in self._disk:
                continue
            self._suspects.discard(key)
            if key not in self.ram and key not in self._holders:
                if self._disk.is_saving(key):
                    self.ram.release_keys((key,))
                self._disk.forget(key)
                lost_keys += self._lose_key(key, CacheOutcome.UNREADABLE)
            elif not self._disk.is_saving(key):
                self._disk.forget_copy(key)
            self.pins.sync(key)
        return tuple(lost_keys)

    # -- remove

    def forget(self, keys: Iterable[BlockKey], *, cause: CacheOutcome) -> tuple[BlockKey, ...]:
        """Remove keys from all tiers, with all keys after them; returns the removed keys."""
        removed: list[BlockKey] = []
        for key in keys:
            if self.tree.has_node(key):
                removed += self._remove_subtree(key, cause)
        self._forgotten.update(removed)
        return tuple(removed)

    def take_forgotten(self) -> set[BlockKey]:
        """The keys that `forget` has removed since the last call."""
        forgotten = self._forgotten
        self._forgotten = set()
        return forgotten

    def _make_room(self, nbytes: int, *, before: BlockKey, keep: BlockKey) -> bool:
        """Evict until this many bytes fit for a key that follows block `before`; returns whether
        they fit.

        A block that only RAM has is not evicted for a key that depends on it. keep: stays in the
        tree even if it is missing and all keys after it are evicted; the caller gives it a payload
        or a key that follows it, or calls `_drop_unneeded_missing`.
        """
        if self.ram.fits(nbytes):
            return True
        if nbytes > self.ram.budget_bytes:
            return False
        with self.ram.pinned((before,)) as hold:
            while (victim := self.ram.next_to_leave()) is not None:
                if self._is_only_in_ram(victim) and self.tree.precedes(victim, before):
                    hold.enter_context(self.ram.pinned((victim,)))
                    continue
                self._evict(victim, keep=keep)
                if self.ram.fits(nbytes):
                    return True
        return False

    def _is_only_in_ram(self, key: BlockKey) -> bool:
        """Whether a key that is in RAM would be lost if it was evicted."""
        return key not in self._disk and key not in self._holders

    def _evict(self, key: BlockKey, *, keep: BlockKey | None = None) -> None:
        """Drop a payload from RAM to make room. keep: as in `_drop_unneeded_missing`."""
        is_lost = self._is_only_in_ram(key)
        self.ram.evict(key)
        if is_lost:
            self._lose_key(key, CacheOutcome.EVICTED, keep=keep)

    def _lose_key(
        self, key: BlockKey, cause: CacheOutcome, *, keep: BlockKey | None = None
    ) -> tuple[BlockKey, ...]:
        """Record that no tier has a key any longer. The key is marked as missing if the disk has
        keys after it; otherwise it is removed, with all keys after it. Returns the lost keys.
        keep: as in `_drop_unneeded_missing`.
        """
        if not any(each in self._disk for each in self.tree.subtree(key) if each != key):
            return self._remove_subtree(key, cause, keep=keep)
        self._record_loss(key, cause)
        self._disk.forget(key)
        self._suspects.discard(key)
        self.missing.add(key)
        return (key,)

    def _drop_unneeded_missing(self, key: BlockKey | None, *, keep: BlockKey | None = None) -> None:
        """Remove a missing key that no key follows, then any such key before it, back to `keep`."""
        while key is not None and key != keep and key in self.missing:
            node = self.tree.node(key)
            if node.branches or node.states:
                return
            parent = self.tree.parent_of(key)
            self.tree.remove(key)
            self.missing.discard(key)
            key = parent

    def _remove_subtree(
        self, key: BlockKey, cause: CacheOutcome, *, keep: BlockKey | None = None
    ) -> tuple[BlockKey, ...]:
        """Remove a key from all tiers, with all keys after it. keep: as in `_drop_unneeded_missing`."""
        parent = self.tree.parent_of(key)
        removed = self.tree.subtree(key)
        on_disk: list[BlockKey] = []
        for each in removed:
            if self.tree.has_node(each):
                self._record_loss(each, cause)
            self.tree.remove(each)
            self.missing.discard(each)
            self._suspects.discard(each)
            if each in self.ram:
                self.ram.drop(each)
            for chain in self._holders.pop(each, ()):
                chain.keys.discard(each)
                chain.is_stale |= cause is not CacheOutcome.EVICTED
            if self._disk.is_saving(each):
                self.ram.release_keys((each,))
            if self._disk.forget(each):
                on_disk.append(each)
            self.pins.sync(each)
        if self._store is not None and on_disk:
            self._store.remove(on_disk)
        self._drop_unneeded_missing(parent, keep=keep)
        return removed

    def _record_loss(self, key: BlockKey, cause: CacheOutcome) -> None:
        """Remember why a key was lost, to explain later cache misses."""
        node = self.tree.node(key)
        if node.is_state:
            self._history.record_state(node, cause=cause)
        else:
            self._history.record_block(node, cause=cause)

    # -- figures

    def figures(self) -> CacheFigures:
        """The figures of the index, without those of the store."""
        return CacheFigures(
            kept_tokens=self.tree.tokens - sum(self.tree.node(key).tokens for key in self.missing),
            tenants=self.tree.roots,
            ram_bytes=self.ram.resident_bytes,
            ram_budget_bytes=self.ram.budget_bytes,
            ram_evicted_blocks=self.ram.evicted,
        )

    def check_invariants(self) -> None:
        """Assert that tree, RAM, disk and live chains agree."""
        self.tree.check_invariants()
        self.ram.check_invariants()
        self.pins.check_invariants()
        in_tree = {key for key in self.tree if self.tree.has_node(key)}
        in_tiers = self._disk.keys() | self.ram.keys() | self._holders.keys()
        assert in_tiers | self.missing == in_tree, (
            "the tree and the tiers (RAM, disk, live chains) have different keys"
        )
        assert not in_tiers & self.missing, "a tier has a missing key"
        assert self._suspects <= self._disk.keys(), "a suspect key is not on disk"
        for key in self.missing:
            node = self.tree.node(key)
            assert node.branches or node.states, "a missing key that nothing follows"
        assert all(
            holders and all(key in chain.keys for chain in holders)
            for key, holders in self._holders.items()
        ), "a holder does not know what it holds"
        in_memory = self.ram.keys() | self._holders.keys()
        assert all(key in in_memory for key in self._disk.unsaved), (
            "an unsaved block is not in memory"
        )
