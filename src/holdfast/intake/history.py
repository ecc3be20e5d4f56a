"""Answers that come back in the next turn, as the tokens that were generated.

A model may write a text in other tokens than a tokenizer cuts it into. Tokenized anew, the next turn would part from what is
in memory at the first of them, and the rest of the conversation would be read again. So such answers are remembered by text,
and put back in place of the tokenizer's tokens where the whole conversation was tokenized.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.messages import ChoiceFinished, OutputEvent, TextDelta


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A text's tokens and where each stands: (first character, character behind it)."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Said:
    """The text of one message. Of all roles, so that an answer is looked for behind what was said before it."""

    text: str
    is_answer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryStatistics:
    """What is remembered, and counters since the start."""

    answers: int
    tokens: int
    spliced: int


class AnswerHistory:
    """Generated tokens of answers that tokenize differently, by tenant and text; the oldest go first.

    Written on the loop's thread; read there, or on a thread that tokenizes a long conversation.
    """

    def __init__(self, *, most_tokens: int = 1_000_000) -> None:
        self._most_tokens = most_tokens
        self._answers: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._tokens = self._spliced = 0

    def remember(self, text: str, token_ids: Sequence[int], *, canonical: Sequence[int], tenant: str = "") -> None:
        """Keep an answer's tokens, unless they are what the tokenizer gives anyway (`canonical`)."""
        key = tenant, text
        self._forget(key)
        if not text or list(token_ids) == list(canonical) or len(token_ids) > self._most_tokens:
            return
        self._answers[key] = tuple(token_ids)
        self._tokens += len(token_ids)
        while self._tokens > self._most_tokens:
            self._forget(next(iter(self._answers)))

    def knows_any(self, messages: Sequence[Said], *, tenant: str = "") -> bool:
        """Whether `splice` could find anything to do, so that offsets are worth asking for."""
        return any(said.is_answer and (tenant, said.text) in self._answers for said in messages)

    def splice(self, text: str, tokenized: Tokenized, messages: Sequence[Said], *, tenant: str = "") -> list[int]:
        """The tokens of a rendered conversation with remembered answers put back. messages: in order of appearance.

        An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens stay.
        """
        parts: list[int] = []
        taken = 0  # tokens of the whole that are in `parts` or replaced
        character = 0
        for said in messages:
            found = text.find(said.text, character)
            if found < 0:
                continue
            character = found + len(said.text)
            generated = self._answers.get((tenant, said.text)) if said.is_answer else None
            span = _token_span(tokenized.offsets, found, character) if generated is not None else None
            if generated is None or span is None:
                continue
            parts += tokenized.token_ids[taken : span[0]]
            parts += generated
            taken = span[1]
            self._spliced += 1
        return parts + tokenized.token_ids[taken:]

    def statistics(self) -> HistoryStatistics:
        """A snapshot."""
        return HistoryStatistics(answers=len(self._answers), tokens=self._tokens, spliced=self._spliced)

    def check_invariants(self) -> None:
        """Assert that the tokens are counted rightly and within their bound."""
        assert self._tokens == sum(map(len, self._answers.values())), "tokens are miscounted"
        assert self._tokens <= self._most_tokens, "more is remembered than may be"

    def _forget(self, key: tuple[str, str]) -> None:
        self._tokens -= len(self._answers.pop(key, ()))


class TwoWays(Protocol):
    """A tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of token ids."""
        ...


class AnswerNotes:
    """Collects the answers of one chat while they are streamed, and hands each to the history when it ends."""

    def __init__(self, history: AnswerHistory, tokenizer: TwoWays, *, tenant: str) -> None:
        self._history, self._tokenizer, self._tenant = history, tokenizer, tenant
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[int]] = {}

    def see(self, event: OutputEvent) -> None:
        """Take in what the client is told."""
        if isinstance(event, TextDelta):
            self._texts.setdefault(event.index, []).append(event.text)
            self._tokens.setdefault(event.index, []).extend(event.token_ids)
        elif isinstance(event, ChoiceFinished) and event.index in self._texts:
            self._remember("".join(self._texts.pop(event.index)), self._tokens.pop(event.index))

    def _remember(self, text: str, token_ids: list[int]) -> None:
        """Unless the tokens say more than the text: hidden ones, or one that a stop string cut."""
        if self._tokenizer.decode(token_ids, skip_special_tokens=False) == text:
            canonical = self._tokenizer.encode(text, add_special_tokens=False)
            self._history.remember(text, token_ids, canonical=canonical, tenant=self._tenant)


def _token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Which tokens make up the characters from start to end exactly; None when one of them reaches over an edge."""
    first = bisect_left(offsets, start, key=lambda offset: offset[0])
    last = bisect_left(offsets, end, key=lambda offset: offset[0])
    if first >= last or offsets[first][0] != start or offsets[last - 1][1] != end:
        return None
    if first > 0 and offsets[first - 1][1] > start:
        return None
    return first, last
