"""State machine of the index with live chains that hold its blocks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from holdfast.store.block import BlockKey
from holdfast.wire.events import CacheOutcome
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.index import PrefixIndex
from holdfast.worker.prefix.live_tier import LiveChains
from holdfast.worker.prefix.lookup import LiveChain
from holdfast.worker.prefix.tiers import Residence
from tests.fakes.chains import plan_of, stored
from tests.fakes.disk_side import PICKS, DiskRules, FakeDisk
from tests.fakes.payloads import Weight

chains = st.lists(st.integers(0, 1), min_size=1, max_size=14)


def a_chain(index: PrefixIndex, tokens: list[int], *, tenant: str = "") -> LiveChain:
    return LiveChain(
        request_id="a", chain=pack_tokens(tokens), cursor=Cursor(index.root(tenant=tenant))
    )


class HeldStates(DiskRules):
    @initialize(budget=st.sampled_from([0, 9, 30, 1000]), has_disk=st.booleans())
    def start(self, budget: int, has_disk: bool) -> None:
        self.disk = FakeDisk() if has_disk else None
        self.index = PrefixIndex(fingerprint="model", ram_budget_bytes=budget, disk=self.disk)
        self.live: list[LiveChain] = []
        self.keys: set[BlockKey] = set()
        self.budget = budget

    @rule(
        tokens=chains, block_tokens=st.integers(1, 5), is_live=st.booleans(), end=st.integers(0, 14)
    )
    def read(self, tokens: list[int], block_tokens: int, is_live: bool, end: int) -> None:
        """A sequence starts from stored blocks and inserts new ones; with or without a live chain,
        like a preempted one.
        """
        plan = plan_of(self.index, tokens, limit=end)
        live = a_chain(self.index, tokens)
        if is_live:
            self.live.append(live)
            self.index.begin_holding(live, self.index.whole_blocks(plan.blocks))
        cursor = stored(self.index, tokens)
        while cursor.position < len(tokens):
            own = tokens[cursor.position : cursor.position + block_tokens]
            block = self.index.insert(
                cursor, pack_tokens(own), Weight(len(own)), holder=live if is_live else None
            )
            if block is None:
                assert self.disk is None
                assert not is_live, "what a live chain has needs no room"
                break
            self.keys.add(block.key)
            if self.disk is not None:
                self.disk.put(block)

    @precondition(lambda self: self.live)
    @rule(pick=PICKS, keeps=st.booleans(), is_copied=st.booleans())
    def leave(self, pick: int, keeps: bool, is_copied: bool) -> None:
        """A chain leaves as a whole, or after the tokens that another sequence takes over."""
        live = self.live[pick % len(self.live)]
        keys = [key for key in live.keys if not keeps or sum(self.index.tree.run_of(key)) > 6]
        alone = self.index.held_alone(live, keys)
        copies = {
            key: Weight(self.index.tree.run_of(key)[1]) if is_copied else None for key in alone
        }
        has_room = self.budget == 1000
        gone = self.index.end_holding(live, keys, copies=copies)
        assert set(alone) <= set(keys)
        if has_room and is_copied:
            assert not gone, "there was room for it"
        assert not set(keys) & live.keys
        if not live.keys:
            self.live.remove(live)

    @precondition(lambda self: self.keys)
    @rule(pick=PICKS)
    def forget(self, pick: int) -> None:
        key = sorted(self.keys)[pick % len(self.keys)]
        holders = [live for live in self.live if key in live.keys]
        self.index.forget([key], cause=CacheOutcome.FORGOTTEN)
        assert all(live.is_stale and key not in live.keys for live in holders)
        assert self.index.residence(key) is None

    @invariant()
    def the_books_agree(self) -> None:
        self.index.check_invariants()
        for live in self.live:
            for key in live.keys:
                assert self.index.residence(key) in (Residence.RAM, Residence.BOTH)
                is_durable = self.disk is None or key in self.disk.kept
                if self.index.ram.get(key) is not None and is_durable:
                    assert self.disk is not None, (
                        "what is live is not in RAM again where no disk wants it"
                    )
        for key in self.keys:
            is_held = any(key in live.keys for live in self.live)
            on_disk = self.disk is not None and (key in self.disk.kept or key in self.disk.queued)
            if self.index.residence(key) is not None:
                assert is_held or on_disk or self.index.ram.get(key) is not None, (
                    "a key that nobody has"
                )


HeldStates.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
TestHeldStates = HeldStates.TestCase


class FakeState:
    def __init__(self, tokens: int) -> None:
        self.tokens = tokens


def test_the_longest_prefix_wins_then_parked_then_least_loss() -> None:
    index = PrefixIndex(fingerprint="model", ram_budget_bytes=0)
    live = LiveChains()

    def add(
        tokens: list[int], *, is_parked: bool = True, tenant: str = "", known: int = 0
    ) -> LiveChain:
        chain = a_chain(index, tokens, tenant=tenant)
        chain.state, chain.is_parked = FakeState(known or len(tokens)), is_parked  # type: ignore[assignment]
        live.add(chain)
        return chain

    long, short = add([1, 2, 3, 4, 5, 6]), add([1, 2, 3, 4])
    running, other = add([1, 2, 3, 4], is_parked=False), add([1, 2, 3, 4, 5, 6], tenant="other")
    assert live.longest(pack_tokens([1, 2, 3, 4, 9]), root=index.root(tenant="")) == (short, 4)
    assert live.longest(pack_tokens([1, 2, 3, 4, 5, 9]), root=index.root(tenant="")) == (long, 5)
    assert live.longest(pack_tokens([1, 2, 3, 4, 5, 9]), root=index.root(tenant="other")) == (
        other,
        5,
    )
    assert live.longest(pack_tokens([2]), root=index.root(tenant="")) == (None, 0)
    long.is_stale = short.is_stale = True
    assert live.longest(pack_tokens([1, 2, 3, 4, 5]), root=index.root(tenant="")) == (None, 0), (
        "nothing of a running one has come out right yet"
    )
    assert live.parked[:2] == [long, short], "what nobody is to begin from leaves first"
    assert running not in live.parked
