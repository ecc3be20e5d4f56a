from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.events import FinishReason
from holdfast.worker.loop.sequences import Ending, LiveAnswer


def ending(
    generated: Sequence[int],
    *,
    stop_token_ids: Iterable[int],
    generated_before: int,
    max_tokens: int,
) -> Ending:
    return LiveAnswer(max_tokens, frozenset(stop_token_ids), [0] * generated_before).ending(
        generated
    )


tokens = st.lists(st.integers(0, 9), max_size=8)


def test_a_token_that_is_neither_last_nor_a_stop_continues() -> None:
    assert ending([5], stop_token_ids={2}, generated_before=0, max_tokens=2) == Ending(1, None)


def test_a_stop_token_counts_and_ends() -> None:
    assert ending([2], stop_token_ids={2}, generated_before=3, max_tokens=9) == Ending(
        1, FinishReason.STOP
    )


def test_the_last_allowed_token_ends_by_length() -> None:
    assert ending([5], stop_token_ids={2}, generated_before=8, max_tokens=9) == Ending(
        1, FinishReason.LENGTH
    )


def test_a_stop_token_in_the_last_place_is_a_stop() -> None:
    assert ending([2], stop_token_ids={2}, generated_before=8, max_tokens=9) == Ending(
        1, FinishReason.STOP
    )


def test_tokens_after_a_stop_token_are_dropped() -> None:
    assert ending([5, 2, 7, 2], stop_token_ids={2}, generated_before=0, max_tokens=9) == Ending(
        2, FinishReason.STOP
    )


def test_a_stop_token_beyond_the_allowed_length_is_ignored() -> None:
    assert ending([5, 6, 2], stop_token_ids={2}, generated_before=0, max_tokens=2) == Ending(
        2, FinishReason.LENGTH
    )


def test_a_limit_of_zero_counts_nothing() -> None:
    assert ending([5], stop_token_ids=frozenset(), generated_before=0, max_tokens=0) == Ending(
        0, FinishReason.LENGTH
    )
    assert ending([2], stop_token_ids={2}, generated_before=4, max_tokens=4) == Ending(
        0, FinishReason.LENGTH
    )


def test_an_empty_draw_continues() -> None:
    assert ending([], stop_token_ids={2}, generated_before=0, max_tokens=4) == Ending(0, None)


@given(
    generated=tokens,
    stops=st.frozensets(st.integers(0, 9), max_size=3),
    before=st.integers(0, 5),
    allowed=st.integers(1, 12),
)
def test_tokens_together_end_where_single_ones_would(
    generated: list[int], stops: frozenset[int], before: int, allowed: int
) -> None:
    counted, reason = 0, None
    for token_id in generated:
        one = ending(
            [token_id],
            stop_token_ids=stops,
            generated_before=before + counted,
            max_tokens=before + allowed,
        )
        counted += one.counted_tokens
        reason = one.reason
        if reason is not None:
            break
    assert ending(
        generated, stop_token_ids=stops, generated_before=before, max_tokens=before + allowed
    ) == Ending(counted, reason)
