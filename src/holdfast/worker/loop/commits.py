"""Committing to the cache what sequences have computed: what a step was told to keep, and the rest
when one ends.

The rest is copied out when a sequence is closed and computed with the next step; it is committed
when that has come out right.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.worker.loop.parts import Cache, StepEngine
from holdfast.worker.loop.sequences import LiveSequence

if TYPE_CHECKING:
    from holdfast.worker.engine.sequence import Kept


@dataclass(frozen=True, slots=True)
class _Rest:
    """What was copied out of a sequence that was closed."""

    sequence: LiveSequence
    kept: Kept
    for_good: bool


class Commits:
    """What is on its way from the engine into the cache.

    Device thread only; may raise what engine and cache raise.
    """

    def __init__(
        self,
        cache: Cache,
        engine: StepEngine[Any],
        *,
        on_progress: Callable[[LiveSequence, int], None],
        on_end: Callable[[LiveSequence], None],
    ) -> None:
        """`on_progress`: the first so many tokens of a sequence are in the cache.

        `on_end`: nothing more comes of it.
        """
        self._cache, self._engine = cache, engine
        self._on_progress, self._on_end = on_progress, on_end
        self._computing: list[_Rest] = []  # since the last step was dispatched
        self._computed: list[_Rest] = []

    @property
    def has_work(self) -> bool:
        """Whether something that was copied out is not committed yet."""
        return bool(self._computing or self._computed)

    def is_computing_for(self, sequences: Container[LiveSequence]) -> bool:
        """Whether the rest of one of these is still being computed."""
        return any(rest.sequence in sequences for rest in self._computing)

    def copy_rest(self, sequence: LiveSequence, *, for_good: bool) -> None:
        """Copy out the rest of an open sequence that is about to be closed, `for_good` unless it is
        only preempted.
        """
        rest = self._engine.keep_rest(sequence.request.request_id)
        if rest is not None:
            self._computing.append(_Rest(sequence, rest, for_good))
        if rest is None or not for_good:
            self.leave(sequence)
        if rest is None and for_good:
            self._on_end(sequence)

    def discard(self, sequences: Container[LiveSequence]) -> None:
        """Commit nothing more of what was copied out of these."""
        discarded = [
            rest.sequence
            for rest in (*self._computing, *self._computed)
            if rest.sequence in sequences
        ]
        self._computing = [rest for rest in self._computing if rest.sequence not in sequences]
        self._computed = [rest for rest in self._computed if rest.sequence not in sequences]
        with ExitStack() as leaving:  # all of them do, whatever one of them raises
            for sequence in discarded:
                leaving.callback(self.leave, sequence)

    def leave(self, sequence: LiveSequence) -> None:
        """The chain of a sequence is live no more, if it was."""
        live, sequence.live = sequence.live, None
        if live is not None:
            self._cache.live.leave(live)

    def commit_step(self, kept: Sequence[Kept], sequences: tuple[LiveSequence, ...]) -> None:
        """A step was collected: commit what it has made of these sequences, and the rests copied
        out before its dispatch.
        """
        by_id = {sequence.request.request_id: sequence for sequence in sequences}
        for each in kept:
            if each.request_id in by_id:
                self._commit(by_id[each.request_id], each)
        self._commit_computed()
        self._computed, self._computing = self._computing, []

    def flush(self) -> None:
        """Commit everything that was copied out; waits for the device."""
        self.commit_step((), ())
        self._commit_computed()

    def _commit_computed(self) -> None:
        """What one sequence raises leaves the others for the next time."""
        while self._computed:
            rest = self._computed.pop(0)
            sequence = rest.sequence
            try:
                self._commit(sequence, rest.kept)
            except BaseException:
                self.leave(sequence)
                raise
            if rest.for_good and sequence.live is not None and rest.kept.is_finite:
                live, sequence.live = sequence.live, None
                self._cache.live.park(live, bytes(sequence.chain))
            self.leave(sequence)
            if rest.for_good:
                self._on_end(sequence)

    def _commit(self, sequence: LiveSequence, kept: Kept) -> None:
        assert sequence.cursor is not None, "committed before it was opened"
        sequence.handed_over += self._cache.insert(
            sequence.cursor, sequence.chain, kept, live=sequence.live
        )
        if kept.blocks:
            self._on_progress(sequence, kept.blocks[-1].start + kept.blocks[-1].tokens)
