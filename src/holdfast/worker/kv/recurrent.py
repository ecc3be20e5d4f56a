"""State arrays of layers that have no keys: convolution tails, state-space matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from holdfast.worker.kv import buffers
from holdfast.worker.kv.form import ArrayForm, CheckpointLayout
from holdfast.worker.kv.layer import LayerState, ShowStates


class RecurrentState(LayerState):
    """Slots for arrays. Speaks mlx-lm's `ArraysCache`.

    After a step over several sequences a slot may be a row of a stacked array; the next step over
    the same sequences takes the stack as it is, and only a change of the batch cuts the row out.
    There is no way back by tokens, only by a checkpoint.
    """

    kind = "recurrent"
    lengths = None
    left_padding = None

    def __init__(self, slots: int) -> None:
        self._slots: list[mx.array | None] = [None] * slots
        # row within a stack, None when the slot is the array itself
        self._rows: list[int | None] = [None] * slots

    def __getitem__(self, index: int) -> mx.array | None:
        array, row = self._slots[index], self._rows[index]
        return array if array is None or row is None else array[row : row + 1]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._slots[index], self._rows[index] = value, None

    def __iter__(self) -> Iterator[mx.array | None]:
        return (self[index] for index in range(len(self._slots)))

    def stacked(self, index: int) -> tuple[mx.array | None, int | None]:
        """The slot as it is kept: an array and the row in it (None: the whole array is this
        sequence's).
        """
        return self._slots[index], self._rows[index]

    def set_row(self, index: int, stack: mx.array, row: int) -> None:
        """Keep the slot as a row of a stack that the step has computed."""
        self._slots[index], self._rows[index] = stack, row

    def make_mask(self, tokens: int) -> None:
        """No padding, no mask."""

    def advance(self, tokens: int) -> None:
        """Nothing to count: there is no padding."""

    def view(self, states: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        """As the layout shows recurrent states."""
        return for_recurrent(states)

    def trim(self) -> None:
        """Let go of the chunk that was read last, and of the batch: a slot may be a view of it."""
        for index, array in self._filled():
            self[index] = buffers.copied(array)

    def form(self) -> tuple[ArrayForm, ...]:
        """The arrays of the filled slots."""
        return tuple(buffers.array_form(array) for _, array in self._filled())

    def layout(self) -> CheckpointLayout:
        """How many slots there are and which are filled."""
        return CheckpointLayout(
            self.kind, len(self._slots), tuple(index for index, _ in self._filled())
        )

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Every filled slot, [1, …].

        A slot may be a row of a stack that other sequences are in, or the end of a whole chunk's
        convolution input: measured, a snapshot of 1 KB that held on to 1 MB.
        """
        return tuple(buffers.copied(array) for _, array in self._filled())

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        """Fill the slots that were filled."""
        for index in layout.filled:
            self[index] = next(arrays)

    def arrays(self) -> Iterator[mx.array]:
        """All arrays of the state, stacks as they are."""
        return (slot for slot in self._slots if slot is not None)

    def fixed_bytes(self) -> int:
        """Bytes of this sequence's state."""
        return sum(array.nbytes for _, array in self._filled())

    def _filled(self) -> Iterator[tuple[int, mx.array]]:
        """(index, array [1, …]) of every filled slot."""
        return (
            (index, array)
            for index in range(len(self._slots))
            if (array := self[index]) is not None
        )
