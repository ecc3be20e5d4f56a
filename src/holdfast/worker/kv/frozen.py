"""Buffers that are never written again, so that several sequences can hold them at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet

import mlx.core as mx

from holdfast.worker.kv import buffers


class PartHolder(Protocol):
    """Who holds the first tokens of a part."""

    def held_of(self, part: FrozenPart) -> int:
        """How many of its tokens."""

    def take_merged(self, parts: Sequence[FrozenPart], merged: FrozenPart) -> None:
        """One part stands for these from now on; it holds as many tokens of it as of them."""


class FrozenPart:
    """Keys and values of a run of tokens.

    Each holder has the first of them, as many as it says; none writes them any more.

    A holder that is gone counts no more, so nobody has to say that it goes.
    """

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        """arrays: keys and values, as `kv.buffers` stores them."""
        self.arrays = tuple(arrays)
        self.holders: WeakSet[PartHolder] = WeakSet()
        self._first: tuple[mx.array, mx.array] | None = None  # that were asked for last

    def first(self, tokens: int) -> tuple[mx.array, mx.array]:
        """Keys and values of the first tokens.

        Every step asks for the same ones, so that they are cut once.
        """
        if self._first is None or self._first[0].shape[2] != tokens:
            self._first = buffers.pair_of(self.arrays, end=tokens)
        return self._first

    @property
    def capacity(self) -> int:
        """Tokens that there is room for."""
        return self.arrays[0].shape[2]

    @property
    def unused(self) -> int:
        """Tokens that there is room for and that no holder has."""
        return self.capacity - self._used

    def give_back(self) -> None:
        """Copy what is held to buffers of exactly its size, for all holders; lazy."""
        used = self._used
        self.arrays = tuple(buffers.copied(array[:, :, :used]) for array in self.arrays)
        self._first = None

    @property
    def _used(self) -> int:
        return max((holder.held_of(self) for holder in self.holders), default=0)
