"""A promise that something stays in RAM."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType

from holdfast.prefix.eviction import EvictionOrder
from holdfast.store.block import BlockKey


class Hold:
    """Keeps keys from leaving until it is released: once, by hand or at a context's end."""

    def __init__(self, order: EvictionOrder, keys: Iterable[BlockKey]) -> None:
        self._order = order
        self._keys = tuple(keys)
        order.hold(self._keys)

    def release(self) -> None:
        """Let them go. A second call does nothing."""
        keys, self._keys = self._keys, ()
        self._order.release(keys)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()
