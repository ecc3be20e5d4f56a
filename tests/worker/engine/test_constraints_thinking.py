"""The thinking budget: how long a model may think, and the tokens that are then forced."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.commands import ThinkingBudget
from holdfast.worker.engine.constraints import ThoughtMeter

START, END = (90, 91), (80, 81, 82)


def a_meter(
    tokens: int, *, start: tuple[int, ...] = (), end: tuple[int, ...] = END
) -> ThoughtMeter:
    return ThoughtMeter(ThinkingBudget(tokens=tokens, start_token_ids=start, end_token_ids=end))


def answer(meter: ThoughtMeter, wishes: list[int]) -> list[int]:
    """The output of a model that wants these tokens and gets each unless another one is forced."""
    drawn = []
    for wish in wishes:
        drawn.append(meter.forced_tokens[0] if meter.forced_tokens else wish)
        meter.add(drawn[-1])
    return drawn


def test_a_thought_ends_at_its_budget_and_the_answer_continues() -> None:
    assert answer(a_meter(3), [1, 2, 3, 4, 5, 6, 7, 8]) == [1, 2, 3, *END, 7, 8]


def test_a_budget_of_zero_prevents_the_thought() -> None:
    assert answer(a_meter(0), [1, 2, 3, 4]) == [*END, 4]


def test_tokens_before_the_opening_do_not_count() -> None:
    assert answer(a_meter(2, start=START), [1, 2, 3, *START, 4, 5, 6, 6, 6, 7]) == [
        1,
        2,
        3,
        *START,
        4,
        5,
        *END,
        7,
    ]


def test_a_thought_that_ends_by_itself_is_left_alone() -> None:
    wishes = [1, 2, *END, 3, 4, 5, 6, 7]
    assert answer(a_meter(5), wishes) == wishes


def test_an_end_that_the_model_has_begun_is_only_completed() -> None:
    assert answer(a_meter(3), [1, 2, 80, 5, 6, 7]) == [1, 2, 80, 81, 82, 7]


def test_all_thoughts_of_an_answer_have_one_budget() -> None:
    wishes = [*START, 1, 2, *END, 3, *START, 4, 4, 4, 4]
    assert answer(a_meter(5, start=START), wishes) == [*START, 1, 2, *END, 3, *START, *END, 4]


def test_without_a_marker_the_budget_is_ignored() -> None:
    assert answer(a_meter(1, end=()), [1, 2, 3]) == [1, 2, 3]


@given(
    st.lists(st.sampled_from([1, 80, 81, 82, 90, 91]), max_size=40),
    st.integers(0, 12),
    st.sampled_from([(), (90,), START]),
    st.sampled_from([(80,), END, (80, 80, 81)]),
)
def test_thoughts_are_unchanged_within_the_budget_and_never_longer(
    wishes: list[int], tokens: int, start: tuple[int, ...], end: tuple[int, ...]
) -> None:
    drawn = answer(a_meter(tokens, start=start, end=end), wishes)
    thinks, used, since = not start, 0, 0
    for at, token in enumerate(drawn):
        used += thinks
        if token != wishes[at]:
            assert thinks
            assert used > tokens
            assert token in end
        since += 1
        marker = end if thinks else start
        if (
            marker
            and since >= len(marker)
            and tuple(drawn[at + 1 - len(marker) : at + 1]) == marker
        ):
            thinks, since = not thinks, 0
        if start == () and at + 1 >= tokens + len(end):
            assert not thinks, "the thought goes on behind its budget"
