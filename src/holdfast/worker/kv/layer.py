"""What can be asked of the live state of one sequence in one layer, whatever its kind.

A kind is one file and a line in `kinds`.

A live object belongs to one sequence. What it has frozen others may hold too; what it writes is its
own. Device thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self, TypeAlias

import mlx.core as mx

from holdfast.worker.kv import buffers
from holdfast.worker.kv.form import CheckpointLayout, KeptForm

ShowStates: TypeAlias = Callable[[Sequence[Any]], Any]  # how a layout shows the states of one kind


class SnapshotMismatch(Exception):
    """A snapshot does not fit the model's layers: a miss, with the reason as message."""


class LayerState(ABC):
    """Live state of one sequence in one layer.

    kind: under this name a checkpoint of it is kept.
    grows: keys and values of every token are there, so any span of them can be copied out; else
        there is one checkpoint, of now.
    is_foreign: only mlx-lm understands it; it can be neither batched nor kept.
    window: how many tokens a query sees at most, its own included; None: all, or the layer does not
        attend.
    can_share: what is frozen of it can be held by several running sequences at once (`fork`). A
        runner may set it to False: then
        only parked states share.
    """

    kind: str
    grows: bool = False
    is_foreign: bool = False
    window: int | None = None
    can_share: bool = False

    @property
    def frozen_tokens(self) -> int:
        """How many of the first tokens are frozen."""
        return 0

    def frozen_arrays(self) -> Iterator[mx.array]:
        """The arrays of the state that are never written again, and that other sequences may hold
        too.
        """
        return iter(())

    def freeze(self) -> None:  # noqa: B027 - most kinds share nothing
        """Never write again what is held, and give unused room back; the next tokens go into a
        buffer of their own. Lazy.

        Does nothing to a kind that has nothing to share.
        """

    def fork(self, tokens: int) -> Self:
        """The live state of another sequence with the first `tokens` tokens of this one, in the
        same buffers; copies nothing.

        Only where `can_share`, and tokens ≤ frozen_tokens. Nothing is reserved in it.
        """
        raise TypeError(f"{type(self).__name__} cannot be held by several sequences")

    def share_beginning(self, other: LayerState, tokens: int) -> None:
        """Hold the first tokens in the buffers of another state that has frozen the same ones.

        Only where the layer grows.
        """
        raise TypeError(f"{type(self).__name__} cannot be held by several sequences")

    @abstractmethod
    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, to be evaluated with a step."""

    @abstractmethod
    def view(self, states: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """What a model sees in one forward pass of this layer's states of several sequences, self
        among them; all of this kind.

        for_kv, for_recurrent: for `LayerKV`s and `RecurrentState`s. Raises TypeError for a foreign
        kind.
        """

    def form(self) -> tuple[KeptForm, ...]:
        """What each array that `copy_out` gives looks like. After the first token."""
        raise SnapshotMismatch(f"{type(self).__name__} has no snapshot form")

    def layout(self) -> CheckpointLayout:
        """Which arrays a checkpoint of it has, where that is not always the same."""
        return CheckpointLayout(self.kind, 0, ())

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Lazy copies of what is kept, with buffers of their own.

        Where the layer grows: of tokens start to end, tokens on axis 2. Else the checkpoint after
        token `end`, the last one.
        """
        raise SnapshotMismatch(f"{type(self).__name__} has no snapshot form")

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Take what `copy_out` gave from the front of `arrays`; then the layer is where it was
        copied, at token `end`. Lazy.

        A layer that grows takes one span after the other, others begin afresh. Raises
        SnapshotMismatch.
        """
        raise SnapshotMismatch(f"{type(self).__name__} has no snapshot form")

    def leaves(self) -> Iterator[LayerState]:
        """The state itself, or the parts that it is made of."""
        yield self

    def with_leaves(self, leaves: Iterator[LayerState]) -> LayerState:
        """The same with the next of these leaves in the place of its own."""
        return next(leaves)

    def reserve(self, tokens: int) -> None:  # noqa: B027 - most kinds have nothing to reserve
        """Make room for this many tokens in all, if that pays; never shrinks."""

    def trim(self) -> None:  # noqa: B027 - or to let go of
        """Let go of what only the last forward pass needed, once it is laid out."""

    def can_rewind(self, tokens: int) -> bool:
        """Whether the last `tokens` tokens can be dropped.

        Where they cannot, only a checkpoint leads back.
        """
        return tokens == 0

    def rewind(self, tokens: int) -> None:
        """Drop the last `tokens` tokens, as if they had never been read.

        Only where `can_rewind(tokens)`.
        """
        assert self.can_rewind(tokens), f"{type(self).__name__} cannot drop {tokens} tokens"

    def bytes_per_token(self) -> int:
        """Bytes that one more token takes; 0 before the first one."""
        return 0

    def fixed_bytes(self) -> int:
        """Bytes that do not grow with the sequence."""
        return 0


class LayerKV(LayerState):
    """A kind that holds keys and values, [1, kv_heads, tokens, head_dim], rotary already applied,
    and so can be attended to.

    Here they are stored as `kv.buffers` has it, with the last token at `_end`; a kind may keep them
    otherwise. Updates write in place as long as nobody else holds the buffer: callers must not keep
    the arrays that `last` returns.
    """

    def __init__(self) -> None:
        self.tokens = 0  # read so far
        self._end = 0  # used part of the buffers
        self._buffers: tuple[mx.array, ...] = ()  # stored, once there are some

    @abstractmethod
    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add the keys and values of the next tokens."""

    def append_stored(self, both: mx.array) -> None:
        """The same of keys and values that look alike, [1, 2 * kv_heads, tokens, head_dim], the
        heads of the keys first.
        """
        self.append(*buffers.pair_of([both]))

    def held(self) -> int:
        """How many of the last tokens can be attended to."""
        return self._end

    def last(self, count: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the last `count` tokens, oldest first. count ≤ held()."""
        return buffers.pair_of(self._buffers, start=self._end - count, end=self._end)

    def parts(self, count: int) -> tuple[tuple[mx.array, mx.array], ...]:
        """The same, one pair for each buffer that has some of them; copies nothing."""
        return (self.last(count),)

    def view(self, states: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """As the layout shows keys and values."""
        return for_kv(states)

    def rewind(self, tokens: int) -> None:
        """What comes next is written over them."""
        super().rewind(tokens)
        self.tokens -= tokens
        self._end -= tokens

    def arrays(self) -> Iterator[mx.array]:
        """The buffers."""
        return iter(self._buffers)

    def _write(self, new: Sequence[mx.array]) -> None:
        """Into buffers that have room. new: stored or a pair."""
        tokens = new[0].shape[2]
        buffers.write(self._buffers, new, start=self._end)
        self.tokens += tokens
        self._end += tokens
