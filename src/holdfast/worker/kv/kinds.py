"""Maps the cache classes of mlx-lm to kinds of live state, and defines the two kinds that only
combine or wrap others: `Composite` and `ForeignState`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import Layer, LayerState, ShowStates
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import ChunkKV, WindowKV


class Composite(Layer):
    """Several states in one layer: two KV states, KV and a recurrent state, or MLA and its index."""

    def __init__(self, parts: tuple[Layer, ...]) -> None:
        self.parts = parts

    def leaves(self) -> Iterator[LayerState]:
        for part in self.parts:
            yield from part.leaves()

    def with_leaves(self, leaves: Iterator[LayerState]) -> Layer:
        return Composite(tuple(part.with_leaves(leaves) for part in self.parts))

    def view(self, layers: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """A tuple of the views of all parts, as the model's `CacheList` has them."""
        parts = zip(*(layer.parts for layer in layers), strict=True)
        return tuple(
            states[0].view(states, for_kv=for_kv, for_recurrent=for_recurrent) for states in parts
        )


class ForeignState(LayerState):
    """A cache object of mlx-lm that no other kind supports. Only the layout `solo` can use it."""

    kind = "foreign"
    is_foreign = True

    def __init__(self, cache: Any) -> None:
        self.cache = cache

    def view(self, layers: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """mlx-lm's cache object, for one sequence. Raises TypeError for several sequences."""
        if len(layers) > 1:
            raise TypeError(f"{type(self.cache).__name__} cannot be laid out for several sequences")
        return self.cache

    def arrays(self) -> Iterator[mx.array]:
        return _arrays_in(self.cache.state)

    def bytes_per_token(self) -> int:
        """Bytes per token in the caches that keep every token; windows and other states do not count."""
        return sum(
            _bytes_per_token(part)
            for part in _simple_caches(self.cache)
            if not _window_tokens(part)
        )

    def fixed_bytes(self) -> int:
        """Bytes of windows at their largest size, and of states that do not depend on tokens."""
        total = 0
        for part in _simple_caches(self.cache):
            if not _bytes_per_token(part):
                total += sum(array.nbytes for array in _arrays_in(part.state))
            else:
                total += _bytes_per_token(part) * _window_tokens(part)
        return total


def _simple_caches(cache: Any) -> Iterator[Any]:
    """Yield an mlx-lm cache, or the caches that it is composed of (`CacheList`)."""
    parts = getattr(cache, "caches", None)
    if parts is None:
        yield cache
        return
    for part in parts:
        yield from _simple_caches(part)


def _bytes_per_token(cache: Any) -> int:
    """Bytes of keys and values per position of the buffers; 0 for a cache without them."""
    buffers = [getattr(cache, name, None) for name in ("keys", "values")]
    arrays = [buffer for buffer in buffers if isinstance(buffer, mx.array)]
    return sum(array.nbytes // max(1, array.shape[2]) for array in arrays)


def _window_tokens(cache: Any) -> int:
    """How many tokens a cache keeps at most; 0: every token."""
    size = getattr(cache, "max_size", None)
    return size if isinstance(size, int) else 0


def _arrays_in(state: Any) -> Iterator[mx.array]:
    """Yield the arrays in nested lists and tuples; other values are skipped."""
    if isinstance(state, mx.array):
        yield state
    elif isinstance(state, list | tuple):
        for part in state:
            yield from _arrays_in(part)


# By class name, so that mlx-lm is not imported here. Other code may add its own kinds.
KINDS: dict[str, Callable[[Any], Layer]] = {
    "KVCache": lambda cache: FullKV(),
    "RotatingKVCache": lambda cache: (
        ForeignState(cache) if cache.keep else WindowKV(cache.max_size)
    ),
    "ChunkedKVCache": lambda cache: ChunkKV(cache.chunk_size),
    "ArraysCache": lambda cache: RecurrentState(len(cache.cache)),
    "MambaCache": lambda cache: RecurrentState(len(cache.cache)),
    "CacheList": lambda cache: Composite(tuple(map(fresh_layer, cache.caches))),
}


def fresh_layer(cache: Any) -> Layer:
    """Create the empty layer that replaces a new cache object of mlx-lm."""
    return KINDS.get(type(cache).__name__, ForeignState)(cache)
