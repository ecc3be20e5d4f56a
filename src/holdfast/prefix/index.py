"""The book of everything that was read and is kept: which tokens, where, who has to go. Device thread only; knows no MLX.

It joins the tree (which tokens), the RAM tier (payloads) and the disk (of which only the keys are known here). A key is in the
tree for as long as its payload is somewhere and so is everything before it. What RAM lets go stays in the tree if the disk has
it; what neither has is gone, with all that stands behind it.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from holdfast.prefix.addition import Addition, Outcome
from holdfast.prefix.branch import Branch, branch_of
from holdfast.prefix.disk import DiskIndex, DiskSide
from holdfast.prefix.evicted import EvictionCause, EvictionHistory
from holdfast.prefix.hold import Hold
from holdfast.prefix.keys import child_key, pack_tokens, root_key, unpack_tokens
from holdfast.prefix.pins import Pins
from holdfast.prefix.planning import Planner
from holdfast.prefix.ram import Payload, RamStatistics, RamTier, Residence
from holdfast.prefix.reuse import ReusePlan
from holdfast.prefix.tree import Insertion, PrefixTree, UnknownParent
from holdfast.store.block import TOKEN_BYTES, Block, BlockKey
from holdfast.store.budget import by_place


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What of the store's entries has found a place."""

    placed: int = 0
    covered: int = 0  # all their tokens are in other blocks
    unreachable: int = 0  # what they follow is not stored


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatistics:
    """What is kept, and counters since the start."""

    keys: int
    tokens: int
    tenants: int
    on_disk: int
    saving: int
    unsaved: int
    ram: RamStatistics
    accepted_plans: int
    reused_ram_tokens: int
    reused_disk_tokens: int
    lost_keys: int
    shortfalls: dict[str, int]  # accepted plans by the kind of what they fell short for


class PrefixIndex:
    """Everything that is kept of one model, for all tenants."""

    def __init__(self, *, fingerprint: str, ram_budget_bytes: int, disk: DiskSide | None = None) -> None:
        self._fingerprint = fingerprint
        self._disk = disk
        self._tree = PrefixTree()
        self._ram = RamTier(ram_budget_bytes)
        self._book = DiskIndex()
        self._pins = Pins(self._ram, self._book)
        self._sizes: dict[BlockKey, int] = {}  # bytes of everything that is in the tree
        self._losses = EvictionHistory()
        self._planner = Planner(self._tree, self._losses, self._residence_of)
        self._accepted = self._reused_ram_tokens = self._reused_disk_tokens = self._lost = 0
        self._shortfalls: Counter[str] = Counter()

    @property
    def fingerprint(self) -> str:
        """Of the model that everything here is of."""
        return self._fingerprint

    @property
    def ram_budget_bytes(self) -> int:
        """How much may be in RAM."""
        return self._ram.budget_bytes

    def load(self) -> Loaded:
        """Take in what the disk has. May be repeated, to see what other processes have stored since."""
        if self._disk is None:
            return Loaded()
        placed = covered = unreachable = 0
        for entry in sorted(self._disk.entries(), key=by_place):
            key = entry.block.key
            try:
                self._insert(entry.block)
            except (UnknownParent, ValueError):
                unreachable += 1
                continue
            if self._tree.has_node(key):
                self._book.found(key)
                self._pins.settle(key)
                self._sizes.setdefault(key, entry.file_bytes)
                placed += 1
            else:
                covered += 1
        return Loaded(placed=placed, covered=covered, unreachable=unreachable)

    def plan(self, token_ids: Sequence[int], *, tenant: str = "", resumable_anywhere: bool, limit: int) -> ReusePlan:
        """What a sequence with these tokens can begin from: at most `limit` tokens. Counts as a use only when accepted.

        `resumable_anywhere`: all layers grow, so that no state is needed. An array("I") is packed fastest.
        """
        packed = pack_tokens(token_ids)
        return self._planner.plan(packed, root=self._root(tenant), resumable_anywhere=resumable_anywhere, limit=limit)

    def accept(self, plan: ReusePlan) -> None:
        """A sequence has begun from a plan: all of it was used."""
        keys = plan.keys
        self._ram.touch(keys)
        on_disk = [key for key in keys if key in self._book]
        if self._disk is not None and on_disk:
            self._disk.touch(on_disk)
        self._accepted += 1
        self._reused_ram_tokens += plan.ram_tokens
        self._reused_disk_tokens += plan.disk_tokens
        if plan.shortfall is not None:
            self._shortfalls[type(plan.shortfall).__name__] += 1

    def missing(self, token_ids: Sequence[int], *, tenant: str = "") -> int:
        """The position from which nothing of the chain is stored; its length when everything is."""
        return self._tree.missing(token_ids, root=self._root(tenant))

    def add_run(self, token_ids: Sequence[int], *, start: int, payload: Payload, tenant: str = "") -> Addition:
        """Keep the payload of the tokens from `start` on, 1 to BLOCK_TOKENS of them. `token_ids` is the chain up to their end.

        Tokens that are stored already are not stored again, but a payload is not cut either: leave out what `missing` says.
        Something NEW, if there is a disk, is to be given to the store, and its fate to be told with `disk_changed`.
        """
        packed = pack_tokens(token_ids)
        run = packed[start * TOKEN_BYTES :]
        place = self._tree.place(packed[: start * TOKEN_BYTES], root=self._root(tenant))
        if place.position < start:
            return Addition(Outcome.NO_PARENT)
        block = Block(
            key=child_key(place.parent_key, place.parent_tokens, run, "kv"),
            parent_key=place.parent_key,
            parent_tokens=place.parent_tokens,
            kind="kv",
            start=start,
            packed_tokens=run,
        )
        is_stored = self._tree.place(packed, root=self._root(tenant)).position * TOKEN_BYTES == len(packed)
        return self._add(block, payload, is_stored=is_stored)

    def add_state(self, token_ids: Sequence[int], *, payload: Payload, tenant: str = "") -> Addition:
        """Keep a state that has seen exactly `token_ids`, which are stored. As `add_run`."""
        packed = pack_tokens(token_ids)
        match = self._tree.match_packed(packed, root=self._root(tenant))
        if not packed or match.tokens * TOKEN_BYTES < len(packed):
            return Addition(Outcome.NO_PARENT)
        block = Block(
            key=child_key(match.end.parent_key, match.end.parent_tokens, b"", "state"),
            parent_key=match.end.parent_key,
            parent_tokens=match.end.parent_tokens,
            kind="state",
            start=match.tokens,
            packed_tokens=b"",
        )
        is_stored = bool(match.states) and match.states[-1].position == match.tokens
        return self._add(block, payload, is_stored=is_stored)

    def payload(self, key: BlockKey) -> Payload | None:
        """The payload, if it is in RAM. Never to be changed."""
        return self._ram.get(key)

    def residence(self, key: BlockKey) -> Residence | None:
        """Where a key's payload is; None when it is nowhere."""
        return self._residence_of(key) if self._tree.has_node(key) else None

    def restored(self, key: BlockKey, payload: Payload) -> bool:
        """A payload was read from disk; whether RAM keeps it too."""
        if not self._tree.has_node(key) or key in self._ram:
            return key in self._ram
        return self._make_room(payload.nbytes, before=self._tree.parent_of(key)) and self._keep(key, payload)

    def hold(self, keys: Iterable[BlockKey]) -> Hold:
        """Keep keys, and all that stands before them, from leaving RAM and the tree for want of room."""
        return self._ram.pinned(self._tree.with_ancestors(keys))

    def branch(self, token_ids: Sequence[int], *, tenant: str = "") -> Branch:
        """Where a chain is kept, as far as it is."""
        return branch_of(self._tree.match(token_ids, root=self._root(tenant)))

    def kept_part(self, branch: Branch) -> Branch:
        """What of a branch is still there: its beginning up to the first block that is gone."""
        steps = tuple(itertools.takewhile(lambda step: self._tree.has_node(step.key), branch.steps))
        end = steps[-1].end if steps else 0
        states = tuple(state for state in branch.states if state.position <= end and self._tree.has_node(state.key))
        return Branch(steps=steps, states=states)

    def chain_of(self, branch: Branch) -> array[int]:
        """The tokens of a branch that is there."""
        chain, position = array("I"), 0
        for step in branch.steps:
            own = self._tree.standing(step.key).packed
            chain.extend(unpack_tokens(own[: (step.end - position) * TOKEN_BYTES]))
            position = step.end
        return chain

    def size_of(self, key: BlockKey) -> int:
        """Bytes of a key's payload, or of its file; 0 when it is nowhere."""
        return self._sizes.get(key, 0)

    def forget_branch(self, branch: Branch, *, needed: Container[BlockKey]) -> tuple[BlockKey, ...]:
        """Remove a branch, from its end up to where something else stands on it or what is `needed`; returns what that was."""
        last: BlockKey | None = None
        for step in reversed(self.kept_part(branch).steps):
            is_whole = last is not None or self._tree.standing(step.key).block_tokens == step.tokens
            attached = self._tree.attached(step.key)
            followers = set(self._tree.children(step.key)) - {last}
            if not is_whole or followers or step.key in needed or any(key in needed for key in attached):
                break
            last = step.key
        return () if last is None else self.forget((last,), cause=EvictionCause.FORGOTTEN)

    def pin(self, keys: Iterable[BlockKey]) -> None:
        """Keep keys in RAM while the disk has not got them. The store has to be told by the caller."""
        self._pins.pin(keys)

    def limit_pins(self, most_bytes: int) -> None:
        """How much of RAM pins may hold at most."""
        self._pins.most_held_bytes = most_bytes

    def unpin(self, keys: Iterable[BlockKey]) -> None:
        """Take pins back."""
        self._pins.unpin(keys)

    def unsaved(self) -> tuple[Block, ...]:
        """What is in RAM only because the disk failed to take it. Give it to the store again and say so with `save_again`."""
        return self._book.unsaved

    def save_again(self, block: Block) -> None:
        """Something unsaved was given to the store once more."""
        self._begin_saving(block)

    def disk_changed(self, *, stored: Iterable[BlockKey] = (), lost: Iterable[BlockKey] = ()) -> tuple[BlockKey, ...]:
        """What has become of blocks on disk since the last call; returns what is gone for good by that.

        `lost`: dropped before it was written, evicted, found missing or damaged.
        """
        stored, lost = tuple(stored), tuple(lost)
        for key in stored:
            if self._book.saved(key):
                self._ram.release((key,))
        gone: list[BlockKey] = []
        for key in lost:
            was_saving = self._book.is_saving(key)
            is_lost = self._book.lost(key)
            if was_saving:
                self._ram.release((key,))
            if is_lost and key not in self._ram:
                gone += self._lose(key, EvictionCause.EVICTED)
        for key in (*stored, *lost):
            self._pins.settle(key)
        return tuple(gone)

    def forget(self, keys: Iterable[BlockKey], *, cause: EvictionCause) -> tuple[BlockKey, ...]:
        """Remove keys from everywhere, with all that stands behind them; returns what that was."""
        gone: list[BlockKey] = []
        for key in keys:
            if not self._tree.has_node(key):
                continue
            if cause is EvictionCause.UNREADABLE and key in self._book:
                self._book.expect_loss(key)  # the store tells of what it finds damaged, and of what is removed
            gone += self._lose(key, cause)
        return tuple(gone)

    def unreadable(self, keys: Iterable[BlockKey]) -> tuple[BlockKey, ...]:
        """The disk's copies of these could not be used; returns what is gone by that. What RAM has too stays there."""
        gone: list[BlockKey] = []
        for key in keys:
            if self._disk is None or key not in self._book:
                continue
            if key not in self._ram:
                gone += self.forget((key,), cause=EvictionCause.UNREADABLE)
            elif not self._book.is_saving(key):
                self._book.expect_loss(key)
                self._book.forget(key)
                self._pins.settle(key)
                self._disk.remove((key,))
        return tuple(gone)

    def statistics(self) -> IndexStatistics:
        """What is there, and what has happened since the start."""
        return IndexStatistics(
            keys=len(self._tree),
            tokens=self._tree.tokens,
            tenants=self._tree.roots,
            on_disk=self._book.stored,
            saving=self._book.saving,
            unsaved=len(self._book.unsaved),
            ram=self._ram.statistics(),
            accepted_plans=self._accepted,
            reused_ram_tokens=self._reused_ram_tokens,
            reused_disk_tokens=self._reused_disk_tokens,
            lost_keys=self._lost,
            shortfalls=dict(self._shortfalls),
        )

    def check_invariants(self) -> None:
        """Assert that all books agree."""
        self._tree.check_invariants()
        self._ram.check_invariants()
        self._book.check_invariants()
        self._pins.check_invariants()
        assert self._sizes.keys() == {key for key in self._tree if self._tree.has_node(key)}, "sizes of other keys"
        somewhere = self._book.keys() | self._ram.keys()
        in_tree = {key for key in self._tree if self._tree.has_node(key)}
        assert somewhere == in_tree, "the tree has other keys than RAM and disk together"
        assert all(block.key in self._ram for block in self._book.unsaved), "something unsaved is not in RAM"

    def _root(self, tenant: str) -> BlockKey:
        return root_key(self._fingerprint, tenant)

    def _residence_of(self, key: BlockKey) -> Residence:
        if key not in self._ram:
            return Residence.DISK
        return Residence.BOTH if key in self._book else Residence.RAM

    def _add(self, block: Block, payload: Payload, *, is_stored: bool) -> Addition:
        if is_stored:
            self.restored(block.key, payload)
            return Addition(Outcome.STORED, block)
        has_room = self._make_room(payload.nbytes, before=block.parent_key)
        if not has_room and self._disk is None:
            return Addition(Outcome.NO_ROOM, block)
        inserted = self._insert(block)
        assert inserted is Insertion.NEW, "something stored is stored again"
        self._sizes[block.key] = payload.nbytes
        if has_room:
            self._keep(block.key, payload)
        if self._disk is not None:
            self._begin_saving(block)
        return Addition(Outcome.NEW, block)

    def _insert(self, block: Block) -> Insertion:
        if block.kind == "state":
            return self._tree.insert_state(block.key, parent_key=block.parent_key, position=block.start)
        return self._tree.insert_packed(
            block.key, parent_key=block.parent_key, parent_tokens=block.parent_tokens, packed=block.packed_tokens
        )

    def _keep(self, key: BlockKey, payload: Payload) -> bool:
        self._ram.add(key, payload, parent=self._tree.parent_of(key))
        self._pins.settle(key)
        return True

    def _begin_saving(self, block: Block) -> None:
        # Evicting it would free nothing: the store's queue has the same buffers.
        self._ram.hold((block.key,))
        self._book.begin(block)

    def _make_room(self, nbytes: int, *, before: BlockKey | None) -> bool:
        """Evict until so many bytes fit. Nothing gives way to what stands behind it."""
        if self._ram.fits(nbytes):
            return True
        if nbytes <= self._ram.budget_bytes:
            with self.hold(() if before is None else (before,)):
                while (victim := self._ram.evict()) is not None:
                    if victim not in self._book:
                        self._lose(victim, EvictionCause.EVICTED)
                    if self._ram.fits(nbytes):
                        return True
        self._ram.refuse()
        return False

    def _lose(self, key: BlockKey, cause: EvictionCause) -> tuple[BlockKey, ...]:
        """Take a key out of all books, with everything behind it."""
        gone = self._tree.subtree(key)
        to_remove: list[BlockKey] = []
        for each in gone:
            if self._tree.has_node(each):
                self._remember(each, cause)
            self._tree.remove(each)
            self._sizes.pop(each, None)
            if each in self._ram:
                self._ram.drop(each)
            if self._book.is_saving(each):
                self._ram.release((each,))
            if self._book.forget(each):
                to_remove.append(each)
            self._pins.settle(each)
        if self._disk is not None and to_remove:
            self._disk.remove(to_remove)
        self._lost += len(gone)
        return gone

    def _remember(self, key: BlockKey, cause: EvictionCause) -> None:
        standing = self._tree.standing(key)
        if standing.block_tokens:
            self._losses.block_lost(key, standing, cause=cause)
        else:
            self._losses.state_lost(standing.place, cause=cause)
