"""Which requests are tried alone after workers died, and which one is refused."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.link.model_client import (
    DEATHS_ALONE,
    DEATHS_WITH_PROGRESS,
    DEATHS_WITHOUT_PROGRESS,
    FEW_TOKENS,
    Isolation,
)

MANY = 10 * FEW_TOKENS
WORST = 64  # deaths for each request; all killers together cause fewer


def died(
    isolation: Isolation, drawn: Mapping[str, int], *, also_open: tuple[str, ...] = ()
) -> str | None:
    return isolation.worker_died(drawn, open_requests={*drawn, *also_open})


def died_alone(
    isolation: Isolation, request_id: str, tokens: int, *, also_open: tuple[str, ...] = ()
) -> str | None:
    """The worker dies while the request on trial runs, until the request is refused."""
    for _ in range(DEATHS_ALONE - 1):
        assert died(isolation, {request_id: tokens}, also_open=also_open) is None
        assert isolation.start_next_trial([*also_open, request_id]) == request_id, (
            "it runs alone again"
        )
    return died(isolation, {request_id: tokens}, also_open=also_open)


def test_one_death_makes_nobody_a_suspect() -> None:
    isolation = Isolation()
    assert died(isolation, {"a": 1, "b": 0}) is None
    assert isolation.is_over


def test_after_three_deaths_requests_are_tried_alone() -> None:
    isolation = Isolation()
    died(isolation, {"a": 1, "b": 1, "c": 1})
    for _ in range(DEATHS_WITHOUT_PROGRESS - 1):
        assert isolation.is_over
        assert died(isolation, {"a": 0, "b": 0, "c": 0}) is None
    assert isolation.start_next_trial(["a", "b", "c", "new"]) == "a"
    assert isolation.tokens_to_pass == 1
    isolation.trial_passed("a")
    assert isolation.start_next_trial(["a", "b", "c", "new"]) == "b"
    assert died_alone(isolation, "b", 0, also_open=("a", "c")) == "b"
    assert isolation.is_over, "its deaths are explained"


def test_an_innocent_request_survives_an_unrelated_death_in_its_trial() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        died(isolation, {"a": 0, "b": 0})
    for _ in range(4):  # each pass forgets what happened before
        if isolation.is_over:
            for _ in range(DEATHS_WITHOUT_PROGRESS):
                died(isolation, {"a": 1, "b": MANY})
        assert isolation.start_next_trial(["a", "b"]) == "a"
        assert died(isolation, {"a": 5}, also_open=("b",)) is None
        assert isolation.start_next_trial(["a", "b"]) == "a"
        assert isolation.tokens_to_pass > 2 * 5
        isolation.trial_passed("a")
        if isolation.start_next_trial(["a", "b"]) == "b":
            isolation.trial_passed("b")


def test_a_request_with_few_tokens_per_life_is_tried_alone() -> None:
    isolation = Isolation()
    for tokens in (2, 1, 2):
        assert isolation.is_over
        assert died(isolation, {"innocent": MANY, "guilty": tokens}) is None
    assert isolation.start_next_trial(["innocent", "guilty"]) == "guilty"
    assert isolation.tokens_to_pass == 5, "more than twice the two of its last life"
    assert died_alone(isolation, "guilty", 2, also_open=("innocent",)) == "guilty"
    assert isolation.is_over


def test_a_request_that_meets_many_deaths_is_tried_alone() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITH_PROGRESS):
        assert isolation.is_over
        died(isolation, {"guilty": MANY})
        died(isolation, {"another": MANY}, also_open=("guilty",))
    assert isolation.start_next_trial(["guilty"]) == "guilty"
    assert isolation.tokens_to_pass > 2 * MANY


def test_a_stuck_request_among_progressing_ones_is_tried_alone() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        assert isolation.is_over
        died(isolation, {"a": MANY, "guilty": 0})
    assert isolation.start_next_trial(["a", "guilty"]) == "guilty"
    assert died_alone(isolation, "guilty", 0, also_open=("a",)) == "guilty"
    assert isolation.is_over


def test_requests_with_few_tokens_are_tried_before_possibly_queued_ones() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        died(isolation, {"queued": 0, "slow": 4, "guilty": 2})
    assert [isolation.start_next_trial(["queued", "slow", "guilty"])] == ["guilty"]
    isolation.trial_passed("guilty")
    assert isolation.start_next_trial(["queued", "slow", "guilty"]) == "slow"
    isolation.trial_passed("slow")
    assert isolation.start_next_trial(["queued", "slow", "guilty"]) == "queued"


def test_each_further_trial_is_twice_as_long() -> None:
    isolation = Isolation()
    to_pass = []
    for _ in range(3):
        while isolation.is_over:
            died(isolation, {"a": 3})
        isolation.start_next_trial(["a"])
        to_pass.append(isolation.tokens_to_pass)
        isolation.trial_passed("a")
    assert to_pass == [7, 14, 28]


def test_a_suspect_that_cannot_run_is_tried_later() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        died(isolation, {"a": 0, "b": 0})
    assert isolation.start_next_trial(["b"]) == "b"
    isolation.trial_passed("b")
    assert isolation.start_next_trial(["b"]) is None
    assert isolation.start_next_trial(["a", "b"]) == "a", "it can run again, and has not been tried"


def test_finding_the_killer_clears_the_requests_that_died_with_it() -> None:
    """They may have been queued the whole time."""
    isolation = Isolation()
    queued = {f"queued {number}": 0 for number in range(100)}
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        died(isolation, {"a": MANY, "guilty": 1, **queued})
    assert isolation.start_next_trial(["a", "guilty", *queued]) == "guilty"
    assert died_alone(isolation, "guilty", 1, also_open=("a", *queued)) == "guilty"
    assert isolation.is_over
    for number in range(DEATHS_WITHOUT_PROGRESS):
        assert isolation.is_over
        died(isolation, {"a": MANY, f"another {number}": 1, **queued})
    assert not isolation.is_over


@given(data=st.data(), count=st.integers(1, 8))
def test_exactly_the_killers_are_refused(data: st.DataObject, count: int) -> None:
    """Some requests kill the worker whenever they run, after any number of tokens."""
    killers = data.draw(
        st.dictionaries(st.integers(0, count - 1).map(str), st.integers(0, 3 * FEW_TOKENS))
    )
    isolation = Isolation()
    alive = [str(index) for index in range(count)]
    refused = set()
    for _ in range(WORST * count):
        if not killers.keys() & set(alive):
            break
        ran = alive
        if not isolation.is_over:
            alone = isolation.start_next_trial(alive)
            if alone is None:
                continue
            if alone not in killers or killers[alone] >= isolation.tokens_to_pass:
                isolation.trial_passed(alone)
                continue
            ran = [alone]
        drawn = {each: data.draw(st.integers(0, MANY)) for each in ran}
        drawn |= {each: tokens for each, tokens in killers.items() if each in ran}
        guilty = isolation.worker_died(drawn, open_requests=alive)
        if guilty is not None:
            alive.remove(guilty)
            refused.add(guilty)
    assert refused == killers.keys()


MOST_TOKENS = 200
# Each passed trial doubles the tokens of the next one, and between two trials a request can cause
# fewer deaths than make it a suspect.
MOST_DEATHS = (MOST_TOKENS.bit_length() + 1) * (DEATHS_WITH_PROGRESS + DEATHS_ALONE)


@given(
    lives=st.lists(st.tuples(st.integers(0, MOST_TOKENS), st.booleans()), min_size=1, max_size=8)
)
def test_the_deaths_caused_by_one_request_are_bounded(lives: list[tuple[int, bool]]) -> None:
    """In each life, it generates some tokens, or its stream is not read for a while during its
    trial.
    """
    isolation = Isolation()
    deaths = 0
    for tokens, pauses in itertools.islice(itertools.cycle(lives), 8 * MOST_DEATHS):
        alone = isolation.start_next_trial(["a"])
        if alone is not None and pauses:
            isolation.interrupt_trial()
            assert isolation.start_next_trial([]) is None
        elif alone is not None and tokens >= isolation.tokens_to_pass:
            isolation.trial_passed(alone)
        else:
            deaths += 1
            assert deaths <= MOST_DEATHS
            if died(isolation, {"a": tokens}) is not None:
                return
    assert any(pauses for _, pauses in lives), "it was never refused"


def test_an_unread_suspect_waits_for_its_trial_and_stays_suspect() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_WITHOUT_PROGRESS):
        died(isolation, {"innocent": MANY, "guilty": 2})
    assert isolation.start_next_trial(["innocent", "guilty"]) == "guilty"
    isolation.interrupt_trial()
    assert isolation.start_next_trial(["innocent"]) is None
    assert died(isolation, {"innocent": MANY}, also_open=("guilty",)) is None
    assert isolation.is_untried("guilty")
    assert isolation.start_next_trial(["innocent", "guilty"]) == "guilty"
    assert died_alone(isolation, "guilty", 2, also_open=("innocent",)) == "guilty"
