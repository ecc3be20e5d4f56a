from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.prefix.in_flight import InFlightPrefill, InFlightPrefills

CHAIN = [*range(100)]


def test_a_second_request_waits_for_the_common_prefix() -> None:
    prefills = InFlightPrefills()
    assert prefills.ahead_of(pack_tokens(CHAIN), 0) is None
    prefills.announce("first", pack_tokens(CHAIN))
    ahead = prefills.ahead_of(pack_tokens([*CHAIN[:60], 7, 7]), 0)
    assert ahead == InFlightPrefill("first", 60)
    prefills.wait("second", ahead)
    assert prefills.waiting == 1
    assert prefills.record_progress("first", 59) == ()
    assert prefills.record_progress("first", 64) == ("second",)
    assert prefills.waiting == 0
    assert prefills.ahead_of(pack_tokens([*CHAIN[:60], 7, 7]), 60) is None
    assert prefills.record_progress("nobody", 64) == ()


def test_a_reader_that_stops_frees_its_waiters() -> None:
    prefills = InFlightPrefills()
    prefills.announce("first", pack_tokens(CHAIN))
    for waiter in ("second", "third"):
        ahead = prefills.ahead_of(pack_tokens(CHAIN), 0, limit=99)
        assert ahead == InFlightPrefill("first", 99)
        prefills.wait(waiter, ahead)
    assert prefills.withdraw("second") == ()
    assert prefills.withdraw("first") == ("third",)
    assert prefills.withdraw("first") == ()
    assert (prefills.waiting, prefills.waits) == (0, 2)


def test_no_request_waits_for_a_slower_reader_or_evicted_blocks() -> None:
    prefills = InFlightPrefills()
    prefills.announce("slow", pack_tokens(CHAIN))
    prefills.record_progress("slow", 10)
    assert prefills.ahead_of(pack_tokens(CHAIN), 11) is None, "the asker is quicker by itself"
    assert prefills.ahead_of(pack_tokens(CHAIN), 10) == InFlightPrefill("slow", 100)
    assert prefills.ahead_of(pack_tokens([*CHAIN[:8], 7]), 0) is None, (
        "these were read, and yet the asker has not found them"
    )


def test_the_reader_with_the_longest_common_prefix_is_chosen() -> None:
    prefills = InFlightPrefills()
    prefills.announce("a little", pack_tokens(CHAIN[:30]), stored_tokens=20)
    prefills.announce("all", pack_tokens(CHAIN))
    prefills.announce("all, and further", pack_tokens(CHAIN), stored_tokens=5)
    assert prefills.ahead_of(pack_tokens(CHAIN), 0) == InFlightPrefill("all, and further", 100)
    prefills.withdraw("all, and further")
    assert prefills.ahead_of(pack_tokens(CHAIN), 0) == InFlightPrefill("all", 100)
    prefills.withdraw("all")
    assert prefills.ahead_of(pack_tokens(CHAIN), 0) == InFlightPrefill("a little", 30)


def test_a_model_with_boundaries_waits_only_for_a_shared_one() -> None:
    prefills = InFlightPrefills()
    prefills.announce("first", pack_tokens(CHAIN), boundaries=[80, 16, 48])
    assert prefills.ahead_of(pack_tokens([*CHAIN[:60], 7]), 0) == InFlightPrefill("first", 48)
    assert prefills.ahead_of(pack_tokens([*CHAIN[:48], 7]), 0) == InFlightPrefill("first", 48)
    assert prefills.ahead_of(pack_tokens([*CHAIN[:15], 7]), 0) is None
    assert prefills.ahead_of(pack_tokens(CHAIN), 48) is None, "the reader is behind"


def test_tenants_do_not_wait_for_each_other() -> None:
    prefills = InFlightPrefills()
    prefills.announce("first", pack_tokens(CHAIN), tenant="one")
    assert prefills.ahead_of(pack_tokens(CHAIN), 0, tenant="other") is None


token_lists = st.lists(st.integers(0, 1), max_size=8)


@given(
    st.lists(st.tuples(token_lists, st.integers(0, 8)), max_size=6), token_lists, st.integers(0, 8)
)
def test_the_choice_agrees_with_a_linear_scan(
    readers: list[tuple[list[int], int]], asked: list[int], have: int
) -> None:
    prefills = InFlightPrefills()
    best = have
    for index, (tokens, progress) in enumerate(readers):
        prefills.announce(str(index), pack_tokens(tokens), stored_tokens=progress)
        shared = max(
            end
            for end in range(9)
            if tokens[:end] == asked[:end] and end <= min(len(tokens), len(asked))
        )
        if progress >= have and shared > progress:
            best = max(best, shared)
    ahead = prefills.ahead_of(pack_tokens(asked), have)
    assert (have if ahead is None else ahead.tokens) == best


class InFlightStates(RuleBasedStateMachine):
    """Requests as in a worker. In the end, every request is prefilled."""

    def __init__(self) -> None:
        super().__init__()
        self.prefills = InFlightPrefills()
        self.prompts: dict[str, list[int]] = {}
        self.stored: list[list[int]] = []
        self.progress: dict[str, int] = {}
        self.boundaries: dict[str, list[int] | None] = {}
        self.waiting: set[str] = set()
        self.count = 0

    def have(self, name: str) -> int:
        prompt = self.prompts[name]
        return max(
            (
                end
                for end in range(len(prompt))
                for other in self.stored
                if other[:end] == prompt[:end]
            ),
            default=0,
        )

    def begin(self, name: str) -> None:
        prompt = self.prompts[name]
        have = self.have(name)
        ahead = self.prefills.ahead_of(pack_tokens(prompt), have, limit=len(prompt) - 1)
        if ahead is None:
            self.waiting.discard(name)
            self.prefills.announce(
                name, pack_tokens(prompt), stored_tokens=have, boundaries=self.boundaries[name]
            )
            self.progress[name] = have
        else:
            assert ahead.tokens > have
            assert ahead.request_id in self.progress
            self.prefills.wait(name, ahead)
            self.waiting.add(name)

    def free(self, names: tuple[str, ...]) -> None:
        assert set(names) <= self.waiting
        for name in names:
            self.begin(name)

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=9),
        boundaries=st.none() | st.lists(st.integers(1, 9), max_size=3),
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
        self.free(self.prefills.record_progress(name, self.progress[name]))
        if self.progress[name] == len(prompt):
            self.end(name)

    @precondition(lambda self: self.progress)
    @rule(pick=st.integers(0, 100))
    def preempt(self, pick: int) -> None:
        name = list(self.progress)[pick % len(self.progress)]
        del self.progress[name]
        self.free(self.prefills.withdraw(name))
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
        self.free(self.prefills.withdraw(name))

    @invariant()
    def the_books_agree(self) -> None:
        self.prefills.check_invariants()
        assert len(self.waiting) == self.prefills.waiting
        assert self.waiting | self.progress.keys() == self.prompts.keys()
        assert not self.waiting or self.progress, "all wait and nobody reads"

    def teardown(self) -> None:
        steps = 0
        while self.prompts:
            self.read(0, 1, is_kept=steps % 2 == 0)
            self.the_books_agree()
            steps += 1
            assert steps < 10_000


InFlightStates.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
TestInFlightStates = InFlightStates.TestCase
