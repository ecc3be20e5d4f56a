"""Drafts without a model: what followed the last tokens when they occurred before.

Answers often repeat parts of their prompt: edits repeat the file, tool calls repeat names and
paths, later turns repeat facts. A `SuffixDrafter` finds an earlier place whose preceding tokens are
the last tokens of the sequence, and drafts the tokens that follow that place. As long as they are
right, it goes on from there, and nothing is searched. Otherwise it looks up the places of the last
two tokens, and takes the one that agrees with the most tokens before them.

Every new token also shows whether it would have been drafted. So the chance that a drafted token is
right is measured all the time, by the length of the match, even while no draft is used.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

TokenArray: TypeAlias = npt.NDArray[np.int32]

MOST_DRAFTED = 8  # tokens per draft
_LONGEST_MATCH = 32  # longer ones are not measured
_MOST_PLACES = 16  # the latest places of the last two tokens that are compared
_LONG_MATCH = 8  # after this many right tokens, one wrong token is taken for a replaced one
_SEPARATOR = -1  # between two texts; no token has this id
# A guess of how often a drafted token is right, by the size of its match (`_size`), and how many
# measured tokens it counts for.
_FIRST_RATES = (0.3, 0.3, 0.35, 0.5, 0.65, 0.8, 0.9)
_PRIOR_TOKENS = 4.0
_SEQUENCE_MEMORY = 32.0
_MODEL_MEMORY = 512.0


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may follow a sequence.

    chances: for each token, the chance that it and all tokens before it are right.
    """

    token_ids: tuple[int, ...] = ()
    chances: tuple[float, ...] = ()


NO_DRAFT = Draft()


class DraftRates:
    """How often drafted tokens are right, by the size of the match that they come from.

    The latest tokens count most.
    """

    __slots__ = ("_hits", "_memory", "_prior", "_tokens")

    def __init__(self, prior: DraftRates | None = None) -> None:
        """prior: the rates of the whole model, which a sequence starts from, and which learn with
        it; None: these are the rates of a model.
        """
        self._prior = prior
        self._memory = _MODEL_MEMORY if prior is None else _SEQUENCE_MEMORY
        self._tokens = [0.0] * len(_FIRST_RATES)
        self._hits = [0.0] * len(_FIRST_RATES)

    def rate(self, size: int) -> float:
        """The chance that a token drafted from a match of this size is right."""
        first = _FIRST_RATES[size] if self._prior is None else self._prior.rate(size)
        return (self._hits[size] + _PRIOR_TOKENS * first) / (self._tokens[size] + _PRIOR_TOKENS)

    def learn(self, size: int, *, is_right: bool) -> None:
        """Learn from one token that was drafted, or that would have been."""
        if self._tokens[size] >= self._memory:
            self._tokens[size] /= 2
            self._hits[size] /= 2
        self._tokens[size] += 1
        self._hits[size] += is_right
        if self._prior is not None:
            self._prior.learn(size, is_right=is_right)


def _size(matched: int) -> int:
    """The size of a match: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 or more tokens."""
    return min(matched.bit_length(), len(_FIRST_RATES) - 1)


class SuffixDrafter:
    """Drafts the next tokens of one sequence from its own earlier tokens."""

    def __init__(
        self,
        token_ids: TokenArray,
        *,
        rates: DraftRates | None = None,
        expected: TokenArray | None = None,
    ) -> None:
        """token_ids: the prompt. expected: what the client expects the answer to be. rates: those of
        the model.
        """
        self._rates = DraftRates(DraftRates() if rates is None else rates)
        has_expected = expected is not None and expected.size > 0
        self._sequence_start = 0
        if expected is not None and has_expected:
            token_ids = np.concatenate([expected, [_SEPARATOR], token_ids])
            self._sequence_start = len(expected) + 1
        self._tokens = array("i", np.ascontiguousarray(token_ids, np.int32).tobytes())
        self._places = _Places(token_ids)
        # of pairs of tokens, the places after those that are not in `_places`, oldest first
        self._later: dict[tuple[int, int], list[int]] = {}
        self._next: int | None = 0 if has_expected else None  # where the drafted tokens begin
        self._matched = _LONGEST_MATCH // 2 if has_expected else 0

    def __len__(self) -> int:
        """The number of tokens of the sequence."""
        return len(self._tokens) - self._sequence_start

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the sequence."""
        for token_id in token_ids:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        tokens = self._tokens
        at = self._next
        replaced = None
        if at is not None:
            is_right = tokens[at] == token_id
            self._rates.learn(_size(self._matched), is_right=is_right)
            if is_right:
                self._next = at + 1
                self._matched += 1
            else:
                self._next = None
                if self._matched >= _LONG_MATCH:
                    replaced = at + 1
        tokens.append(token_id)
        if len(tokens) < 2:
            return
        pair = (tokens[-2], token_id)
        if self._next is None:
            self._search(pair)
            if self._next is None and replaced is not None and replaced < len(tokens):
                self._next = replaced
                self._matched = 0
        self._later.setdefault(pair, []).append(len(tokens))

    def _search(self, pair: tuple[int, int]) -> None:
        longest = 0
        for places in (self._later.get(pair, ())[-_MOST_PLACES:], self._places.after(pair)):
            for place in reversed(places):
                length = self._common(place)
                if length > longest:
                    longest = length
                    self._next = place
                    self._matched = length

    def _common(self, place: int) -> int:
        """How many tokens before a place are the last ones of the sequence, up to a limit."""
        tokens = self._tokens
        end = len(tokens)
        most = min(place, _LONGEST_MATCH)
        length = 2
        while length < most and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def draft(self, most: int = MOST_DRAFTED) -> Draft:
        """The tokens that are expected next, at most `most`; none if nothing matches."""
        at = self._next
        if at is None:
            return NO_DRAFT
        tokens = self._tokens
        drafted: list[int] = []
        chances: list[float] = []
        chance = 1.0
        for index in range(most):
            # a text that repeats itself goes on with what was drafted
            token_id = (
                tokens[at + index]
                if at + index < len(tokens)
                else drafted[at + index - len(tokens)]
            )
            if token_id == _SEPARATOR:
                break
            chance *= self._rates.rate(_size(self._matched + index))
            drafted.append(token_id)
            chances.append(chance)
        return Draft(tuple(drafted), tuple(chances))


class _Places:
    """Where each pair of adjacent tokens of a text occurs, as sorted arrays: a tenth of a dict's
    memory and time.
    """

    def __init__(self, token_ids: TokenArray) -> None:
        pairs = token_ids[:-1].astype(np.int64) << 32 | token_ids[1:]
        order = np.argsort(pairs, kind="stable")
        self._pairs = pairs[order]
        self._ends = (order + 2).astype(np.int32)

    def after(self, pair: tuple[int, int]) -> list[int]:
        """The latest places after this pair, oldest first."""
        wanted = np.int64(pair[0] << 32 | pair[1])
        end = int(np.searchsorted(self._pairs, wanted, side="right"))
        start = int(np.searchsorted(self._pairs, wanted, side="left"))
        latest: list[int] = self._ends[max(start, end - _MOST_PLACES) : end].tolist()
        return latest
