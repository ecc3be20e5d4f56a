"""Answers that come back in the next turn, as the tokens that were generated.

A model may write a text in other tokens than a tokenizer cuts it into. Tokenized anew, the next turn would part from what is
in memory at the first of them, and the rest of the conversation would be read again. So such answers are remembered by text,
and put back in place of the tokenizer's tokens where the whole conversation was tokenized.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.messages.output import ChoiceFinished, OutputEvent, TextDelta


@dataclass(frozen=True, slots=True)
class Tokenized:
    """A text's tokens and where each stands: (first character, character behind it)."""

    token_ids: list[int]
    offsets: list[tuple[int, int]]

    def tokens_before(self, character: int) -> int:
        """Tokens that end at or before a character."""
        return bisect_right(self.offsets, character, key=lambda offset: offset[1])


@dataclass(frozen=True, slots=True)
class Spliced:
    """Tokens with answers put back, and by how much the tokens behind each are further on: (from this one, so far)."""

    token_ids: list[int]
    moves: list[tuple[int, int]]

    def place(self, token: int) -> int:
        """Where a token is that is no part of an answer that was put back."""
        behind = bisect_right(self.moves, token, key=lambda move: move[0])
        return token + (self.moves[behind - 1][1] if behind else 0)


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
    dropped_tokens: int


class AnswerHistory:
    """Generated tokens of answers that tokenize differently, by tenant and text; the oldest go first.

    Any thread may call any method.
    """

    def __init__(self, *, most_tokens: int = 1_000_000, most_told: int = 10_000) -> None:
        self._most_tokens, self._most_told = most_tokens, most_told
        self._answers: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._tokens = self._spliced = self._dropped_tokens = 0
        self._told: OrderedDict[tuple[str, bytes], int] = OrderedDict()  # all answers: how many tokens
        self._lock = threading.Lock()

    def remember(self, text: str, token_ids: Sequence[int], *, canonical: Sequence[int], tenant: str = "") -> None:
        """Keep an answer's tokens, unless they are what the tokenizer gives anyway (`canonical`)."""
        key = tenant, text
        with self._lock:
            self._told[_told_key(tenant, text)] = len(token_ids)
            while len(self._told) > self._most_told:
                self._told.popitem(last=False)
        is_of_use = bool(text) and list(token_ids) != list(canonical) and len(token_ids) <= self._most_tokens
        with self._lock:
            self._forget(key)
            if not is_of_use:
                return
            self._answers[key] = tuple(token_ids)
            self._tokens += len(token_ids)
            while self._tokens > self._most_tokens:
                self._forget(next(iter(self._answers)))

    def knows_any(self, messages: Sequence[Said], *, tenant: str = "") -> bool:
        """Whether `splice` could find anything to do, so that offsets are worth asking for."""
        return any(said.is_answer and (tenant, said.text) in self._answers for said in messages)

    def splice(self, text: str, tokenized: Tokenized, messages: Sequence[Said], *, tenant: str = "") -> Spliced:
        """The tokens of a rendered conversation with remembered answers put back. messages: in order of appearance.

        An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens stay.
        """
        parts: list[int] = []
        moves: list[tuple[int, int]] = []
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
            moves.append((taken, len(parts) - taken))
            with self._lock:
                self._spliced += 1
        return Spliced(parts + tokenized.token_ids[taken:], moves)

    def dropped(self, text: str, messages: Sequence[Said], *, tenant: str = "") -> int:
        """Tokens of remembered answers that a conversation has but its rendered text has not: the template left a part out.

        What was written behind the beginning of such an answer has to be read again. Each answer counts once.
        """
        tokens, character = 0, 0
        for said in messages:
            found = text.find(said.text.strip(), character)
            if found >= 0:
                character = found + len(said.text.strip())
            elif said.is_answer:
                with self._lock:
                    tokens += self._told.pop(_told_key(tenant, said.text), 0)
        with self._lock:
            self._dropped_tokens += tokens
        return tokens

    def statistics(self) -> HistoryStatistics:
        """A snapshot."""
        return HistoryStatistics(
            answers=len(self._answers), tokens=self._tokens, spliced=self._spliced, dropped_tokens=self._dropped_tokens
        )

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


def _told_key(tenant: str, text: str) -> tuple[str, bytes]:
    return tenant, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
