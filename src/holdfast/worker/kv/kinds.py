"""Which kind stands for which of mlx-lm's cache objects: a line per kind.

Other code may register kinds of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.worker.kv.composite import Composite
from holdfast.worker.kv.foreign import ForeignState
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.layer import LayerState
from holdfast.worker.kv.recurrent import RecurrentState
from holdfast.worker.kv.window import WindowKV

# By class name, so that nothing of mlx-lm is imported here.
_KINDS: dict[str, Callable[[Any], LayerState]] = {
    "KVCache": lambda cache: FullKV(),
    "RotatingKVCache": lambda cache: (
        ForeignState(cache) if cache.keep else WindowKV(cache.max_size)
    ),
    "ArraysCache": lambda cache: RecurrentState(len(cache.cache)),
    "MambaCache": lambda cache: RecurrentState(len(cache.cache)),
    "CacheList": lambda cache: Composite(tuple(map(fresh_layer, cache.caches))),
}


def register_kind(cache_class: str, make: Callable[[Any], LayerState]) -> None:
    """From now on `make(cache)` gives the empty state that stands for cache objects of this class
    name.
    """
    _KINDS[cache_class] = make


def fresh_layer(cache: Any) -> LayerState:
    """The empty state that stands for one of mlx-lm's cache objects (as `make_prompt_cache` gives
    them).
    """
    return _KINDS.get(type(cache).__name__, ForeignState)(cache)
