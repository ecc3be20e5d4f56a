"""A chain of tokens as it is kept: the blocks along it. What a session holds on to. Pure.

Sessions' records in stores are made of these classes, field by field: that is why a step of a
branch is not simply a `Piece`.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.store.block import BlockKey
from holdfast.worker.prefix.tree import PrefixMatch

MOST_STATES = 3  # behind the last message, before the prompt's last token, at the end of the answer


@dataclass(frozen=True, slots=True)
class Step:
    """The first `tokens` tokens of a block; the last of them is the chain's token `end`, counted
    from 1.
    """

    key: BlockKey
    tokens: int
    end: int


@dataclass(frozen=True, slots=True)
class StateStep:
    """A state that has seen `position` tokens of the chain."""

    key: BlockKey
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """A chain as far as it was kept: its blocks from the first token on, and the last states on it,
    if there are any.

    More than one state, because a next turn may part from the chain before its end: where the last
    message of the prompt ends.
    """

    steps: tuple[Step, ...] = ()
    states: tuple[StateStep, ...] = ()  # the first of them first

    @property
    def tokens(self) -> int:
        """How long the chain is."""
        return self.steps[-1].end if self.steps else 0

    @property
    def keys(self) -> tuple[BlockKey, ...]:
        """Everything that the branch stands on, parents before children."""
        blocks = tuple(step.key for step in self.steps)
        return (*blocks, *(state.key for state in self.states))

    def goes_on_from(self, other: Branch) -> bool:
        """Whether this chain begins with the whole of another one."""
        if not other.steps:
            return True
        if (
            len(self.steps) < len(other.steps)
            or self.steps[: len(other.steps) - 1] != other.steps[:-1]
        ):
            return False
        mine, last = self.steps[len(other.steps) - 1], other.steps[-1]
        return mine.key == last.key and mine.tokens >= last.tokens


def branch_of(match: PrefixMatch) -> Branch:
    """The branch that a match has found."""
    states = tuple(StateStep(each.key, each.start) for each in match.checkpoints[-MOST_STATES:])
    steps = tuple(Step(piece.key, piece.offset + piece.tokens, piece.end) for piece in match.pieces)
    return Branch(steps=steps, states=states)
