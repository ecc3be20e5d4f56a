"""The live state of one sequence, all layers together: it outlives the request that made it, and
goes over to the next one.

A state that nobody runs on is parked. Who goes on from its end takes it over as it is; who goes on
from its middle, or beside a sequence that still runs on it, shares the frozen beginning, or copies
it where a layer cannot be shared. Device thread only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import mlx.core as mx

from holdfast.worker.kv.layer import LayerState
from holdfast.worker.kv.snapshot import append_block, copy_block, fork

BaseUse: TypeAlias = Literal["moved", "shared", "copied"]


@dataclass(slots=True, eq=False)
class LiveState:
    """Layers, and how many tokens they have read (in steps under way too)."""

    layers: list[LayerState]
    tokens: int = 0

    def leaves(self) -> Iterator[LayerState]:
        """Composites taken apart."""
        for layer in self.layers:
            yield from layer.leaves()

    @property
    def can_share(self) -> bool:
        """Whether several sequences can hold the beginning of what grows at once."""
        return all(leaf.can_share for leaf in self.leaves() if leaf.grows)

    def can_rewind(self, tokens: int) -> bool:
        """Whether it can go back to its first `tokens` tokens without a checkpoint."""
        return all(leaf.can_rewind(self.tokens - tokens) for leaf in self.leaves())

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens. Only where it can go back so far."""
        for leaf in self.leaves():
            leaf.rewind(tokens)
        self.tokens -= tokens

    @property
    def frozen_tokens(self) -> int:
        """Tokens at its beginning that are in buffers which nobody writes any more, in every layer
        that grows.
        """
        return min((leaf.frozen_tokens for leaf in self.leaves() if leaf.grows), default=0)

    def freeze(self) -> None:
        """Write no more into what it holds, and give back what room is not used.

        Lazy: `evaluate` before it is waited for.
        """
        for leaf in self.leaves():
            leaf.freeze()
        mx.async_eval([array for leaf in self.leaves() for array in leaf.arrays()])  # type: ignore[no-untyped-call]

    def share_beginning(self, other: LiveState, tokens: int) -> None:
        """Hold the first tokens, which are the same, in the buffers of another state; both are
        parked. Lazy.
        """
        for own, others in zip(self.leaves(), other.leaves(), strict=True):
            if own.grows:
                own.share_beginning(others, tokens)
        mx.async_eval([array for leaf in self.leaves() for array in leaf.arrays()])  # type: ignore[no-untyped-call]

    def rest(self) -> None:
        """Nobody runs on it for now: let go of what only a step needed, and freeze the rest. Lazy."""
        for leaf in self.leaves():
            leaf.trim()
        self.freeze()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveBase:
    """A live state to begin from: its first `tokens` tokens.

    use: it is moved, since nobody else wants it any more; what is frozen of it is shared; or it is
    copied.
    """

    state: LiveState
    tokens: int
    use: BaseUse


def begin_from(base: LiveBase, fresh: list[LayerState], *, is_restored: bool) -> LiveState:
    """A state that holds the base's first tokens; fresh: empty layers of the same model. Lazy.

    What does not grow is right only in a state that was moved and could be rewound; else it is
    empty, to be restored, as it is also where it will be anyway (is_restored).
    """
    state, tokens = base.state, base.tokens
    match base.use:
        case "moved":
            return LiveState(_rewound(state, fresh, tokens=tokens, is_restored=is_restored), tokens)
        case "shared":
            if state.frozen_tokens < tokens:
                state.freeze()
            return LiveState(fork(state.layers, fresh, tokens=tokens), tokens)
        case "copied":
            append_block(fresh, copy_block(state.layers, start=0, tokens=tokens))
            return LiveState(fresh, tokens)


def _rewound(
    state: LiveState, fresh: list[LayerState], *, tokens: int, is_restored: bool
) -> list[LayerState]:
    """The same layers at an earlier token; fresh ones in the place of those that do not grow and
    cannot go back, or need not.
    """
    keeps_all = state.can_rewind(tokens) and not is_restored
    leaves = [
        old if old.grows or keeps_all else new
        for old, new in zip(state.leaves(), LiveState(fresh).leaves(), strict=True)
    ]
    for old, leaf in zip(state.leaves(), leaves, strict=True):
        if leaf is old:
            leaf.rewind(state.tokens - tokens)
    following = iter(leaves)
    return [layer.with_leaves(following) for layer in fresh]


def held_bytes(parked: Collection[LiveState], running: Collection[LiveState]) -> int:
    """Bytes of all that parked states hold, and of what is frozen in running ones; what several
    share counts once.
    """
    held = {
        id(array): array.nbytes
        for state in parked
        for leaf in state.leaves()
        for array in leaf.arrays()
    }
    for state in (*parked, *running):
        held |= {
            id(array): array.nbytes for leaf in state.leaves() for array in leaf.frozen_arrays()
        }
    return sum(held.values())
