from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.link.isolation import DEATHS_OF_ONE, Isolation


def died(isolation: Isolation, ran: list[str], *, grown: list[str] | None = None) -> str | None:
    return isolation.worker_died(ran, grown=grown or [], had_progress=bool(grown))


def test_one_death_has_nobody_run_alone() -> None:
    isolation = Isolation()
    assert died(isolation, ["a", "b"], grown=["a"]) is None
    assert isolation.is_over


def test_after_a_second_death_without_a_new_token_they_are_tried_one_at_a_time_and_the_guilty_one_is_refused() -> None:
    isolation = Isolation()
    died(isolation, ["a", "b", "c"], grown=["a", "b", "c"])
    assert died(isolation, ["a", "b", "c"]) is None
    assert isolation.next_of(["a", "b", "c", "new"]) == "a"
    isolation.has_passed("a")
    assert isolation.next_of(["a", "b", "c", "new"]) == "b"
    assert died(isolation, ["b"]) == "b"
    assert isolation.next_of(["a", "c", "new"]) == "c"
    isolation.has_passed("c")
    assert isolation.next_of(["a", "c", "new"]) is None
    assert isolation.is_over


def test_deaths_between_which_tokens_come_go_on_for_ever_while_each_has_some() -> None:
    isolation = Isolation()
    for _ in range(20):
        assert died(isolation, ["a", "b"], grown=["a", "b"]) is None
        assert isolation.is_over


def test_one_that_never_has_a_token_while_others_have_is_tried_alone() -> None:
    isolation = Isolation()
    for _ in range(DEATHS_OF_ONE):
        assert isolation.is_over
        died(isolation, ["a", "guilty"], grown=["a"])
    assert isolation.next_of(["a", "guilty"]) == "guilty"
    assert died(isolation, ["guilty"]) == "guilty"
    assert isolation.is_over


def test_who_cannot_run_is_passed_over() -> None:
    isolation = Isolation()
    died(isolation, ["a", "b"])
    died(isolation, ["a", "b"])
    assert isolation.next_of(["b"]) == "b"
    isolation.has_passed("b")
    assert isolation.next_of(["a", "b"]) is None


@given(data=st.data(), count=st.integers(1, 8))
def test_whoever_kills_is_refused_in_the_end_and_nobody_else(data: st.DataObject, count: int) -> None:
    """Workers die of some requests whenever these run, after others may have had a token."""
    killers = data.draw(st.sets(st.integers(0, count - 1)).map(lambda found: {str(each) for each in found}))
    isolation, alive, refused = Isolation(), [str(index) for index in range(count)], set()
    for _ in range(20 * count):
        if not killers & set(alive):
            break
        if isolation.is_over:
            ran = alive
        else:
            alone = isolation.next_of(alive)
            if alone is None:
                continue
            ran = [alone]
        if not killers & set(ran):
            isolation.has_passed(ran[0])
            continue
        innocent = [each for each in ran if each not in killers]
        grown = data.draw(st.lists(st.sampled_from(innocent), unique=True)) if innocent else []
        guilty = died(isolation, ran, grown=grown)
        if guilty is not None:
            alive.remove(guilty)
            refused.add(guilty)
    assert refused == killers


def test_when_one_of_those_that_never_had_a_token_is_found_the_others_are_believed_again() -> None:
    """They may have waited in the queue all the time."""
    isolation = Isolation()
    queued = [f"queued {number}" for number in range(100)]
    for _ in range(DEATHS_OF_ONE):
        died(isolation, ["a", "guilty", *queued], grown=["a"])
    assert isolation.next_of(["a", "guilty", *queued]) == "guilty"
    assert died(isolation, ["guilty"]) == "guilty"
    assert isolation.is_over
