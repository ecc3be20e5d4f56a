"""Answers that come back in the next turn, as the tokens that were generated.

A model may write a text in other tokens than a tokenizer cuts it into. Tokenized anew, the next turn would part from what is
in memory at the first of them, and the rest of the conversation would be read again. So such answers are remembered by text,
and put back in place of the tokenizer's tokens where the whole conversation was tokenized.
"""

from __future__ import annotations

import hashlib
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tokenizers import Encoding

from holdfast.intake.prompt import PromptText, PromptTokens
from holdfast.intake.tokenize import Tokenizer
from holdfast.messages.output import ChoiceFinished, OutputEvent, TextDelta

Observe: TypeAlias = Callable[[OutputEvent], None]


class KnownAnswers:
    """Generated tokens of answers that tokenize differently, by tenant and text; the oldest go first.

    Any thread may call any method.
    """

    def __init__(self, *, most_tokens: int = 1_000_000, most_counted: int = 10_000) -> None:
        self.put_back_answers = self.dropped_tokens = 0  # since the start
        self._most_tokens, self._most_counted = most_tokens, most_counted
        self._answers: OrderedDict[tuple[str, str], tuple[int, ...]] = OrderedDict()
        self._tokens = 0
        self._counts: OrderedDict[tuple[str, bytes], int] = OrderedDict()  # tokens of all answers
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def add(self, text: str, token_ids: Sequence[int], *, canonical: Sequence[int], tenant: str = "") -> None:
        """Keep an answer's tokens, unless they are what the tokenizer gives anyway (`canonical`)."""
        key = tenant, text
        is_of_use = bool(text) and list(token_ids) != list(canonical) and len(token_ids) <= self._most_tokens
        with self._lock:
            self._counts[_count_key(tenant, text)] = len(token_ids)
            while len(self._counts) > self._most_counted:
                self._counts.popitem(last=False)
            self._drop(key)
            if not is_of_use:
                return
            self._answers[key] = tuple(token_ids)
            self._tokens += len(token_ids)
            while self._tokens > self._most_tokens:
                self._drop(next(iter(self._answers)))

    def has_any_of(self, prompt: PromptText, *, tenant: str = "") -> bool:
        """Whether `put_back` could find anything to do, so that offsets are worth asking for."""
        return any(turn.is_answer and (tenant, turn.text) in self._answers for turn in prompt.turns)

    def put_back(self, prompt: PromptText, encoding: Encoding, *, tenant: str = "") -> PromptTokens:
        """The tokens of a rendered conversation with known answers put back.

        An answer is put back only where its edges are edges of tokens; elsewhere the tokenizer's tokens stay.
        """
        token_ids, offsets = encoding.ids, encoding.offsets  # the library makes them anew whenever it is asked
        parts: list[int] = []
        moves: list[tuple[int, int]] = []  # tokens behind this one are so much further on
        taken = 0  # tokens of the whole that are in `parts` or replaced
        character = 0
        for turn in prompt.turns:
            found = prompt.text.find(turn.text, character)
            if found < 0:
                continue
            character = found + len(turn.text)
            generated = self._answers.get((tenant, turn.text)) if turn.is_answer else None
            span = _token_span(offsets, found, character) if generated is not None else None
            if generated is None or span is None:
                continue
            parts += token_ids[taken : span[0]]
            parts += generated
            taken = span[1]
            moves.append((taken, len(parts) - taken))
        with self._lock:
            self.put_back_answers += len(moves)
        return PromptTokens(
            token_ids=(*parts, *token_ids[taken:]),
            branch_points=tuple(_moved(_tokens_before(at, offsets), moves) for at in prompt.branch_points),
        )

    def count_dropped(self, prompt: PromptText, *, tenant: str = "") -> int:
        """Tokens of known answers that a conversation has but its rendered text has not: the template left a part out.

        What was written behind the beginning of such an answer has to be read again. Each answer counts once.
        """
        tokens, character = 0, 0
        for turn in prompt.turns:
            found = prompt.text.find(turn.text.strip(), character)
            if found >= 0:
                character = found + len(turn.text.strip())
            elif turn.is_answer:
                with self._lock:
                    tokens += self._counts.pop(_count_key(tenant, turn.text), 0)
        with self._lock:
            self.dropped_tokens += tokens
        return tokens

    def check_invariants(self) -> None:
        """Assert that the tokens are counted rightly and within their bound."""
        assert self._tokens == sum(map(len, self._answers.values())), "tokens are miscounted"
        assert self._tokens <= self._most_tokens, "more is remembered than may be"

    def _drop(self, key: tuple[str, str]) -> None:
        self._tokens -= len(self._answers.pop(key, ()))


def answer_observer(known: KnownAnswers, tokenizer: Tokenizer, *, tenant: str) -> Observe:
    """Collects the answers of one chat from the events that its client sees; each is known when it ends."""
    texts: defaultdict[int, list[str]] = defaultdict(list)
    tokens: defaultdict[int, list[int]] = defaultdict(list)

    def observe(event: OutputEvent) -> None:
        if not isinstance(event, ChoiceFinished):
            tokens[event.index] += event.token_ids
            if isinstance(event, TextDelta):
                texts[event.index].append(event.text)
        elif event.index in texts:
            text, token_ids = "".join(texts.pop(event.index)), tokens.pop(event.index)
            if tokenizer.decode(token_ids, skip_special_tokens=False) != text:
                return  # the tokens say more than the text: hidden ones, or one that a stop string cut
            canonical = tokenizer.encode(text, add_special_tokens=False)
            known.add(text, token_ids, canonical=canonical, tenant=tenant)

    return observe


def _tokens_before(character: int, offsets: Sequence[tuple[int, int]]) -> int:
    """Tokens that end at or before a character."""
    return bisect_right(offsets, character, key=lambda offset: offset[1])


def _moved(token: int, moves: Sequence[tuple[int, int]]) -> int:
    """Where a token is that is no part of an answer that was put back."""
    behind = bisect_right(moves, token, key=lambda move: move[0])
    return token + (moves[behind - 1][1] if behind else 0)


def _token_span(offsets: Sequence[tuple[int, int]], start: int, end: int) -> tuple[int, int] | None:
    """Which tokens make up the characters from start to end exactly; None when one of them reaches over an edge."""
    first = bisect_left(offsets, start, key=lambda offset: offset[0])
    last = bisect_left(offsets, end, key=lambda offset: offset[0])
    if first >= last or offsets[first][0] != start or offsets[last - 1][1] != end:
        return None
    if first > 0 and offsets[first - 1][1] > start:
        return None
    return first, last


def _count_key(tenant: str, text: str) -> tuple[str, bytes]:
    return tenant, hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
