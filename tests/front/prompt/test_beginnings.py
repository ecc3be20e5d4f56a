"""The remembered text that begins most like a new one is found, within a limit and a tenant."""

from __future__ import annotations

import os.path

from hypothesis import given
from hypothesis import strategies as st

from holdfast.front.prompt.beginnings import Beginnings, common_length

LONG = "a long text, " * 500


def keep(known: Beginnings[str, str], text: str, value: str = "", *, tenant: str = "") -> None:
    after, shared = known.closest(text, tenant=tenant)
    known.remember(text, value, size=len(text), tenant=tenant, after=after, shared=shared)
    known.check_invariants()


@given(start=st.text("ab", max_size=20), ends=st.tuples(*[st.text("ab", max_size=20)] * 2))
def test_the_common_length_is_that_of_the_common_prefix(start: str, ends: tuple[str, str]) -> None:
    for times in (1, 700):
        one, other = (start * times + end * times for end in ends)
        prefix = os.path.commonprefix([one, other])  # noqa: RUF071 - compares characters
        assert common_length(one, other) == len(prefix)
        assert common_length(one.encode(), other.encode()) == len(prefix)


def test_the_text_with_the_longest_common_beginning_is_found() -> None:
    known: Beginnings[str, str] = Beginnings(1 << 20)
    for middle in ("one", "two", "three"):
        keep(known, f"{LONG}{middle}{LONG}", middle)
    found, shared = known.closest(f"{LONG}two{LONG[:100]} more {LONG}", tenant="")
    assert found is not None
    assert (found.value, shared) == ("two", len(LONG) + 103)
    assert known.closest(f"Other {LONG}", tenant="") == (None, 0)


def test_a_next_turn_replaces_the_earlier_one() -> None:
    known: Beginnings[str, str] = Beginnings(1 << 20)
    text = LONG
    for number in range(5):
        keep(known, f"{text}<answer:", str(number))
        text += f"<user: {number} {LONG}"
    assert [each.value for each in known.items()] == ["4"]
    keep(known, f"{LONG}another conversation {LONG}")
    assert len(known.items()) == 2


def test_tenants_do_not_find_each_others_texts() -> None:
    known: Beginnings[str, str] = Beginnings(1 << 20)
    keep(known, LONG, "a", tenant="a")
    assert known.closest(LONG, tenant="b") == (None, 0)
    assert known.same(LONG, tenant="b") is None
    keep(known, LONG, "b", tenant="b")
    assert [each.value for each in known.items()] == ["a", "b"]


def test_only_a_bounded_number_of_long_texts_is_remembered() -> None:
    known: Beginnings[str, str] = Beginnings(1 << 20)
    keep(known, "short")
    assert known.items() == []
    for number in range(100):
        keep(known, f"{number} {LONG}")
    assert len(known.items()) == 64
    nothing: Beginnings[str, str] = Beginnings(0)
    keep(nothing, LONG)
    assert nothing.items() == []
