"""Markers that are tokens become one character each, in answers and in the families' data."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.toolcalls.incoming import Markers, is_marker

MARKERS = Markers({"<think>": 7, "<thinking>": 8, "[ARGS]": 9})
texts = st.lists(
    st.sampled_from(["<think>", "<thinking>", "[ARGS]", "<thin", "k>", "a", "🙂"])
).map("".join)


@given(texts)
def test_an_encoded_text_can_be_decoded(text: str) -> None:
    encoded = MARKERS.encode(text)
    assert MARKERS.restore(encoded) == text
    assert not any(mark in encoded for mark in ("<think>", "<thinking>", "[ARGS]"))


def test_the_longer_of_two_overlapping_markers_wins() -> None:
    assert MARKERS.encode("<thinking>") == MARKERS.characters[8]
    assert (
        is_marker(MARKERS.encode("<think>ing>")) and not is_marker("<think>") and not is_marker("")
    )


@dataclass(frozen=True)
class Inner:
    mark: str


@dataclass(frozen=True)
class Form:
    pair: tuple[str, str]
    inner: Inner
    number: int = 3


def test_all_strings_of_a_dataclass_are_encoded() -> None:
    think, args = MARKERS.characters[7], MARKERS.characters[9]
    assert MARKERS.encoded(Form(("<think>\n", "x"), Inner("a[ARGS]"))) == Form(
        (think + "\n", "x"), Inner("a" + args)
    )
    assert MARKERS.encoded(None) is None


def test_without_markers_text_is_not_encoded() -> None:
    assert Markers({}).encode("<think>") == "<think>"
