"""Stop strings are found across parts and never shown; only a possible stop string is withheld."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.answers.stops import StopScanner

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
        assert not scanner.held or any(
            stop.startswith(scanner.held) and stop != scanner.held for stop in stops
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


def test_text_after_a_stop_string_is_dropped() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("text EN") == "text "
    assert (scanner.push("D and more"), scanner.found is not None) == ("", True)
    assert scanner.push("more") == ""
    assert scanner.flush() == ""


def test_an_unfinished_stop_string_is_shown_late_but_completely() -> None:
    scanner = StopScanner(["\n\nUser:"])
    assert scanner.push("Hello\n\nUs") == "Hello"
    assert scanner.push("ually") == "\n\nUsually"
