"""A dictionary with a size limit, which forgets its least recently used entries."""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """A cache of values whose sizes together stay within a limit. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: K) -> V | None:
        """The value of a key; None if there is none. This call counts as a use of the key."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: K, value: V, *, size: int = 1) -> None:
        """Set a value. A value that is larger than the limit is not stored."""
        with self._lock:
            self._used -= self._entries.pop(key, (value, 0))[1]
            if size > self._limit:
                return
            self._entries[key] = value, size
            self._used += size
            while self._used > self._limit:
                self._used -= self._entries.popitem(last=False)[1][1]

    def get_or_put(self, key: K, value: V, *, size: int = 1) -> V:
        """Return the value that the key already has; if it has none, set and return this value."""
        with self._lock:
            present = self.get(key)
            if present is None:
                self.put(key, value, size=size)
            return value if present is None else present

    def items(self) -> list[tuple[K, V]]:
        """All keys and values, the least recently used first."""
        with self._lock:
            return [(key, value) for key, (value, _) in self._entries.items()]

    def check_invariants(self) -> None:
        """Assert that sizes are counted correctly and within the limit."""
        with self._lock:
            counted = sum(size for _, size in self._entries.values())
            assert self._used == counted, "sizes are miscounted"
            assert self._used <= self._limit, "the limit is exceeded"


def bytes_of(value: Any) -> int:
    """The memory of a value that consists of texts, numbers, lists, tuples and dictionaries.

    An object that it contains several times is counted once. The keys of dictionaries are not
    counted, because Python shares them.
    """
    size = 0
    counted_ids: set[int] = set()
    parts = [value]
    while parts:
        part = parts.pop()
        if id(part) in counted_ids:
            continue
        counted_ids.add(id(part))
        size += _bytes_of_text(part) if isinstance(part, str) else sys.getsizeof(part)
        if isinstance(part, dict):
            parts += part.values()
        elif isinstance(part, list | tuple):
            parts += part
    return size


def _bytes_of_text(text: str) -> int:
    """The memory of a text and of its UTF-8 form, which Python keeps once it was needed."""
    if text.isascii():
        return sys.getsizeof(text)
    characters = sys.getsizeof(f"{text} ")  # of a new object, which has no UTF-8 form yet
    return characters + len(text.encode("utf-8", "surrogatepass"))
