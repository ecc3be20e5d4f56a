"""Schemas of strings become patterns that match the whole string."""

from __future__ import annotations

import re
from typing import Any

import pytest

from holdfast.front.structured.lark import content_of

_TEXTS = ("", "a", "b", "ab", "ba", "aab", "xay", "a\nb", "a|b", "^a", "a$", "12", "a/b", "[a]")


@pytest.mark.parametrize(
    "pattern",
    [
        "a",
        "^a",
        "a$",
        "^a$",
        "^a|b$",
        "^(a|b)+$",
        "[$^|]",
        r"\$",
        r"^\^a",
        "a|b",
        "a/b",
        r"^[^\]]+$",
        r"^[]a[]+$",
    ],
)
def test_a_pattern_matches_anywhere_unless_it_is_anchored(pattern: str) -> None:
    (found,), left_out = content_of({"type": "string", "pattern": pattern})
    assert left_out == ""
    for text in _TEXTS:
        assert bool(re.fullmatch(found, text)) == bool(re.search(pattern, text))


@pytest.mark.parametrize(
    "node", [{"pattern": "(^a)"}, {"pattern": "a$b"}, {"format": "duration"}, {"maxLength": 20_000}]
)
def test_keywords_that_no_pattern_expresses_are_reported(node: dict[str, Any]) -> None:
    assert content_of(node)[1] == next(iter(node))


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        (
            "date",
            ("2026-02-28", "2024-02-29", "1999-12-31"),
            ("2026-02-30", "2023-02-29", "2026-13-01", "2026-1-1"),
        ),
        ("time", ("23:59:59Z", "00:00:00.5+01:00"), ("24:00:00Z", "12:00")),
        ("date-time", ("2026-11-22T10:00:00Z",), ("2026-11-22 10:00",)),
        ("ipv4", ("127.0.0.1", "255.255.255.255"), ("256.0.0.1", "1.2.3")),
        ("email", ("a.b+c@example.org",), ("a@b", "@example.org", "a b@example.org")),
        ("uuid", ("123e4567-e89b-12d3-a456-426614174000",), ("123e4567",)),
        ("hostname", ("example.org", "a-b"), ("-a", "a..b")),
        ("uri", ("https://example.org/a?b=c#d",), ("example.org", "https://a b")),
    ],
)
def test_formats_accept_valid_values_only(
    name: str, right: tuple[str, ...], wrong: tuple[str, ...]
) -> None:
    (found,), _ = content_of({"type": "string", "format": name})
    assert all(re.fullmatch(found, text) for text in right)
    assert not any(re.fullmatch(found, text) for text in wrong)


def test_lengths_and_listed_values_become_patterns() -> None:
    found, _ = content_of({"minLength": 2, "maxLength": 3, "pattern": "a"})
    assert [
        all(re.fullmatch(each, text) for each in found)
        for text in ("a", "ab", "ba\n", "abcd", "bbb")
    ] == [*(False, True, True, False, False)]
    (values,), _ = content_of({"enum": ["a.b", "c|d", 3]})
    assert [bool(re.fullmatch(values, text)) for text in ("a.b", "axb", "c|d", "c", "3")] == [
        True,
        False,
        True,
        False,
        False,
    ]
