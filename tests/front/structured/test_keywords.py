"""The cost of patterns and schemas is known before a grammar is built."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.front.structured.keywords import alternatives, pattern_fault, repetitions


@pytest.mark.parametrize(
    ("pattern", "characters"),
    [
        ("abc", 3),
        ("a{5}", 5),
        ("a{2,7}b", 8),
        ("a{3,}", 3),
        ("(ab){10}", 20),
        ("((a{10}){10}){10}", 1000),
        ("[a-z]{4}-[^]]{4}", 9),
        (r"\{5}\[{3}", 6),
        (r"\p{Lu}{6}", 6),
        ("(a|b)*c+", 3),
    ],
)
def test_nested_repetitions_multiply(pattern: str, characters: int) -> None:
    assert repetitions(pattern) == characters


def test_repetitions_in_sequence_do_not_multiply() -> None:
    assert pattern_fault("^[a-z]{1,200}-[a-z]{1,200}$") == ""
    assert pattern_fault("([a-z]{1,200}-){1,200}")
    assert pattern_fault("x" * 3000)


@pytest.mark.parametrize(
    ("node", "found"),
    [
        (True, 1),
        ({"type": "string"}, 1),
        ({"anyOf": [{}, {}, {"oneOf": [{}, {}]}]}, 4),
        ({"allOf": [{"anyOf": [{}, {}]}, {"anyOf": [{}, {}, {}]}]}, 6),
        ({"properties": {"a": {"anyOf": [{}, {}]}}}, 1),
    ],
)
def test_branches_multiply_under_all_of(node: Any, found: int) -> None:
    assert alternatives(node) == found
