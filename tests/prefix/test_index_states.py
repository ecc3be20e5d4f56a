"""The library under everything that can happen to it, against a list of all runs that were ever given to it."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from holdfast.prefix.addition import Outcome
from holdfast.prefix.evicted import EvictionCause
from holdfast.prefix.hold import Hold
from holdfast.prefix.index import PrefixIndex
from holdfast.prefix.ram import Residence
from holdfast.prefix.reuse import ReusePlan
from holdfast.store.block import BlockKey
from tests.fakes.disk_side import FakeDisk
from tests.fakes.payloads import Weight

chains = st.lists(st.integers(0, 1), min_size=1, max_size=12)
salts = st.sampled_from(["", "tenant"])
picks = st.integers(0, 10**6)


@dataclass(frozen=True)
class Given:
    """A run (its chain up to its end) or a state, as it was given to the library once."""

    parent: BlockKey
    tenant: str
    chain: tuple[int, ...]
    start: int
    is_state: bool


class LibraryStates(RuleBasedStateMachine):
    @initialize(
        budget=st.sampled_from([0, 9, 16, 30, 1000]), has_disk=st.booleans(), chains=st.lists(chains, min_size=1, max_size=5)
    )
    def start(self, budget: int, has_disk: bool, chains: list[list[int]]) -> None:
        self.budget = budget
        self.disk = FakeDisk() if has_disk else None
        self.given: dict[BlockKey, Given] = {}
        self.holds: list[tuple[Hold, dict[BlockKey, bool]]] = []
        self.pinned: list[tuple[tuple[BlockKey, ...], dict[BlockKey, bool]]] = []  # as sessions do, and what was in RAM then
        self.begin()
        for chain in chains:
            self.read(chain, "", 4)

    def begin(self) -> None:
        self.library = PrefixIndex(fingerprint="model", ram_budget_bytes=self.budget, disk=self.disk)
        self.library.load()

    def is_alive(self, key: BlockKey) -> bool:
        on_disk = self.disk is not None and (key in self.disk.kept or key in self.disk.queued)
        return on_disk or self.library.payload(key) is not None

    def reachable(self) -> dict[BlockKey, Given]:
        """What is somewhere, with everything before it: by the keys' own links."""
        found: dict[BlockKey, Given] = {}
        for key, given in sorted(self.given.items(), key=lambda item: (item[1].start, item[1].is_state)):
            if self.is_alive(key) and (given.start == 0 or given.parent in found):
                found[key] = given
        return found

    def stored_tokens(self, chain: tuple[int, ...], tenant: str) -> int:
        others = [given.chain for given in self.reachable().values() if given.tenant == tenant]
        return max((end for end in range(len(chain) + 1) for other in others if other[:end] == chain[:end]), default=0)

    @rule(chain=chains, tenant=salts, run_tokens=st.integers(1, 5))
    def read(self, chain: list[int], tenant: str, run_tokens: int) -> None:
        begin = self.library.missing(chain, tenant=tenant)
        assert begin == self.stored_tokens(tuple(chain), tenant)
        for start in range(begin, len(chain), run_tokens):
            run = chain[: start + run_tokens]
            payload = Weight(len(run) - start, (tenant, tuple(run[start:])))
            addition = self.library.add_run(run, start=start, payload=payload, tenant=tenant)
            if addition.outcome in (Outcome.NO_ROOM, Outcome.NO_PARENT):
                assert self.disk is None
                return
            block = addition.new_block
            assert block is not None
            self.given[block.key] = Given(block.parent_key, tenant, tuple(run), start, is_state=False)
            if self.disk is not None:
                self.disk.put(block)

    @rule(chain=chains, tenant=salts, nbytes=st.integers(0, 9))
    def keep_a_state(self, chain: list[int], tenant: str, nbytes: int) -> None:
        chain = chain[: self.library.missing(chain, tenant=tenant)]
        addition = self.library.add_state(chain, payload=Weight(nbytes, (tenant, tuple(chain))), tenant=tenant)
        block = addition.new_block
        if block is not None:
            self.given[block.key] = Given(block.parent_key, tenant, tuple(chain), len(chain), is_state=True)
            if self.disk is not None:
                self.disk.put(block)

    @rule(chain=chains, tenant=salts, anywhere=st.booleans(), limit=st.integers(0, 13), is_accepted=st.booleans())
    def plan(self, chain: list[int], tenant: str, anywhere: bool, limit: int, is_accepted: bool) -> None:
        plan = self.library.plan(chain, tenant=tenant, resumable_anywhere=anywhere, limit=limit)
        stored = min(self.stored_tokens(tuple(chain), tenant), limit)
        if not anywhere:
            states = [given for given in self.reachable().values() if given.is_state and given.tenant == tenant]
            stored = max(
                (given.start for given in states if given.start <= stored and tuple(chain[: given.start]) == given.chain),
                default=0,
            )
        assert plan.tokens == stored
        assert (plan.shortfall is None) == (plan.tokens == min(limit, len(chain)))
        assert (plan.state is not None) == (not anywhere and stored > 0)
        end = 0
        for piece in plan.pieces:
            assert piece.start == end
            given = self.given[piece.key]
            own = given.chain[given.start :]
            assert own[piece.offset : piece.offset + piece.tokens] == tuple(chain[end : end + piece.tokens])
            self.assert_is_where_it_is_said_to_be(piece.key, piece.residence)
            end += piece.tokens
        assert end == plan.tokens
        if plan.state is not None:
            self.assert_is_where_it_is_said_to_be(plan.state.key, plan.state.residence)
        if is_accepted:
            self.fetch_and_accept(plan)

    def fetch_and_accept(self, plan: ReusePlan) -> None:
        with self.library.hold(plan.keys):
            for key in plan.to_read:
                given = self.given[key]
                self.library.restored(
                    key, Weight(max(1, len(given.chain) - given.start), (given.tenant, given.chain[given.start :]))
                )
            for key in plan.keys:
                assert self.library.residence(key) is not None
        self.library.accept(plan)

    def assert_is_where_it_is_said_to_be(self, key: BlockKey, residence: Residence) -> None:
        given = self.given[key]
        payload = self.library.payload(key)
        assert (payload is not None) == (residence is not Residence.DISK)
        if isinstance(payload, Weight) and not given.is_state:
            assert payload.name == (given.tenant, given.chain[given.start :])
        if residence is not Residence.RAM:
            assert self.disk is not None
            assert key in self.disk.kept or key in self.disk.queued

    def pick_given(self, pick: int) -> BlockKey:
        return list(self.given)[pick % len(self.given)]

    @precondition(lambda self: self.given)
    @rule(pick=picks)
    def hold(self, pick: int) -> None:
        key = self.pick_given(pick)
        held = {each: self.library.payload(each) is not None for each in [key] if self.library.residence(each) is not None}
        self.holds.append((self.library.hold([key]), held))

    @precondition(lambda self: self.holds)
    @rule(pick=picks)
    def release(self, pick: int) -> None:
        hold, held = self.holds.pop(pick % len(self.holds))
        for key, was_in_ram in held.items():
            assert self.library.residence(key) is not None
            assert not was_in_ram or self.library.payload(key) is not None
        hold.release()

    @precondition(lambda self: self.given)
    @rule(pick=picks, both=st.booleans())
    def pin(self, pick: int, both: bool) -> None:
        keys = tuple(dict.fromkeys(self.pick_given(number) for number in ((pick, pick // 7) if both else (pick,))))
        keys = tuple(key for key in keys if self.library.residence(key) is not None)
        in_ram = {key: self.library.payload(key) is not None for key in keys}
        self.library.pin(keys)
        self.pinned.append((keys, in_ram))

    @precondition(lambda self: self.pinned)
    @rule(pick=picks)
    def unpin(self, pick: int) -> None:
        keys, in_ram = self.pinned.pop(pick % len(self.pinned))
        for key, was_in_ram in in_ram.items():
            on_disk = self.disk is not None and key in self.disk.kept
            assert on_disk or not was_in_ram or self.library.payload(key) is not None
        self.library.unpin(keys)

    def lost_on_purpose(self, keys: tuple[BlockKey, ...]) -> None:
        for _, held in (*self.holds, *self.pinned):
            for key in keys:
                held.pop(key, None)

    @precondition(lambda self: self.disk is not None and self.disk.queued)
    @rule(pick=picks, is_written=st.booleans())
    def the_disk_answers(self, pick: int, is_written: bool) -> None:
        assert self.disk is not None
        keys = list(self.disk.queued)
        if is_written:
            self.library.disk_changed(stored=self.disk.write(keys[: 1 + pick % len(keys)]).stored)
        else:
            self.the_disk_echoes()
            lost = self.disk.drop([keys[pick % len(keys)]]).lost
            self.lost_on_purpose(self.library.disk_changed(lost=lost))

    @precondition(lambda self: self.disk is not None and self.disk.kept)
    @rule(pick=picks, is_unreadable=st.booleans())
    def the_disk_loses(self, pick: int, is_unreadable: bool) -> None:
        assert self.disk is not None
        key = list(self.disk.kept)[pick % len(self.disk.kept)]
        self.the_disk_echoes()
        if is_unreadable:
            self.disk.condemn(key)
            gone = self.library.forget([key], cause=EvictionCause.UNREADABLE) if pick % 3 == 0 else self.library.unreadable([key])
        else:
            gone = self.library.disk_changed(lost=self.disk.drop([key]).lost)
        assert key not in self.disk.kept
        self.lost_on_purpose(gone)

    @precondition(lambda self: self.disk is not None)
    @rule()
    def the_disk_echoes(self) -> None:
        assert self.disk is not None
        assert self.library.disk_changed(lost=self.disk.take_echoes().lost) == ()

    @rule()
    def offer_again(self) -> None:
        for block in self.library.unsaved():
            assert self.disk is not None
            self.disk.put(block)
            self.library.save_again(block)

    @precondition(lambda self: self.given)
    @rule(pick=picks)
    def forget(self, pick: int) -> None:
        key = self.pick_given(pick)
        was_there = self.library.residence(key) is not None
        gone = self.library.forget([key], cause=EvictionCause.FORGOTTEN)
        assert (key in gone) == was_there
        assert not any(self.is_alive(each) for each in gone)
        self.lost_on_purpose(gone)

    @precondition(lambda self: self.disk is not None)
    @rule()
    def restart(self) -> None:
        assert self.disk is not None
        self.holds.clear()
        self.pinned.clear()
        self.disk.queued.clear()
        self.disk.echoes.clear()
        self.library = PrefixIndex(fingerprint="model", ram_budget_bytes=0)  # nothing in RAM: what the disk alone makes reachable
        reachable = self.reachable()
        self.disk.kept = {key: entry for key, entry in self.disk.kept.items() if key in reachable}
        self.begin()

    @invariant()
    def the_books_agree(self) -> None:
        self.library.check_invariants()
        known = {key for key in self.given if self.library.residence(key) is not None}
        assert known == {key for key in self.given if self.is_alive(key)}
        assert known == self.reachable().keys()
        if not self.holds and not self.pinned:
            saving = self.disk.queued if self.disk is not None else {}
            assert self.library.statistics().ram.held <= sum(self.library.payload(key) is not None for key in saving)


LibraryStates.TestCase.settings = settings(max_examples=100, stateful_step_count=30)
TestLibraryStates = LibraryStates.TestCase
