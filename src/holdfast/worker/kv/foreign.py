"""Live state that only mlx-lm understands, and what can be told of its size from outside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from holdfast.worker.kv.layer import LayerState, ShowStates


class ForeignState(LayerState):
    """mlx-lm's own cache object of a kind that has no class here; only the `solo` layout can use
    it. It grows by itself.
    """

    kind = "foreign"
    is_foreign = True

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def view(self, states: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """mlx-lm's object, for one sequence. Raises TypeError for several."""
        if len(states) > 1:
            raise TypeError(f"{type(self.cache).__name__} of several sequences cannot be laid out")
        return self.cache

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""
        yield from _arrays_within(self.cache.state)

    def bytes_per_token(self) -> int:
        """Bytes per token of what grows, as far as it can be told from outside: keys and values
        without a largest size.
        """
        return sum(
            _bytes_per_token(part) for part in _parts_of(self.cache) if not _largest_size(part)
        )

    def fixed_bytes(self) -> int:
        """Bytes of windows at their largest size, and of states without tokens."""
        return sum(
            _bytes_per_token(part) * _largest_size(part)
            if _bytes_per_token(part)
            else _bytes_within(part)
            for part in _parts_of(self.cache)
            if _largest_size(part) or not _bytes_per_token(part)
        )


def _parts_of(cache: Any) -> Iterator[Any]:
    for part in getattr(cache, "caches", (cache,)):
        if part is cache:
            yield part
        else:
            yield from _parts_of(part)


def _bytes_per_token(cache: Any) -> int:
    buffers = [getattr(cache, name, None) for name in ("keys", "values")]
    return sum(
        buffer.nbytes // max(1, buffer.shape[2])
        for buffer in buffers
        if isinstance(buffer, mx.array)
    )


def _largest_size(cache: Any) -> int:
    size = getattr(cache, "max_size", None)
    return size if isinstance(size, int) else 0


def _bytes_within(cache: Any) -> int:
    return sum(array.nbytes for array in _arrays_within(cache.state))


def _arrays_within(state: Any) -> Iterator[mx.array]:
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _arrays_within(part)
