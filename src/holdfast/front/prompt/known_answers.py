"""Puts past answers back into the next turn as the tokens that were generated.

A model may generate other tokens than the tokenizer produces for the same text, and may write a
tool call with other spaces than its chat template. If the next turn were rendered and tokenized
from scratch, it would differ from the cached tokens at the first such position, and everything
after that position would be prefilled again. So answers are remembered by their meaning, and their
generated tokens replace the tokenizer's tokens wherever the rendered conversation has the same
meaning.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from holdfast.front.answers.reader import AnswerReader, TextSeparators
from holdfast.front.output import (
    OutputDelta,
    TextDelta,
    text_of,
    tool_calls_of,
)
from holdfast.front.prompt.conversation import reasoning_of
from holdfast.front.prompt.text_places import AnswerSpan
from holdfast.front.records.answer_tokens import SECRET_BYTES, AnswerFile, Secret, StoredAnswer
from holdfast.front.request import PlacedAnswer
from holdfast.lru_cache import LruCache
from holdfast.wire.requests import TokenIds

_TAG_BYTES = 16
# Maximum number of answers with the same meaning, such as calls without arguments: a recalled
# answer is compared with each.
_MAX_SAME_MEANING = 256
# number of characters fed to a reader at a time; more would be slower, because a reader scans all
# of its pending text each time
_READ_CHARACTERS = 1024
_MAX_EXACT_INTEGER = 2**53  # larger integers do not survive clients that compute in doubles


class AnswerMeaning(NamedTuple):
    """What an answer says, in a form by which it is recognized when a client sends it back.

    Clients may change the white space around texts and the spelling of arguments, so both are
    normalized.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments as canonical JSON


ReadMeaning: TypeAlias = Callable[[str], AnswerMeaning]
"""Reads the meaning of an answer from a part of a rendered conversation."""


class KnownAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer exactly as generated."""

    packed_tokens: bytes  # uint32, starting after the text that opens an answer in the template
    reasoning: str = ""  # the thought; empty if there was none
    call_ids: tuple[str, ...] = ()  # of its calls, as the client got them
    is_as_tokenized: bool = False  # the tokenizer produces the same tokens for the rendered answer
    spaces: tuple[str, str] = ("", "")  # white space around the text

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return len(self.packed_tokens) // 4

    def token_ids(self) -> TokenIds:
        """The generated tokens."""
        return TokenIds(self.packed_tokens)


@dataclass(slots=True)
class _Remembered:
    answer: KnownAnswer
    # whether its tokens were already counted as dropped, because a prompt did not contain them
    is_counted: bool = False


class SentAnswer(NamedTuple):
    """An answer of the assistant as a client sent it back."""

    meaning: AnswerMeaning
    call_ids: tuple[str, ...]
    spaces: tuple[str, str]  # white space around the text
    secret: Secret  # under which `KnownAnswers` knows it


@dataclass(frozen=True, slots=True)
class PastAnswers:
    """The known answers of one conversation, as recalled for one request."""

    known_answers: KnownAnswers  # where the answers come from
    # the answers in the order of the messages; `places` removes each answer that it finds
    expected: dict[AnswerMeaning, deque[_Remembered]] = field(default_factory=dict)

    def recall(self, sent: SentAnswer) -> str:
        """Find the known answer that means the same as the next answer of the conversation.

        `places` will look for the answer in the rendered text. If a client sends a call back without
        the thought that preceded it, returns the thought, so that it is added again; the template
        decides whether to show it. Otherwise returns an empty text.
        """
        remembered = self.known_answers.find(sent)
        if remembered is None:
            return ""
        reasoning = remembered.answer.reasoning
        meaning = sent.meaning
        has_our_call_ids = (
            remembered.answer.call_ids and remembered.answer.call_ids == sent.call_ids
        )
        if reasoning != meaning.reasoning:
            meaning = meaning._replace(reasoning=reasoning)
        self.expected.setdefault(meaning, deque()).append(remembered)
        return reasoning if has_our_call_ids and not sent.meaning.reasoning else ""

    def places(
        self,
        candidates: Iterable[Sequence[AnswerSpan]],
        read_meaning: Callable[[AnswerSpan], AnswerMeaning],
    ) -> tuple[PlacedAnswer, ...]:
        """Find the answers in the rendered text.

        Returns those whose generated tokens differ from the tokenizer's, in the order of the text.

        candidates: for each place where an answer may start, the spans that it may have, longest
        first.
        read_meaning: reads the meaning of a span.
        """
        placed_answers: list[PlacedAnswer] = []
        last_end = 0
        for spans in candidates:
            if spans[0].start < last_end:
                continue
            for span in spans:
                expected_answers = self.expected.get(read_meaning(span))
                if expected_answers:
                    answer = expected_answers.popleft().answer
                    last_end = span.end
                    if not answer.is_as_tokenized:
                        placed_answers.append(
                            PlacedAnswer(span.start, span.end, answer.token_ids())
                        )
                    break
        return tuple(placed_answers)


class KnownAnswers:
    """The generated tokens of answers, by tenant and meaning. Thread-safe.

    Forgets the least recently used answers. With a file, answers survive the end of the process.
    """

    def __init__(
        self, *, max_tokens: int = 2_000_000, file: AnswerFile | None = None, model: bytes = b""
    ) -> None:
        """model: identifies the tokenizer and template that the tokens belong to."""
        self.put_back_answers = 0  # how many answers were put into prompts as generated
        self.dropped_tokens = 0  # tokens of answers that could not be put back
        self._file = file
        self._model = model
        # the answers with the same meaning, by tag, the latest last
        self._answers: LruCache[Secret, dict[bytes, _Remembered]] = LruCache(max_tokens)
        self._max_tokens = max_tokens
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(len(alike) for _, alike in self._answers.items())

    def add(
        self,
        meaning: AnswerMeaning,
        token_ids: Sequence[int],
        *,
        content: str = "",
        call_ids: Sequence[str] = (),
        is_as_tokenized: bool = False,
        tenant: str = "",
    ) -> None:
        """Remember the tokens of an answer.

        Replaces an answer with the same meaning, white space and call ids.

        content: the text with its white space.
        """
        secret = self._secret(meaning, tenant)
        spaces = _surrounding_spaces(content)
        tag = _digest((meaning.reasoning, tuple(call_ids), spaces), _TAG_BYTES)
        answer = KnownAnswer(
            TokenIds.of(token_ids).packed,
            meaning.reasoning,
            tuple(call_ids),
            is_as_tokenized,
            spaces,
        )
        with self._lock:
            self._insert(secret, tag, answer)
        if self._file is not None and not is_as_tokenized:
            self._file.put(secret, StoredAnswer(tag, msgspec.msgpack.encode(answer)))

    def sent_answer(self, message: Any, *, tenant: str = "") -> SentAnswer | None:
        """The answer in a message; None if the message is no answer that could be known."""
        is_answer = isinstance(message, dict) and message.get("role") == "assistant"
        meaning = meaning_of_message(message) if is_answer else None
        if meaning is None:
            return None
        spaces = _surrounding_spaces(str(message.get("content") or ""))
        return SentAnswer(meaning, _call_ids(message), spaces, self._secret(meaning, tenant))

    def find(self, sent: SentAnswer) -> _Remembered | None:
        """The known answer that means the same as an answer that a client sent; None if there is
        none.

        If there are several, prefers those with the same call ids, then those with the same
        thought, then those with the same white space, then the latest.
        """
        secret = sent.secret
        with self._lock:
            if self._file is not None and self._answers.get(secret) is None:
                for stored in self._file.find(secret):
                    answer = msgspec.msgpack.decode(stored.body, type=KnownAnswer)
                    self._insert(secret, stored.tag, answer)

            same_meaning = self._answers.get(secret) or {}
            if len(same_meaning) < 2:
                return next(iter(same_meaning.values()), None)

            def likeness(each: _Remembered) -> tuple[bool, bool, bool]:
                answer = each.answer
                return (
                    bool(sent.call_ids) and answer.call_ids == sent.call_ids,
                    answer.reasoning == sent.meaning.reasoning,
                    answer.spaces == sent.spaces,
                )

            # of several, the latest
            return max(reversed(same_meaning.values()), key=likeness, default=None)

    def count_dropped(self, past_answers: PastAnswers, *, placed_answers: int) -> int:
        """Update the counters for one conversation. Returns the number of dropped tokens.

        An answer counts as dropped if the rendered text does not show it in its generated form,
        because the template or the client left out a part. Each answer is counted once.

        placed_answers: the number of answers whose generated tokens were put into the prompt.
        """
        dropped = 0
        with self._lock:
            for answers in past_answers.expected.values():
                for remembered in answers:
                    dropped += 0 if remembered.is_counted else remembered.answer.tokens
                    remembered.is_counted = True
            self.dropped_tokens += dropped
            self.put_back_answers += placed_answers
        return dropped

    def close(self) -> None:
        """Finish writing the file. Idempotent."""
        if self._file is not None:
            self._file.close()

    def check_invariants(self) -> None:
        """Assert that the records are consistent and the limit holds."""
        self._answers.check_invariants()
        answers_by_meaning = [same_meaning for _, same_meaning in self._answers.items()]
        assert all(
            0 < len(same_meaning) <= _MAX_SAME_MEANING for same_meaning in answers_by_meaning
        ), "too many answers with the same meaning"

    def _insert(self, secret: Secret, tag: bytes, answer: KnownAnswer) -> None:
        """Remember an answer as the latest of those with its meaning.

        secret: identifies the meaning. tag: an answer with the same tag is replaced.
        """
        same_meaning = self._answers.get(secret) or {}
        same_meaning.pop(tag, None)
        same_meaning[tag] = _Remembered(answer)
        tokens = sum(each.answer.tokens for each in same_meaning.values())
        while len(same_meaning) > 1 and (
            len(same_meaning) > _MAX_SAME_MEANING or tokens > self._max_tokens
        ):
            tokens -= same_meaning.pop(next(iter(same_meaning))).answer.tokens
        self._answers.put(secret, same_meaning, size=tokens)

    def _secret(self, meaning: AnswerMeaning, tenant: str) -> Secret:
        """A hash by which an answer with this meaning is found, and encrypted in the file."""
        # does not depend on the thought, because clients leave it out
        return _digest((self._model, tenant, meaning.content, meaning.calls), SECRET_BYTES)


def _surrounding_spaces(text: str) -> tuple[str, str]:
    """The white space before and after the text."""
    stripped = text.lstrip()
    return text[: len(text) - len(stripped)], stripped[len(stripped.rstrip()) :]


def _call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a message's calls; empty for a call without one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return ()
    return tuple(str(call.get("id") or "") for call in calls if isinstance(call, dict))


def _digest(parts: object, size: int) -> bytes:
    """A hash of any value, by its `repr`. size: in bytes."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=size).digest()


def meaning(reasoning: str, content: str, calls: Iterable[tuple[str, Any]]) -> AnswerMeaning:
    """The meaning of an answer with these parts. Call arguments may be JSON text or objects."""
    normalized_calls = tuple((name, canonical_arguments(arguments)) for name, arguments in calls)
    return AnswerMeaning(reasoning.strip(), content.strip(), normalized_calls)


def meaning_of_message(message: Mapping[str, Any]) -> AnswerMeaning | None:
    """The meaning of an assistant message; None unless it consists only of text and calls."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        return None
    sent_calls = message.get("tool_calls")
    calls: list[tuple[str, str]] = []
    for call in sent_calls if isinstance(sent_calls, list | tuple) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        calls.append((function["name"], canonical_arguments(function.get("arguments"))))
    return AnswerMeaning(reasoning_of(message).strip(), content.strip(), tuple(calls))


def meaning_of_deltas(deltas: Sequence[OutputDelta]) -> AnswerMeaning | None:
    """The meaning of a streamed answer.

    None if a call is incomplete, because no client sends such a call back.
    """
    calls = tool_calls_of(deltas)
    if not all(call.is_complete for call in calls):
        return None
    return meaning(
        text_of(deltas, "reasoning"),
        text_of(deltas),
        ((call.name, call.arguments) for call in calls),
    )


def meaning_of_text(text: str, reader: AnswerReader, *, was_cut_off: bool = False) -> AnswerMeaning:
    """The meaning of a generated text.

    reader: a new reader, which parses the text.
    was_cut_off: True if the answer reached its length limit, so that a thought or call at its end
        may be incomplete.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    separators = TextSeparators()  # what joins texts that had a call or a thought between them
    deltas: list[OutputDelta] = []
    for start in range(0, len(text), _READ_CHARACTERS):
        deltas += reader.push(text[start : start + _READ_CHARACTERS])
    deltas += reader.flush(was_cut_off=was_cut_off)
    for delta in deltas:
        separator = separators.separator(delta)
        if isinstance(delta, TextDelta):
            texts[delta.kind].append(separator + delta.text)
    return meaning(
        "".join(texts["reasoning"]),
        "".join(texts["text"]),
        ((call.name, call.arguments) for call in tool_calls_of(deltas)),
    )


def canonical_arguments(arguments: Any) -> str:
    """Arguments in one spelling: key order, white space, escapes and numbers are normalized.

    Text that is not JSON is returned unchanged.
    """
    if arguments is None or arguments == "":
        return "{}"
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(text, parse_int=_normalized_number, parse_float=_normalized_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return arguments.strip() if isinstance(arguments, str) else ""


def _normalized_number(digits: str) -> int | float:
    """The number in normal form.

    1, 1.0 and 1e0 are equal, as are all numbers that round to the same double.
    """
    value = float(digits)
    return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INTEGER else value


class ReadTexts:
    """Remembers the meanings of texts, so that old turns of a conversation are not parsed again.

    Forgets the least recently used texts. Thread-safe.
    """

    def __init__(self, *, max_characters: int = 4_000_000) -> None:
        self._meanings: LruCache[bytes, AnswerMeaning] = LruCache(max_characters)

    def meaning(
        self,
        text: str,
        make_reader: Callable[[], AnswerReader],
        *,
        reader_context: str,
        encode: Callable[[str], str] = str,
    ) -> AnswerMeaning:
        """The meaning of a text, which is parsed only if its meaning is not remembered.

        make_reader: creates the reader that parses the text.
        reader_context: identifies everything that the reader depends on, such as the tools.
        encode: puts the text into the form that the reader expects.
        """
        key = hashlib.blake2b(
            f"{reader_context}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        known_meaning = self._meanings.get(key)
        if known_meaning is None:
            known_meaning = meaning_of_text(encode(text), make_reader())
            self._meanings.put(key, known_meaning, size=len(text))
        return known_meaning
