"""Drafts without a model: what followed the last tokens when they occurred before, in the prompt, in
the answer, or in another text.

Answers often repeat parts of their prompt: edits repeat the file, tool calls repeat names and
paths, later turns repeat facts. A `SuffixDrafter` finds an earlier place whose preceding tokens are
the last tokens of the sequence, and drafts the tokens that follow that place. While they are
right, it continues from there, without a search. Otherwise it looks up the places of the last
two tokens, and takes the one that agrees with the most tokens before them (the longest match).

Every new token also shows whether it would have been drafted. So the chance that a drafted token is
right is measured all the time, by the length of the match, even while no draft is used.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

from holdfast.wire.requests import TokenIds
from holdfast.worker.engine.plan import NO_DRAFT, Draft

MOST_DRAFTED = 8  # tokens per draft
_LEAST_CHANCE = 0.05  # of a token to be drafted
_LONGEST_MATCH = 32  # longer ones are not measured
_MOST_PLACES = 16  # the latest places of the last two tokens that are compared
_MOST_INDEXED = 2048  # tokens of the prompt that are indexed together, in less than a millisecond
_LONG_MATCH = 8  # after this many right tokens, one wrong token is taken for a replaced one
_SEPARATOR = -1  # between two texts; image keys (`wire/images.py`) are negative here, too
# A guess of how often a drafted token is right, by the size of its match (`_size_class`), and how many
# measured tokens it counts for.
_FIRST_RATES = (0.3, 0.3, 0.35, 0.5, 0.65, 0.8, 0.9)
_PRIOR_TOKENS = 4.0
_SEQUENCE_MEMORY_TOKENS = 32.0
_MODEL_MEMORY_TOKENS = 512.0

NO_TOKENS = TokenIds()


class DraftRates:
    """How often drafted tokens are right, by the size of the match that they come from.

    The latest tokens count most.

    rates: for each size, the chance that a token is right.
    """

    __slots__ = ("_first_rates", "_hits", "_memory_tokens", "_prior", "_tokens", "rates")

    def __init__(
        self, prior: DraftRates | None = None, *, first_rates: Sequence[float] = _FIRST_RATES
    ) -> None:
        """prior: the rates of the whole model, which a sequence starts from, and which learn with
        it; None: these are the rates of a model. first_rates: those before any token is measured.
        """
        self._prior = prior
        self._first_rates = first_rates
        self._memory_tokens = _MODEL_MEMORY_TOKENS if prior is None else _SEQUENCE_MEMORY_TOKENS
        self._tokens = [0.0] * len(_FIRST_RATES)
        self._hits = [0.0] * len(_FIRST_RATES)
        self.rates: list[float] = list(first_rates if prior is None else prior.rates)

    def learn(self, size_class: int, *, is_right: bool) -> None:
        """Learn from one token that was drafted, or that would have been."""
        prior_rate = self._first_rates[size_class]
        if self._prior is not None:
            self._prior.learn(size_class, is_right=is_right)
            prior_rate = self._prior.rates[size_class]
        if self._tokens[size_class] >= self._memory_tokens:
            self._tokens[size_class] /= 2
            self._hits[size_class] /= 2
        self._tokens[size_class] += 1
        self._hits[size_class] += is_right
        self.rates[size_class] = (self._hits[size_class] + _PRIOR_TOKENS * prior_rate) / (
            self._tokens[size_class] + _PRIOR_TOKENS
        )

    def chance(self, matched: int) -> float:
        """The chance that a token is right after a match of this many tokens."""
        return self.rates[_size_class(matched)]

    def learn_match(self, matched: int, *, is_right: bool) -> None:
        """Learn whether the token that followed a match of `matched` tokens was right."""
        self.learn(_size_class(matched), is_right=is_right)


def _size_class(matched: int) -> int:
    """The size of a match: 0, 1, 2 to 3, 4 to 7, 8 to 15, 16 to 31 or more tokens."""
    return min(matched.bit_length(), len(_FIRST_RATES) - 1)


class SuffixDrafter:
    """Drafts the next tokens of one sequence."""

    def __init__(
        self,
        prompt: TokenIds,
        *,
        rates: DraftRates | None = None,
        others: Iterable[TokenIds] = (),
        expected: TokenIds = NO_TOKENS,
    ) -> None:
        """rates: those of the model. others: further texts that the answer may repeat, the likeliest
        last. expected: what the client expects the answer to be; empty: nothing is expected.
        """
        self._rates = DraftRates(DraftRates() if rates is None else rates)
        # the other texts, each with a separator, and then the sequence from `_sequence_start` on; a
        # place is an index into this array
        self._tokens = array("i")
        expected_start = 0
        for text in (*others, expected):
            if text:
                expected_start = len(self._tokens)
                self._tokens.frombytes(text.packed)
                self._tokens.append(_SEPARATOR)
        self._sequence_start = len(self._tokens)
        self._tokens.frombytes(prompt.packed)
        # The places after each pair of tokens (two tokens in one number): the latest one, and for
        # each place, the one before it of the same pair (0: none). The length of `_earlier` is one
        # more than the number of indexed tokens.
        self._latest: dict[int, int] = {}
        self._earlier = array("i", (0, 0))
        # where the drafted tokens begin (always at an existing token; None: nothing matches), and how
        # many tokens before that place agree with the last ones of the sequence
        self._draft_start: int | None = expected_start if expected else None
        self._match_length = _LONGEST_MATCH // 2 if expected else 0

    def __len__(self) -> int:
        """The number of tokens of the sequence."""
        return len(self._tokens) - self._sequence_start

    def extend(self, token_ids: Sequence[int]) -> None:
        """Add the next tokens of the sequence. Indexes some tokens of a long prompt, too."""
        if len(self._earlier) <= len(self._tokens):
            self._index(_MOST_INDEXED)
        for token_id in token_ids:
            self._add(token_id)

    def _add(self, token_id: int) -> None:
        """Add a token, learn whether it would have been drafted, and find where the next draft
        begins.
        """
        tokens = self._tokens
        draft_start = self._draft_start
        after_replaced_token = None
        if draft_start is not None:
            is_right = tokens[draft_start] == token_id
            self._rates.learn(_size_class(self._match_length), is_right=is_right)
            if is_right:
                self._draft_start = draft_start + 1
                self._match_length += 1
            else:
                self._draft_start = None
                # after a long match, the sequence may go on as before with one other token
                if self._match_length >= _LONG_MATCH:
                    after_replaced_token = draft_start + 1
        tokens.append(token_id)
        # search before indexing the new token: otherwise, the search would find the end of the sequence
        if self._draft_start is None and len(tokens) > 1:
            self._search(self._latest.get(tokens[-2] << 32 | token_id, 0))
            if self._draft_start is None and after_replaced_token is not None:
                self._draft_start = after_replaced_token
                self._match_length = 0
        self._index(1)

    def _index(self, most_tokens: int) -> None:
        """Index the next tokens, so that `_search` finds the places after them."""
        tokens = self._tokens
        latest = self._latest
        earlier = self._earlier
        indexed_end = len(earlier) - 1
        for end in range(indexed_end + 1, min(indexed_end + most_tokens, len(tokens)) + 1):
            pair = tokens[end - 2] << 32 | tokens[end - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = end

    def _search(self, place: int) -> None:
        """Continue at the place with the longest match, among the latest ones of a pair."""
        longest = 0
        for _ in range(_MOST_PLACES):
            if not place or longest == _LONGEST_MATCH:
                return
            length = self._match_before(place)
            if length > longest:
                longest = self._match_length = length
                self._draft_start = place
            place = self._earlier[place]

    def _match_before(self, place: int) -> int:
        """How many tokens before a place are the last ones of the sequence, up to a limit."""
        tokens = self._tokens
        end = len(tokens)
        most_tokens = min(place, _LONGEST_MATCH)
        length = 2  # the places of a pair agree in two tokens
        while length < most_tokens and tokens[place - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length

    def draft(self, most_tokens: int = MOST_DRAFTED) -> Draft:
        """The tokens that are expected next, at most `most_tokens`; none if nothing matches."""
        draft_start = self._draft_start
        if draft_start is None:
            return NO_DRAFT
        drafted = self._tokens[draft_start : draft_start + most_tokens].tolist()
        if min(drafted) < 0:
            drafted = list(itertools.takewhile(lambda token_id: token_id >= 0, drafted))
        elif draft_start + most_tokens > len(self._tokens):
            # a text that repeats itself continues as it began
            drafted = (drafted * most_tokens)[:most_tokens]
        rates = self._rates.rates
        chances: list[float] = []
        chance = 1.0
        for matched in range(self._match_length, self._match_length + len(drafted)):
            chance *= rates[_size_class(matched)]
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return Draft(tuple(drafted[: len(chances)]), tuple(chances))
