"""The index under all possible events, compared with a list of all inserted runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from holdfast.store.block import BlockKey, child_key
from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.chain import (
    Cursor,
    pack_tokens,
)
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.lookup import ReusePlan
from holdfast.worker.prefix.tiers import Residence
from tests.fakes.chains import keep_checkpoint, plan_of, stored
from tests.fakes.disk_side import PICKS, DiskRules, FakeDisk
from tests.fakes.payloads import Weight

chains = st.lists(st.integers(0, 1), min_size=1, max_size=12)
tenants = st.sampled_from(["", "tenant"])


@dataclass(frozen=True)
class Given:
    """A run (its chain up to its end) or a state, as inserted once."""

    parent: BlockKey
    tenant: str
    chain: tuple[int, ...]
    start: int
    is_state: bool


class IndexStates(DiskRules):
    @initialize(
        budget=st.sampled_from([0, 9, 16, 30, 1000]),
        has_disk=st.booleans(),
        chains=st.lists(chains, min_size=1, max_size=5),
    )
    def start(self, budget: int, has_disk: bool, chains: list[list[int]]) -> None:
        self.budget = budget
        self.disk = FakeDisk() if has_disk else None
        self.given: dict[BlockKey, Given] = {}
        self.cursors: list[tuple[Cursor, list[int], str]] = []
        self.holds: list[tuple[ExitStack, dict[BlockKey, bool]]] = []
        # as sessions do, and the contents of RAM then
        self.pinned: list[tuple[tuple[BlockKey, ...], dict[BlockKey, bool]]] = []
        self.begin()
        for chain in chains:
            self.read(chain, "", 4)

    def begin(self) -> None:
        self.index = PrefixIndex(fingerprint="model", ram_budget_bytes=self.budget, disk=self.disk)
        self.index.load()

    def is_alive(self, key: BlockKey) -> bool:
        on_disk = self.disk is not None and (key in self.disk.kept or key in self.disk.queued)
        return on_disk or self.index.ram.get(key) is not None

    def reachable(self) -> dict[BlockKey, Given]:
        """The keys in some tier with all their ancestors, by their own links."""
        found: dict[BlockKey, Given] = {}
        for key, given in sorted(
            self.given.items(), key=lambda item: (item[1].start, item[1].is_state)
        ):
            if self.is_alive(key) and (given.start == 0 or given.parent in found):
                found[key] = given
        return found

    def known(self) -> dict[BlockKey, Given]:
        """The contents of the tree: keys in some tier, and the missing keys before them."""
        return {
            key: given
            for key, given in self.given.items()
            if self.is_alive(key) or key in self.index.missing
        }

    def stored_tokens(self, chain: tuple[int, ...], tenant: str) -> int:
        return self.common_tokens(chain, tenant, self.reachable())

    def common_tokens(
        self, chain: tuple[int, ...], tenant: str, found: dict[BlockKey, Given]
    ) -> int:
        others = [given.chain for given in found.values() if given.tenant == tenant]
        return max(
            (
                end
                for end in range(len(chain) + 1)
                for other in others
                if other[:end] == chain[:end]
            ),
            default=0,
        )

    @rule(chain=chains, tenant=tenants, block_tokens=st.integers(1, 5))
    def read(self, chain: list[int], tenant: str, block_tokens: int) -> None:
        cursor = stored(self.index, chain, tenant=tenant)
        assert cursor.position == self.common_tokens(tuple(chain), tenant, self.known())
        self.fill_gaps(cursor, chain)
        self.go_on(cursor, chain, tenant, block_tokens)

    def fill_gaps(self, cursor: Cursor, chain: list[int]) -> None:
        """A sequence has computed all tokens before its cursor."""
        for key in self.index.to_fill(cursor):
            given = self.given[key]
            assert tuple(chain[: len(given.chain)]) == tuple(given.chain), "it has other tokens"
            own = given.chain[given.start :]
            block = self.index.fill(key, Weight(len(own), (given.tenant, own)), holder=None)
            assert (block.key, block.start) == (key, given.start)
            assert block.parent_key == given.parent
            assert block.packed_tokens == pack_tokens(own)
            assert self.disk is not None
            self.disk.put(block)
        self.index.tree.advance(cursor, pack_tokens(chain), end=len(chain))
        assert list(self.index.to_fill(cursor)) == []

    def go_on(self, cursor: Cursor, chain: list[int], tenant: str, block_tokens: int) -> None:
        """Insert the missing part of a chain at its cursor."""
        while cursor.position < len(chain):
            start = cursor.position
            own = chain[start : start + block_tokens]
            expected = child_key(cursor.parent_key, cursor.parent_tokens, pack_tokens(own), "kv")
            block = self.index.insert(
                cursor, pack_tokens(own), Weight(len(own), (tenant, tuple(own)))
            )
            if block is None:
                assert self.disk is None
                assert cursor.position == start
                return
            assert (block.key, block.start, cursor.position) == (expected, start, start + len(own))
            self.given[block.key] = Given(
                block.parent_key, tenant, tuple(chain[: cursor.position]), start, is_state=False
            )
            if self.disk is not None:
                self.disk.put(block)

    @rule(chain=chains, tenant=tenants, end=st.integers(0, 12))
    def begin_to_read(self, chain: list[int], tenant: str, end: int) -> None:
        """A sequence whose cursor is kept while other blocks are added and removed."""
        cursor = Cursor(self.index.root(tenant=tenant))
        self.index.tree.advance(cursor, pack_tokens(chain), end=min(end, len(chain)))
        self.cursors.append((cursor, chain, tenant))

    @precondition(lambda self: self.cursors)
    @rule(pick=PICKS, more=chains, block_tokens=st.integers(1, 5))
    def read_on(self, pick: int, more: list[int], block_tokens: int) -> None:
        """A kept cursor inserts the same as one that has just walked from the root, whatever was
        evicted in between.
        """
        cursor, chain, tenant = self.cursors[pick % len(self.cursors)]
        chain += more[:3]
        fresh = stored(self.index, chain, tenant=tenant)
        self.index.tree.advance(cursor, pack_tokens(chain), end=len(chain))
        assert (cursor.position, cursor.parent_key, cursor.parent_tokens) == (
            fresh.position,
            fresh.parent_key,
            fresh.parent_tokens,
        )
        self.go_on(cursor, chain, tenant, block_tokens)

    @rule(chain=chains, tenant=tenants, nbytes=st.integers(0, 9))
    def keep_a_state(self, chain: list[int], tenant: str, nbytes: int) -> None:
        chain = chain[: stored(self.index, chain, tenant=tenant).position]
        block = keep_checkpoint(self.index, chain, nbytes=nbytes, tenant=tenant)
        if block is not None:
            self.given[block.key] = Given(
                block.parent_key, tenant, tuple(chain), len(chain), is_state=True
            )
            if self.disk is not None:
                self.disk.put(block)

    @rule(
        chain=chains,
        tenant=tenants,
        anywhere=st.booleans(),
        limit=st.integers(0, 13),
        is_accepted=st.booleans(),
    )
    def plan(
        self, chain: list[int], tenant: str, anywhere: bool, limit: int, is_accepted: bool
    ) -> None:
        plan = plan_of(self.index, chain, tenant=tenant, anywhere=anywhere, limit=limit)
        stored = min(self.stored_tokens(tuple(chain), tenant), limit)
        if not anywhere:
            states = [
                given
                for given in self.reachable().values()
                if given.is_state and given.tenant == tenant
            ]
            stored = max(
                (
                    given.start
                    for given in states
                    if given.start <= stored and tuple(chain[: given.start]) == given.chain
                ),
                default=0,
            )
        assert plan.tokens == stored
        assert (plan.shortfall.outcome is CacheOutcome.COMPLETE) == (
            plan.tokens == min(limit, len(chain))
        )
        assert (plan.state is not None) == (not anywhere and stored > 0)
        end = 0
        for block in plan.blocks:
            given = self.given[block.key]
            assert given.start == block.start <= end < block.end
            whole = given.chain[given.start :]
            assert whole[end - block.start : block.tokens] == tuple(chain[end : block.end])
            self.assert_is_where_it_is_said_to_be(block.key, is_on_disk=block.key in plan.to_read)
            end = block.end
        assert end == plan.tokens
        if plan.state is not None:
            key = plan.state.key
            self.assert_is_where_it_is_said_to_be(key, is_on_disk=key in plan.to_read)
        if is_accepted:
            self.fetch_and_accept(plan)

    def fetch_and_accept(self, plan: ReusePlan) -> None:
        with self.index.hold_blocks(plan.keys):
            for key in plan.to_read:
                given = self.given[key]
                self.index.restored(
                    key,
                    Weight(
                        max(1, len(given.chain) - given.start),
                        (given.tenant, given.chain[given.start :]),
                    ),
                )
            for key in plan.keys:
                assert self.index.residence(key) is not None
        self.index.accept(plan)

    def assert_is_where_it_is_said_to_be(self, key: BlockKey, *, is_on_disk: bool) -> None:
        residence = self.index.residence(key)
        given = self.given[key]
        payload = self.index.ram.get(key)
        assert (payload is None) == is_on_disk == (residence is Residence.DISK)
        if isinstance(payload, Weight) and not given.is_state:
            assert payload.name == (given.tenant, given.chain[given.start :])
        if residence is not Residence.RAM:
            assert self.disk is not None
            assert key in self.disk.kept or key in self.disk.queued

    def pick_given(self, pick: int) -> BlockKey:
        return list(self.given)[pick % len(self.given)]

    @precondition(lambda self: self.given)
    @rule(pick=PICKS)
    def hold(self, pick: int) -> None:
        key = self.pick_given(pick)
        held = {
            each: self.index.ram.get(each) is not None
            for each in [key]
            if self.index.residence(each) is not None
        }
        self.holds.append((self.index.hold_blocks([key]), held))

    @precondition(lambda self: self.holds)
    @rule(pick=PICKS)
    def release(self, pick: int) -> None:
        hold, held = self.holds.pop(pick % len(self.holds))
        for key, was_in_ram in held.items():
            assert self.index.residence(key) is not None
            assert not was_in_ram or self.index.ram.get(key) is not None
        hold.close()

    @precondition(lambda self: self.given)
    @rule(pick=PICKS, both=st.booleans())
    def pin(self, pick: int, both: bool) -> None:
        keys = tuple(
            dict.fromkeys(
                self.pick_given(number) for number in ((pick, pick // 7) if both else (pick,))
            )
        )
        pinned = {key for others, _ in self.pinned for key in others}
        keys = tuple(
            key for key in keys if self.index.residence(key) is not None and key not in pinned
        )
        in_ram = {key: self.index.ram.get(key) is not None for key in keys}
        self.index.pins.pin(keys)
        self.pinned.append((keys, in_ram))

    @precondition(lambda self: self.pinned)
    @rule(pick=PICKS)
    def unpin(self, pick: int) -> None:
        keys, in_ram = self.pinned.pop(pick % len(self.pinned))
        for key, was_in_ram in in_ram.items():
            on_disk = self.disk is not None and key in self.disk.kept
            assert on_disk or not was_in_ram or self.index.ram.get(key) is not None
        self.index.pins.unpin(keys)

    def lost_on_purpose(self, keys: tuple[BlockKey, ...]) -> None:
        for _, held in (*self.holds, *self.pinned):
            for key in keys:
                held.pop(key, None)

    @precondition(lambda self: self.disk is not None and self.disk.kept)
    @rule(pick=PICKS)
    def a_read_fails(self, pick: int) -> None:
        """The file stays, so later plans can use it again."""
        assert self.disk is not None
        key = list(self.disk.kept)[pick % len(self.disk.kept)]
        was = self.index.residence(key)
        self.index.mark_suspect(key)
        assert self.index.residence(key) is was
        assert key in self.disk.kept

    @precondition(lambda self: self.disk is not None and self.given)
    @rule(pick=PICKS)
    def a_read_ends_late(self, pick: int) -> None:
        """Its key may be missing by then, or gone."""
        key = self.pick_given(pick)
        given = self.given[key]
        own = given.chain[given.start :]
        is_in_ram = self.index.restored(key, Weight(max(1, len(own)), (given.tenant, own)))
        assert is_in_ram <= (self.index.ram.get(key) is not None)

    @rule()
    def offer_again(self) -> None:
        for block in self.index.unsaved():
            assert self.disk is not None
            self.disk.put(block)
            self.index.begin_saving(block)

    @precondition(lambda self: self.given)
    @rule(pick=PICKS)
    def forget(self, pick: int) -> None:
        key = self.pick_given(pick)
        was_there = self.index.residence(key) is not None or key in self.index.missing
        gone = self.index.forget([key], cause=CacheOutcome.FORGOTTEN)
        assert (key in gone) == was_there
        assert not any(self.is_alive(each) for each in gone)
        self.lost_on_purpose(gone)

    @precondition(lambda self: self.disk is not None)
    @rule()
    def restart(self) -> None:
        assert self.disk is not None
        self.holds.clear()
        self.cursors.clear()
        self.pinned.clear()
        self.disk.queued.clear()
        self.disk.echoes.clear()
        # without RAM: everything reachable from the disk alone
        self.index = PrefixIndex(fingerprint="model", ram_budget_bytes=0)
        reachable = self.reachable()
        self.disk.kept = {key: entry for key, entry in self.disk.kept.items() if key in reachable}
        self.begin()

    @invariant()
    def the_books_agree(self) -> None:
        self.index.check_invariants()
        known = {key for key in self.given if self.index.residence(key) is not None}
        assert known == {key for key in self.given if self.is_alive(key)}
        missing = {key for key in self.given if key in self.index.missing}
        assert (known == self.reachable().keys()) == (not missing)
        for key in known | missing:
            parent = self.given[key].parent
            assert self.given[key].start == 0 or parent in known | missing
        if not self.holds and not self.pinned:
            saving = self.disk.queued if self.disk is not None else {}
            assert self.index.ram.held <= sum(self.index.ram.get(key) is not None for key in saving)


IndexStates.TestCase.settings = settings(max_examples=50, stateful_step_count=30)
TestIndexStates = IndexStates.TestCase
