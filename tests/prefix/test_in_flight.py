from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.prefix.in_flight import InFlightPrefill, InFlightPrefills

CHAIN = [*range(100)]


def test_a_second_request_waits_for_what_both_begin_with() -> None:
    readings = InFlightPrefills()
    assert readings.ahead_of(CHAIN, 0) is None
    readings.announce("first", CHAIN)
    ahead = readings.ahead_of([*CHAIN[:60], 7, 7], 0)
    assert ahead == InFlightPrefill("first", 60)
    readings.wait("second", ahead)
    assert readings.waits_for("second") == ahead
    assert readings.progress("first", 59) == ()
    assert readings.progress("first", 64) == ("second",)
    assert readings.waits_for("second") is None
    assert readings.ahead_of([*CHAIN[:60], 7, 7], 60) is None
    assert readings.progress("nobody", 64) == ()


def test_a_reader_that_stops_frees_who_waits_for_it() -> None:
    readings = InFlightPrefills()
    readings.announce("first", CHAIN)
    for waiter in ("second", "third"):
        ahead = readings.ahead_of(CHAIN, 0, limit=99)
        assert ahead == InFlightPrefill("first", 99)
        readings.wait(waiter, ahead)
    assert readings.withdraw("second") == ()
    assert readings.withdraw("first") == ("third",)
    assert readings.withdraw("first") == ()
    assert (readings.waiting, readings.waits) == (0, 2)


def test_nobody_waits_for_who_is_behind_or_for_what_is_gone_again() -> None:
    readings = InFlightPrefills()
    readings.announce("slow", CHAIN)
    readings.progress("slow", 10)
    assert readings.ahead_of(CHAIN, 11) is None, "the asker is quicker by itself"
    assert readings.ahead_of(CHAIN, 10) == InFlightPrefill("slow", 100)
    assert readings.ahead_of([*CHAIN[:8], 7], 0) is None, "these were read, and yet the asker has not found them"


def test_the_reader_that_shares_most_is_chosen_and_of_equals_the_furthest() -> None:
    readings = InFlightPrefills()
    readings.announce("a little", CHAIN[:30], have=20)
    readings.announce("all", CHAIN)
    readings.announce("all, and further", CHAIN, have=5)
    assert readings.ahead_of(CHAIN, 0) == InFlightPrefill("all, and further", 100)
    readings.withdraw("all, and further")
    assert readings.ahead_of(CHAIN, 0) == InFlightPrefill("all", 100)
    readings.withdraw("all")
    assert readings.ahead_of(CHAIN, 0) == InFlightPrefill("a little", 30)


def test_a_model_that_resumes_at_boundaries_waits_for_one_that_both_share() -> None:
    readings = InFlightPrefills()
    readings.announce("first", CHAIN, boundaries=[80, 16, 48])
    assert readings.ahead_of([*CHAIN[:60], 7], 0) == InFlightPrefill("first", 48)
    assert readings.ahead_of([*CHAIN[:48], 7], 0) == InFlightPrefill("first", 48)
    assert readings.ahead_of([*CHAIN[:15], 7], 0) is None
    assert readings.ahead_of(CHAIN, 48) is None, "the reader is behind"


def test_tenants_do_not_wait_for_each_other() -> None:
    readings = InFlightPrefills()
    readings.announce("first", CHAIN, tenant="one")
    assert readings.ahead_of(CHAIN, 0, tenant="other") is None


token_lists = st.lists(st.integers(0, 1), max_size=8)


@given(st.lists(st.tuples(token_lists, st.integers(0, 8)), max_size=6), token_lists, st.integers(0, 8))
def test_the_choice_agrees_with_a_linear_scan(readers: list[tuple[list[int], int]], asked: list[int], have: int) -> None:
    readings = InFlightPrefills()
    best = have
    for index, (tokens, progress) in enumerate(readers):
        readings.announce(str(index), tokens, have=progress)
        shared = max(end for end in range(9) if tokens[:end] == asked[:end] and end <= min(len(tokens), len(asked)))
        if progress >= have and shared > progress:
            best = max(best, shared)
    ahead = readings.ahead_of(asked, have)
    assert (have if ahead is None else ahead.tokens) == best


class ReadingStates(RuleBasedStateMachine):
    """Requests as a worker drives them. Whatever happens, all of them get read in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.readings = InFlightPrefills()
        self.prompts: dict[str, list[int]] = {}
        self.stored: list[list[int]] = []
        self.progress: dict[str, int] = {}
        self.boundaries: dict[str, list[int] | None] = {}
        self.waiting: set[str] = set()
        self.count = 0

    def have(self, name: str) -> int:
        prompt = self.prompts[name]
        return max((end for end in range(len(prompt)) for other in self.stored if other[:end] == prompt[:end]), default=0)

    def begin(self, name: str) -> None:
        prompt = self.prompts[name]
        have = self.have(name)
        ahead = self.readings.ahead_of(prompt, have, limit=len(prompt) - 1)
        if ahead is None:
            self.waiting.discard(name)
            self.readings.announce(name, prompt, have=have, boundaries=self.boundaries[name])
            self.progress[name] = have
        else:
            assert ahead.tokens > have
            assert ahead.request_id in self.progress
            self.readings.wait(name, ahead)
            self.waiting.add(name)

    def free(self, names: tuple[str, ...]) -> None:
        assert set(names) <= self.waiting
        for name in names:
            self.begin(name)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9), boundaries=st.none() | st.lists(st.integers(1, 9), max_size=3)
    )
    def arrive(self, prompt: list[int], boundaries: list[int] | None) -> None:
        self.count += 1
        name = str(self.count)
        self.prompts[name], self.boundaries[name] = prompt, boundaries
        self.begin(name)

    @precondition(lambda self: self.progress)
    @rule(pick=st.integers(0, 100), tokens=st.integers(1, 4), is_kept=st.booleans())
    def read(self, pick: int, tokens: int, is_kept: bool) -> None:
        name = list(self.progress)[pick % len(self.progress)]
        prompt = self.prompts[name]
        self.progress[name] = min(len(prompt), self.progress[name] + tokens)
        if is_kept:
            self.stored.append(prompt[: self.progress[name]])
        self.free(self.readings.progress(name, self.progress[name]))
        if self.progress[name] == len(prompt):
            self.end(name)

    @precondition(lambda self: self.progress)
    @rule(pick=st.integers(0, 100))
    def preempt(self, pick: int) -> None:
        name = list(self.progress)[pick % len(self.progress)]
        del self.progress[name]
        self.free(self.readings.withdraw(name))
        self.begin(name)

    @precondition(lambda self: self.prompts)
    @rule(pick=st.integers(0, 100))
    def cancel(self, pick: int) -> None:
        self.end(list(self.prompts)[pick % len(self.prompts)])

    @rule()
    def forget_all(self) -> None:
        self.stored.clear()

    def end(self, name: str) -> None:
        self.progress.pop(name, None)
        self.waiting.discard(name)
        del self.prompts[name]
        self.free(self.readings.withdraw(name))

    @invariant()
    def the_books_agree(self) -> None:
        self.readings.check_invariants()
        assert self.waiting == {name for name in self.prompts if self.readings.waits_for(name) is not None}
        assert self.waiting | self.progress.keys() == self.prompts.keys()
        assert not self.waiting or self.progress, "all wait and nobody reads"

    def teardown(self) -> None:
        steps = 0
        while self.prompts:
            self.read(0, 1, is_kept=steps % 2 == 0)
            self.the_books_agree()
            steps += 1
            assert steps < 10_000


ReadingStates.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestReadingStates = ReadingStates.TestCase
