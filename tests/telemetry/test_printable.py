from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.telemetry.printable import escaped, printable


@given(text=st.text())
def test_whatever_it_is_the_terminal_sees_nothing_but_printable_text(text: str) -> None:
    assert escaped(text).isprintable()
    assert printable(text, longest=10).isprintable()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb", r"a\nb"),
        ("\x1b[2Jx", r"\x1b[2Jx"),
        ("\u202eabc", r"\u202eabc"),
        ("grüße ☃", "grüße ☃"),
        ("\ud83d", r"\ud83d"),
    ],
)
def test_what_is_not_printable_is_written_out(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_the_end_of_a_long_text_is_left_out_and_said_so() -> None:
    assert printable("abcdef", longest=4) == "abcd… (2 more characters)"
