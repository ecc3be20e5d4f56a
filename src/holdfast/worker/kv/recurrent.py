"""State arrays of layers without keys: convolution tails, state-space matrices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import mlx.core as mx

from holdfast.worker.kv.layer import ArrayForm, CheckpointLayout, LayerState, ShowStates, copied


class RecurrentState(LayerState):
    """The arrays of one layer, in numbered slots like those of mlx-lm's `ArraysCache`. A model reads
    and writes them through a `StateView`.

    After a step of several sequences, a slot may be a row of a stacked array. The next step of the
    same sequences uses the whole stack; rows are cut out only when the batch changes.
    """

    kind = "recurrent"
    can_return = True

    def __init__(self, slots: int) -> None:
        self._slots: list[mx.array | None] = [None] * slots
        # row within a stack; None if the slot is the whole array
        self._rows: list[int | None] = [None] * slots

    def __getitem__(self, index: int) -> mx.array | None:
        array = self._slots[index]
        row = self._rows[index]
        return array if array is None or row is None else array[row : row + 1]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._slots[index] = value
        self._rows[index] = None

    def __iter__(self) -> Iterator[mx.array | None]:
        return (self[index] for index in range(len(self._slots)))

    def stacked(self, index: int) -> tuple[mx.array | None, int | None]:
        """The array of a slot, and this sequence's row in it (None: the whole array)."""
        return self._slots[index], self._rows[index]

    def set_row(self, index: int, stack: mx.array, row: int) -> None:
        """Set a slot to one row of a stack that a step has computed for several sequences."""
        self._slots[index] = stack
        self._rows[index] = row

    def view(self, layers: Sequence[Self], *, for_kv: ShowStates, for_recurrent: ShowStates) -> Any:
        return for_recurrent(layers)

    # The lists are copied, but not the arrays: a step replaces arrays and never changes them.

    def saved(self) -> tuple[list[mx.array | None], list[int | None]]:
        return list(self._slots), list(self._rows)

    def return_to(self, saved: tuple[list[mx.array | None], list[int | None]]) -> None:
        slots, rows = saved
        self._slots, self._rows = list(slots), list(rows)

    def trim(self) -> None:
        """Copy all slots: a slot may be a view that keeps a chunk or a batch in memory."""
        for index, array in self._filled():
            self[index] = copied(array)

    def form(self) -> tuple[ArrayForm, ...]:
        return tuple(ArrayForm.of_array(array) for _, array in self._filled())

    def layout(self) -> CheckpointLayout:
        filled = tuple(index for index, _ in self._filled())
        return CheckpointLayout(self.kind, len(self._slots), filled)

    def copy_out(self, start: int, end: int) -> tuple[mx.array, ...]:
        """Every filled slot, [1, …].

        Copies are needed because a slot may be a row of a stack, or the end of a whole chunk's
        convolution input: without them, a snapshot of 1 KB kept 1 MB in memory (measured).
        """
        return tuple(copied(array) for _, array in self._filled())

    def restore(self, arrays: Iterator[mx.array], layout: CheckpointLayout, *, end: int) -> None:
        for index in layout.filled:
            self[index] = next(arrays)

    def arrays(self) -> Iterator[mx.array]:
        return (slot for slot in self._slots if slot is not None)

    def fixed_bytes(self) -> int:
        return sum(array.nbytes for _, array in self._filled())

    def _filled(self) -> Iterator[tuple[int, mx.array]]:
        """(index, array [1, …]) of every filled slot."""
        for index, array in enumerate(self):
            if array is not None:
                yield index, array
