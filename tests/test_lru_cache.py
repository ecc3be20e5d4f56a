"""The cache agrees with a plain list that is ordered by use."""

from __future__ import annotations

import contextlib
import sys

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lru_cache import LruCache, bytes_of


@given(
    limit=st.integers(0, 12),
    steps=st.lists(
        st.tuples(st.sampled_from(["get", "put", "first"]), st.integers(0, 4), st.integers(0, 6)),
        max_size=40,
    ),
)
def test_the_least_recently_used_entries_are_forgotten(
    limit: int, steps: list[tuple[str, int, int]]
) -> None:
    cache: LruCache[int, int] = LruCache(limit)
    entries: dict[int, tuple[int, int]] = {}  # values and sizes, the most recently used last
    for number, (step, key, size) in enumerate(steps):
        known = entries.pop(key, None)
        if known is not None and step != "put":
            entries[key] = known
        elif step != "get" and size <= limit:
            entries[key] = number, size
        while sum(each for _, each in entries.values()) > limit:
            del entries[next(iter(entries))]
        if step == "get":
            assert cache.get(key) == (None if known is None else known[0])
        elif step == "put":
            cache.put(key, number, size=size)
        else:
            assert cache.get_or_put(key, number, size=size) == (
                number if known is None else known[0]
            )
        cache.check_invariants()
    assert cache.items() == [(key, value) for key, (value, _) in entries.items()]


def test_the_size_of_a_value_counts_each_object_once_and_its_encoded_texts() -> None:
    text = "x" * 1000
    assert bytes_of([text, {"key": (text,)}]) < 2 * bytes_of(text) < 2200
    for text in ("é" * 1000, "字" * 1000, "🙂" * 1000, "\ud800" * 1000):
        before = bytes_of(text)
        with contextlib.suppress(UnicodeEncodeError):
            msgspec.json.encode(text)  # Python keeps the encoded text
        assert sys.getsizeof(text) <= before == bytes_of(text)


def test_the_size_of_a_deeply_nested_value_is_known() -> None:
    value: object = "x"
    for _ in range(5000):
        value = [value]
    assert bytes_of(value) > 5000 * sys.getsizeof([None])
