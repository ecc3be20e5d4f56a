from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.telemetry.request_log import escaped, printable


@given(text=st.text())
def test_any_text_becomes_printable(text: str) -> None:
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
def test_unprintable_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown


def test_a_long_text_is_cut_with_a_note() -> None:
    assert printable("abcdef", longest=4) == "abcd… (2 more characters)"
