"""Several kinds in one layer: pairs of KV, KV beside a recurrent state, MLA latents with their
index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from holdfast.worker.kv.layer import LayerState, ShowStates


class Composite(LayerState):
    """A layer made of parts. What is kept of it is kept of its leaves, each for itself."""

    kind = "composite"

    def __init__(self, parts: tuple[LayerState, ...]) -> None:
        self.parts = parts

    def leaves(self) -> Iterator[LayerState]:
        """Those of all parts, in order."""
        for part in self.parts:
            yield from part.leaves()

    def with_leaves(self, leaves: Iterator[LayerState]) -> LayerState:
        """Each part with its own ones of them."""
        return Composite(tuple(part.with_leaves(leaves) for part in self.parts))

    def freeze(self) -> None:
        """Every part."""
        for part in self.parts:
            part.freeze()

    def view(self, states: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """Indexable by part, as mlx-lm's `CacheList`."""
        parts = zip(*(state.parts for state in states), strict=True)
        return tuple(
            same[0].view(same, for_kv=for_kv, for_recurrent=for_recurrent) for same in parts
        )

    def reserve(self, tokens: int) -> None:
        """In every part."""
        for part in self.parts:
            part.reserve(tokens)

    def trim(self) -> None:
        """Every part."""
        for part in self.parts:
            part.trim()

    def can_rewind(self, tokens: int) -> bool:
        """If every part can."""
        return all(part.can_rewind(tokens) for part in self.parts)

    def rewind(self, tokens: int) -> None:
        """Every part."""
        super().rewind(tokens)
        for part in self.parts:
            part.rewind(tokens)

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of all parts."""
        for part in self.parts:
            yield from part.arrays()

    def bytes_per_token(self) -> int:
        """Sum over the parts."""
        return sum(part.bytes_per_token() for part in self.parts)

    def fixed_bytes(self) -> int:
        """Sum over the parts."""
        return sum(part.fixed_bytes() for part in self.parts)
