"""Stop strings are found across parts and never shown; only a possible stop string is withheld."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.stops import (
    LEAST_ROUNDS,
    RepetitionGuard,
    StopScanner,
    VisibleStops,
    is_periodic,
)
from holdfast.front.output import TextDelta, TextKind, ToolCallFinished

few_letters = st.text(alphabet="ab\n", min_size=1, max_size=5)
stop_lists = st.lists(few_letters, min_size=1, max_size=4)
part_lists = st.lists(st.text(alphabet="ab\nc", max_size=6), max_size=12)


def expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """`str.find` on the whole: the first complete stop string, the longest of several."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(found)[1]], True) if found else (text, False)


@given(part_lists, stop_lists)
def test_any_division_shows_the_same_text(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = "".join(scanner.push(part) for part in parts)
    is_stopped = scanner.found is not None
    assert (shown + scanner.flush(), is_stopped) == expected("".join(parts), stops)


@given(part_lists, stop_lists)
def test_only_a_possible_stop_string_is_withheld(parts: list[str], stops: list[str]) -> None:
    scanner = StopScanner(stops)
    for part in parts:
        scanner.push(part)
        if scanner.found is not None:
            break
        assert not scanner.held_back or any(
            stop.startswith(scanner.held_back) and stop != scanner.held_back for stop in stops
        )


@given(part_lists, stop_lists)
def test_a_possible_stop_string_is_never_shown(parts: list[str], stops: list[str]) -> None:
    scanner, text, shown = StopScanner(stops), "", ""
    for part in parts:
        text, shown = text + part, shown + scanner.push(part)
        if scanner.found is not None:
            break
        beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
        longest = max(
            (len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0
        )
        assert shown == text[: len(text) - longest]


TOKENS = 128


def fired_at(token_ids: list[int], *, pieces: int = 1, tokens: int = TOKENS) -> int | None:
    """The number of tokens after which the guard reports repetition; None: never."""
    guard = RepetitionGuard(tokens)
    for begin in range(0, len(token_ids), pieces):
        if guard.push(token_ids[begin : begin + pieces]):
            return min(begin + pieces, len(token_ids))
    return None


def repeats_somewhere(token_ids: list[int]) -> bool:
    """Whether any TOKENS consecutive tokens are repetitions of one piece, by definition."""
    for begin in range(len(token_ids) - TOKENS + 1):
        window = token_ids[begin : begin + TOKENS]
        for period in range(1, TOKENS // LEAST_ROUNDS + 1):
            if all(window[place] == window[place - period] for place in range(period, TOKENS)):
                return True
    return False


@given(
    before=st.lists(st.integers(0, 3), max_size=200),
    piece=st.lists(st.integers(0, 3), min_size=1, max_size=TOKENS // LEAST_ROUNDS),
    pieces=st.integers(1, 5),
)
def test_repetition_is_detected_soon_after_the_minimum(
    before: list[int], piece: list[int], pieces: int
) -> None:
    rounds = piece * (2 * TOKENS // len(piece) + 2)
    at = fired_at([*before, *rounds], pieces=pieces)
    assert at is not None
    assert at <= len(before) + TOKENS + 64 + pieces


@given(
    parts=st.lists(
        st.one_of(
            st.lists(st.integers(0, 2), max_size=30),
            st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.integers(2, 12)).map(
                lambda it: it[0] * it[1]
            ),
        ),
        max_size=8,
    ),
    pieces=st.integers(1, 5),
)
def test_too_short_repetitions_are_ignored(parts: list[list[int]], pieces: int) -> None:
    token_ids = [token_id for part in parts for token_id in part]
    if fired_at(token_ids, pieces=pieces) is not None:
        assert repeats_somewhere(token_ids)


def test_one_different_token_restarts_the_count() -> None:
    rounds = [1, 2, 3] * (TOKENS // 3 - 1)
    assert fired_at([*rounds, 9, *rounds, 9, *rounds, 9, *rounds]) is None


def test_zeros_and_counted_lists_are_not_repetition_by_default() -> None:
    grid = ([5, 6] * 30 + [7]) * 30
    assert fired_at(grid, tokens=2048) is None
    counted = [token_id for number in range(2000) for token_id in (1, 2, 3, 1000 + number, 4)]
    assert fired_at(counted, tokens=2048) is None


def test_random_tokens_never_repeat() -> None:
    dice = random.Random(3)
    assert fired_at([dice.randrange(3) for _ in range(20_000)], pieces=7) is None


def test_a_guard_set_to_zero_is_off() -> None:
    assert fired_at([1] * 1000, tokens=0) is None


@pytest.mark.parametrize(
    ("token_ids", "longest", "expected"),
    [
        ([], 4, False),
        ([1], 4, False),
        ([1, 1], 1, True),
        ([1, 2, 1, 2, 1], 2, True),
        ([1, 2, 1, 2, 1], 1, False),
        ([1, 2, 3, 1, 2], 3, True),
        ([1, 2, 3, 1, 3], 3, False),
    ],
)
def test_the_last_period_may_be_incomplete(
    token_ids: list[int], longest: int, expected: bool
) -> None:
    assert is_periodic(token_ids, longest_period=longest) is expected


# A stop string is found in visible text, with its position in the answer.

pieces = st.lists(
    st.tuples(
        st.sampled_from(["text", "text", "reasoning"]),
        st.sampled_from(["s", "st", "stop", "top", "a", "p"]),
    )
)


@given(pieces)
def test_visible_text_is_cut_where_the_stop_string_begins(
    parts: list[tuple[TextKind, str]],
) -> None:
    answer, visible, shown, place = "", "", "", 0
    stops, cut = VisibleStops(["stop"]), None
    for kind, text in parts:
        given_now = [*stops.scan(TextDelta(kind=kind, text=text, start=place))]
        place += len(text)
        visible = visible + text if kind == "text" else ""
        answer += text
        if cut is None and "stop" in visible:
            cut = place - len(visible) + visible.index("stop")
        shown += "".join(part.text for part in given_now if isinstance(part, TextDelta))
        assert stops.found_at == cut
        if cut is not None:
            assert shown == answer[:cut]
            return
        held = 0 if stops.held_back_from is None else place - stops.held_back_from
        assert shown == answer[: len(answer) - held] and "stop".startswith(
            answer[len(answer) - held :]
        )
    shown += "".join(part.text for part in stops.flush())
    assert shown == answer


def test_a_part_that_is_not_text_flushes_withheld_text() -> None:
    stops = VisibleStops(["stop"])
    assert [*stops.scan(TextDelta(text="a st"))] == [TextDelta(text="a ")]
    call = ToolCallFinished()
    assert [*stops.scan(call)] == [TextDelta(text="st", start=2), call]
    assert [*stops.scan(TextDelta(text="op", start=9))] == [TextDelta(text="op", start=9)]
