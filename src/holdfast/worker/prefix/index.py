"""The book of everything that was read and is kept: which tokens, where, who has to go.

Device thread only; knows no MLX.

It joins the tree (which tokens), the RAM tier (payloads) and the disk (of which only the keys are
known here). A key is in the tree for as long as its payload is somewhere and so is everything
before it. What RAM lets go stays in the tree if the disk has it, or a live chain holds its tokens;
what nobody has is gone, with all that stands behind it. What a live chain holds is in RAM as a
payload only while it is on its way to the disk.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from contextlib import ExitStack

from holdfast.store.block import Block, BlockKey, BlockKind
from holdfast.store.budget import by_place
from holdfast.wire.events import CacheOutcome
from holdfast.wire.figures import CacheFigures
from holdfast.wire.token_ids import TOKEN_BYTES
from holdfast.worker.prefix.branch import Branch, branch_of
from holdfast.worker.prefix.disk import DiskIndex, DiskSide
from holdfast.worker.prefix.evicted import EvictionHistory
from holdfast.worker.prefix.keys import child_key, root_key
from holdfast.worker.prefix.live import LiveChain
from holdfast.worker.prefix.piece import Cursor, Piece
from holdfast.worker.prefix.pins import Pins
from holdfast.worker.prefix.planning import Planner
from holdfast.worker.prefix.ram import Payload, RamTier, Residence
from holdfast.worker.prefix.reuse import ReusePlan
from holdfast.worker.prefix.tree import PrefixTree


class PrefixIndex:
    """Everything that is kept of one model, for all tenants."""

    def __init__(
        self, *, fingerprint: str, ram_budget_bytes: int, disk: DiskSide | None = None
    ) -> None:
        self._fingerprint = fingerprint
        self._disk = disk
        self._tree = PrefixTree()
        self._ram = RamTier(ram_budget_bytes)
        self._book = DiskIndex()
        self._pins = Pins(self._ram, self._book)
        self._sizes: dict[BlockKey, int] = {}  # bytes of everything that is in the tree
        self._evicted = EvictionHistory()
        # live chains that hold every token of a block
        self._holders: dict[BlockKey, set[LiveChain]] = {}
        self._planner = Planner(self._tree, self._evicted, at_hand=self._is_at_hand)

    def __len__(self) -> int:
        return len(self._tree)

    @property
    def fingerprint(self) -> str:
        """Of the model that everything here is of."""
        return self._fingerprint

    @property
    def ram_budget_bytes(self) -> int:
        """How much may be in RAM."""
        return self._ram.budget_bytes

    def set_ram_budget(self, nbytes: int) -> None:
        """Let payloads in RAM take so many bytes from now on; evicts what is beyond that, but for
        what somebody holds.
        """
        self._ram.set_budget(nbytes)
        while not self._ram.fits(0) and (victim := self._ram.next_to_leave()) is not None:
            is_lost = victim not in self._book and victim not in self._holders
            self._ram.evict(victim)
            if is_lost:
                self._lose(victim, CacheOutcome.EVICTED)

    def load(self) -> int:
        """Take in what the disk has; how much of it has found a place.

        May be repeated, to see what other processes have stored.

        Blocks whose tokens are all in others are not counted, and what follows something that is
        not stored has no place.
        """
        placed = 0
        for entry in () if self._disk is None else sorted(self._disk.entries(), key=by_place):
            key = entry.block.key
            try:
                self._tree.insert(entry.block)
            except ValueError:
                continue
            if self._tree.has_node(key):
                self._book.found(key)
                self._pins.sync(key)
                self._sizes.setdefault(key, entry.file_bytes)
                placed += 1
        return placed

    def plan(
        self, packed: bytes, *, tenant: str = "", resumable_anywhere: bool, limit: int
    ) -> ReusePlan:
        """What a sequence with these packed tokens can begin from: at most `limit` tokens.

        A use only when it is accepted.

        `resumable_anywhere`: all layers grow, so that no checkpoint is needed.
        """
        return self._planner.plan(
            packed, root=self._root(tenant), resumable_anywhere=resumable_anywhere, limit=limit
        )

    def accept(self, plan: ReusePlan) -> None:
        """A sequence has begun from a plan: all of it was used."""
        self._ram.touch(plan.keys)
        if self._disk is not None and (on_disk := [key for key in plan.keys if key in self._book]):
            self._disk.touch(on_disk)

    def cursor(self, *, tenant: str = "") -> Cursor:
        """A cursor before the first token of a chain."""
        return Cursor(self._root(tenant))

    def advance(self, cursor: Cursor, packed: bytes | bytearray, *, end: int) -> None:
        """Move a cursor along its chain, `packed` from its first token on, as far as it is stored,
        up to token `end`.

        Costs what lies between; when what it stood on is gone, one walk from the root finds its
        place again.
        """
        self._tree.advance(cursor, packed, end=end)

    def insert(
        self, cursor: Cursor, packed: bytes, payload: Payload, *, holder: LiveChain | None = None
    ) -> Block | None:
        """Keep the payload of 1 to BLOCK_TOKENS packed tokens, none of them stored, that go on
        where a cursor stands.

        The cursor has just been advanced; it moves behind them. If there is a disk, what is
        returned is to be given to the store, and its fate to be said with `disk_changed`. None:
        there is no room, and no disk. holder: a live chain that has them too.
        """
        return self._add(cursor, "kv", packed, payload, holder=holder)

    def insert_checkpoint(self, cursor: Cursor, payload: Payload) -> Block | None:
        """Keep a checkpoint where a cursor stands that has just been advanced.

        As `insert`; None also when there is one.
        """
        known = self._tree.checkpoint_at(cursor)
        if known is not None:
            self.restored(known, payload)
        return (
            None
            if known is not None or not cursor.position
            else self._add(cursor, "state", b"", payload)
        )

    def payload(self, key: BlockKey) -> Payload | None:
        """The payload, if it is in RAM. Never to be changed."""
        return self._ram.get(key)

    def residence(self, key: BlockKey) -> Residence | None:
        """Where a key's payload is; None when it is nowhere."""
        if not self._tree.has_node(key):
            return None
        if key not in self._ram and key not in self._holders:
            return Residence.DISK
        return Residence.BOTH if key in self._book else Residence.RAM

    def restored(self, key: BlockKey, payload: Payload) -> bool:
        """A payload was read from disk; whether RAM keeps it too."""
        if not self._tree.has_node(key) or key in self._ram or key in self._holders:
            return key in self._ram
        return self._make_room(
            payload.nbytes, before=self._tree.parent_of(key) or key
        ) and self._keep(key, payload)

    def _is_at_hand(self, key: BlockKey) -> bool:
        """Whether nothing has to be read from disk for a key: RAM has its payload, or a live chain
        has all there is of it.
        """
        return key in self._ram or (key in self._holders and key not in self._book)

    def whole(self, pieces: Iterable[Piece]) -> list[BlockKey]:
        """The blocks of which a chain with these pieces has every token; not what is gone since
        they were planned.
        """
        there = [each for each in pieces if self._tree.has_node(each.key)]
        return [
            each.key
            for each in there
            if len(self._tree.standing(each.key).packed) == each.tokens * TOKEN_BYTES
        ]

    def holder_of(self, key: BlockKey) -> LiveChain | None:
        """A live chain that holds every token of a block, if there is one."""
        return next(iter(self._holders.get(key, ())), None)

    def run_of(self, key: BlockKey) -> tuple[int, int]:
        """The position of a block's first token in its chain, and how many tokens it has."""
        return self._tree.run_of(key)

    def begin_holding(self, chain: LiveChain, keys: Iterable[BlockKey]) -> None:
        """A live chain holds every token of these blocks.

        RAM lets go of what the disk has, and without a disk of all.
        """
        for key in keys:
            if self._tree.has_node(key):
                self._holders.setdefault(key, set()).add(chain)
                chain.keys.add(key)
                if key in self._ram and (self._disk is None or self._book.is_stored(key)):
                    self._ram.drop(key)

    def held_alone(self, chain: LiveChain, keys: Iterable[BlockKey]) -> list[BlockKey]:
        """Of these, what is gone when a live chain lets go of it; parents first."""
        alone = [
            key
            for key in keys
            if self._holders.get(key) == {chain} and key not in self._ram and key not in self._book
        ]
        return sorted(alone, key=lambda key: self.run_of(key))

    def end_holding(
        self,
        chain: LiveChain,
        keys: Iterable[BlockKey],
        *,
        copies: Mapping[BlockKey, Payload | None],
    ) -> tuple[BlockKey, ...]:
        """A live chain holds these blocks no more; returns what is gone by that. copies: payloads
        of some, parents first.
        """
        for key, payload in copies.items():
            if payload is not None and self._tree.has_node(key):
                _ = self._make_room(
                    payload.nbytes, before=self._tree.parent_of(key) or key
                ) and self._keep(key, payload)
        gone: list[BlockKey] = []
        for key in tuple(keys):
            chain.keys.discard(key)
            holders = self._holders.get(key, set())
            holders.discard(chain)
            if (
                not holders
                and self._holders.pop(key, None) is not None
                and key not in self._ram
                and key not in self._book
            ):
                gone += self._lose(key, CacheOutcome.EVICTED)
        return tuple(gone)

    def hold(self, keys: Iterable[BlockKey]) -> ExitStack:
        """Keep keys, and all that stands before them, from leaving RAM and the tree for want of
        room.
        """
        return self._ram.pinned(self._tree.with_ancestors(keys))

    def pinned(self, plan: ReusePlan) -> ExitStack:
        """Keep what a plan needs, which is all that stands before it too."""
        return self._ram.pinned(plan.keys)

    def branch(self, packed: bytes | bytearray, *, tenant: str = "") -> Branch:
        """Where a chain of packed tokens is kept, as far as it is."""
        return branch_of(self._tree.match(bytes(packed), root=self._root(tenant)))

    def kept_part(self, branch: Branch) -> Branch:
        """What of a branch is still there: its beginning up to the first block that is gone."""
        steps = tuple(itertools.takewhile(lambda step: self._tree.has_node(step.key), branch.steps))
        end = steps[-1].end if steps else 0
        states = tuple(
            state
            for state in branch.states
            if state.position <= end and self._tree.has_node(state.key)
        )
        return Branch(steps=steps, states=states)

    def chain_of(self, branch: Branch) -> bytearray:
        """The packed tokens of a branch that is there."""
        chain, position = bytearray(), 0
        for step in branch.steps:
            chain += self._tree.standing(step.key).packed[: (step.end - position) * TOKEN_BYTES]
            position = step.end
        return chain

    def size_of(self, key: BlockKey) -> int:
        """Bytes of a key's payload, or of its file; 0 when it is nowhere."""
        return self._sizes.get(key, 0)

    def forget_branch(self, branch: Branch, *, needed: Container[BlockKey]) -> tuple[BlockKey, ...]:
        """Remove a branch, from its end up to where something else stands on it or what is
        `needed`; returns what that was.
        """
        last: BlockKey | None = None
        for step in reversed(self.kept_part(branch).steps):
            is_whole = last is not None or self._tree.standing(step.key).block_tokens == step.tokens
            attached = self._tree.attached(step.key)
            followers = set(self._tree.children(step.key)) - {last}
            if (
                not is_whole
                or followers
                or step.key in needed
                or any(key in needed for key in attached)
            ):
                break
            last = step.key
        return () if last is None else self.forget((last,), cause=CacheOutcome.FORGOTTEN)

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys, each pinned once, in RAM while the disk has not got them.

        The store has to be told by the caller.
        """
        self._pins.pin(keys)

    def limit_pins(self, most_bytes: int) -> None:
        """How much of RAM pins may hold at most."""
        self._pins.most_held_bytes = most_bytes

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Take pins back."""
        self._pins.unpin(keys)

    def unsaved(self) -> tuple[Block, ...]:
        """What is in RAM only because the disk failed to take it.

        Give it to the store again and say so with `save_again`.
        """
        return self._book.unsaved

    def save_again(self, block: Block) -> None:
        """Something unsaved was given to the store once more."""
        self._begin_saving(block)

    def disk_changed(
        self, *, stored: Iterable[BlockKey] = (), lost: Iterable[BlockKey] = ()
    ) -> tuple[BlockKey, ...]:
        """What has become of blocks on disk since the last call; returns what is gone for good by
        that.

        `lost`: dropped before it was written, evicted, found missing or damaged.
        """
        stored, lost = tuple(stored), tuple(lost)
        for key in stored:
            if self._book.saved(key):
                self._ram.release((key,))
                if key in self._holders and key in self._ram:
                    self._ram.drop(key)
        gone: list[BlockKey] = []
        for key in lost:
            was_saving = self._book.is_saving(key)
            is_lost = self._book.lost(key)
            if was_saving:
                self._ram.release((key,))
            if is_lost and key not in self._ram and key not in self._holders:
                gone += self._lose(key, CacheOutcome.EVICTED)
        for key in (*stored, *lost):
            self._pins.sync(key)
        return tuple(gone)

    def forget(self, keys: Iterable[BlockKey], *, cause: CacheOutcome) -> tuple[BlockKey, ...]:
        """Remove keys from everywhere, with all that stands behind them; returns what that was."""
        gone: list[BlockKey] = []
        for key in keys:
            if self._tree.has_node(key):
                gone += self._lose(key, cause)
        return tuple(gone)

    def unreadable(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """The disk's copies of these could not be used; returns what is gone by that.

        What RAM has too stays there.
        """
        gone: list[BlockKey] = []
        for key in keys:
            if self._disk is None or key not in self._book:
                continue
            if key not in self._ram and key not in self._holders:
                # the store tells of what it finds damaged, and of what is removed
                self._book.expect_loss(key)
                gone += self._lose(key, CacheOutcome.UNREADABLE)
            elif not self._book.is_saving(key):
                self._book.expect_loss(key)
                self._book.forget(key)
                self._pins.sync(key)
                self._disk.remove((key,))
        return tuple(gone)

    @property
    def unsaved_keys(self) -> int:
        """How many keys the disk does not have, or not yet."""
        return self._book.saving + len(self._book.unsaved)

    def figures(self) -> CacheFigures:
        """What is there, but for the store's own figures."""
        return CacheFigures(
            kept_tokens=self._tree.tokens,
            tenants=self._tree.roots,
            ram_bytes=self._ram.resident_bytes,
            ram_budget_bytes=self._ram.budget_bytes,
            ram_evicted_blocks=self._ram.evicted,
        )

    def check_invariants(self) -> None:
        """Assert that all books agree."""
        self._tree.check_invariants()
        self._ram.check_invariants()
        self._book.check_invariants()
        self._pins.check_invariants()
        assert self._sizes.keys() == {key for key in self._tree if self._tree.has_node(key)}, (
            "sizes of other keys"
        )
        somewhere = self._book.keys() | self._ram.keys() | self._holders.keys()
        in_tree = {key for key in self._tree if self._tree.has_node(key)}
        assert somewhere == in_tree, (
            "the tree has other keys than RAM, disk and live chains together"
        )
        assert all(
            holders and all(key in chain.keys for chain in holders)
            for key, holders in self._holders.items()
        ), "odd holders"
        in_memory = self._ram.keys() | self._holders.keys()
        assert all(block.key in in_memory for block in self._book.unsaved), (
            "something unsaved is not in memory"
        )

    def _root(self, tenant: str) -> BlockKey:
        return root_key(self._fingerprint, tenant)

    def _add(
        self,
        cursor: Cursor,
        kind: BlockKind,
        packed: bytes,
        payload: Payload,
        *,
        holder: LiveChain | None = None,
    ) -> Block | None:
        parent_key, parent_tokens, start = cursor.parent_key, cursor.parent_tokens, cursor.position
        is_wanted = holder is None or self._disk is not None
        has_room = is_wanted and self._make_room(payload.nbytes, before=parent_key)
        if not has_room and self._disk is None and holder is None:
            return None
        key = child_key(parent_key, parent_tokens, packed, kind)
        if kind == "state":
            self._tree.append_checkpoint(cursor, key)
        else:
            self._tree.append(cursor, key, packed)
        self._sizes[key] = payload.nbytes
        if has_room:
            self._keep(key, payload)
        block = Block(
            key=key,
            parent_key=parent_key,
            parent_tokens=parent_tokens,
            kind=kind,
            start=start,
            packed_tokens=packed,
        )
        if self._disk is not None:
            self._begin_saving(block)
        if holder is not None:
            self.begin_holding(holder, (key,))
        return block

    def _keep(self, key: BlockKey, payload: Payload) -> bool:
        self._ram.add(key, payload, parent=self._tree.parent_of(key))
        self._pins.sync(key)
        return True

    def _begin_saving(self, block: Block) -> None:
        # Evicting it would free nothing: the store's queue has the same buffers.
        self._ram.hold((block.key,))
        self._book.begin(block)

    def _make_room(self, nbytes: int, *, before: BlockKey) -> bool:
        """Evict until so many bytes fit.

        Nothing that the disk has not got gives way to what stands behind it.
        """
        if self._ram.fits(nbytes):
            return True
        if nbytes > self._ram.budget_bytes:
            return False
        with self._ram.pinned((before,)) as hold:
            while (victim := self._ram.next_to_leave()) is not None:
                is_lost = victim not in self._book and victim not in self._holders
                if is_lost and self._tree.stands_before(victim, before):
                    hold.enter_context(self._ram.pinned((victim,)))
                    continue
                self._ram.evict(victim)
                if is_lost:
                    self._lose(victim, CacheOutcome.EVICTED)
                if self._ram.fits(nbytes):
                    return True
        return False

    def _lose(self, key: BlockKey, cause: CacheOutcome) -> tuple[BlockKey, ...]:
        """Take a key out of all books, with everything behind it."""
        gone = self._tree.subtree(key)
        to_remove: list[BlockKey] = []
        for each in gone:
            if self._tree.has_node(each):
                self._record_loss(each, cause)
            self._tree.remove(each)
            self._sizes.pop(each, None)
            if each in self._ram:
                self._ram.drop(each)
            for chain in self._holders.pop(each, ()):
                chain.keys.discard(each)
                chain.is_stale |= cause is not CacheOutcome.EVICTED
            if self._book.is_saving(each):
                self._ram.release((each,))
            if self._book.forget(each):
                to_remove.append(each)
            self._pins.sync(each)
        if self._disk is not None and to_remove:
            self._disk.remove(to_remove)
        return gone

    def _record_loss(self, key: BlockKey, cause: CacheOutcome) -> None:
        standing = self._tree.standing(key)
        if standing.block_tokens:
            self._evicted.record_block(standing, cause=cause)
        else:
            self._evicted.record_checkpoint(standing, cause=cause)
