"""The cache agrees with a plain list that is ordered by use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.lru_cache import LruCache


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
            assert cache.first(key, number, size=size) == (number if known is None else known[0])
        cache.check_invariants()
    assert cache.items() == [(key, value) for key, (value, _) in entries.items()]
