"""Answers that come back in the next turn, as the tokens that were generated.

A model may write a text in other tokens than a tokenizer cuts it into, and a call of a tool with
other spaces than its chat template. Rendered and tokenized anew, the next turn would part from what
is in memory at the first difference, and the rest of the conversation would be read again. So
answers are remembered by what they say, and put back in place of the tokenizer's tokens where the
rendered conversation says the same.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from holdfast.front.prompt.answer_frame import AnswerFrame
from holdfast.front.prompt.answer_meaning import AnswerMeaning, meaning_of_message
from holdfast.front.prompt.conversation import REASONING_FIELDS
from holdfast.store.answers import SECRET_BYTES, AnswerFile, Secret, StoredAnswer
from holdfast.wire.requests import PlacedAnswer

ReadMeaning: TypeAlias = Callable[[str], AnswerMeaning]
"""What a piece of a rendered conversation says."""

_TAG_BYTES = 16
# answers that say the same, such as calls without arguments: each that comes back is looked for
# among them
_MOST_ALIKE = 256


class KnownAnswer(msgspec.Struct, frozen=True, array_like=True):
    """An answer as it was generated."""

    packed_tokens: bytes  # uint32, from behind the header of the answer on
    reasoning: str = ""
    call_ids: tuple[str, ...] = ()
    is_as_tokenized: bool = False  # the tokenizer makes the same tokens of what a template writes

    @property
    def tokens(self) -> int:
        """How many there are."""
        return len(self.packed_tokens) // 4

    def token_ids(self) -> tuple[int, ...]:
        """Its tokens."""
        return tuple(array("I", self.packed_tokens))


@dataclass(frozen=True, slots=True)
class PastAnswers:
    """What is known of the answers in one conversation. For one request."""

    # the conversation; thoughts that a client has left out of our calls are in it again
    messages: tuple[dict[str, Any], ...]
    # with their tags, in the order of the messages
    expected: dict[AnswerMeaning, deque[tuple[bytes, KnownAnswer]]]

    def places(
        self, text: str, *, frame: AnswerFrame, read: ReadMeaning
    ) -> tuple[PlacedAnswer, ...]:
        """Where the answers are in the rendered text.

        What the text does not show stays in `expected`.
        """
        placed: list[PlacedAnswer] = []
        behind = 0
        for candidates in frame.candidates(text) if self.expected else ():
            for span in candidates if candidates[0].start >= behind else ():
                found = self.expected.get(read(text[span.start : span.end]))
                if found:
                    _, answer = found.popleft()
                    behind = span.end
                    if not answer.is_as_tokenized:
                        placed.append(PlacedAnswer(span.start, span.end, answer.token_ids()))
                    break
        return tuple(placed)


class KnownAnswers:
    """Generated tokens of answers, by tenant and by what they say; the longest unused go first.

    Any thread may call any method. What has to outlive the process is also kept in a file, if there
    is one.
    """

    def __init__(
        self, *, most_tokens: int = 2_000_000, file: AnswerFile | None = None, model: bytes = b""
    ) -> None:
        """model: stands for the tokenizer and template that the tokens belong to."""
        self.put_back_answers = self.dropped_tokens = 0  # since the start
        self._most_tokens, self._file, self._model = most_tokens, file, model
        self._answers: OrderedDict[tuple[Secret, bytes], KnownAnswer] = OrderedDict()
        self._tags: defaultdict[Secret, list[bytes]] = defaultdict(list)
        self._dropped: set[tuple[Secret, bytes]] = set()  # those whose loss was counted
        self._tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._answers)

    def add(
        self,
        said: AnswerMeaning,
        token_ids: Sequence[int],
        *,
        call_ids: Sequence[str] = (),
        is_as_tokenized: bool = False,
        tenant: str = "",
    ) -> None:
        """Keep an answer's tokens.

        One that says the same and has the same ids of calls is replaced.
        """
        secret, tag = self._secret(said, tenant), _tag(said.reasoning, call_ids)
        answer = KnownAnswer(
            array("I", token_ids).tobytes(), said.reasoning, tuple(call_ids), is_as_tokenized
        )
        with self._lock:
            self._insert(secret, tag, answer)
        if self._file is not None and not is_as_tokenized:
            self._file.put(secret, StoredAnswer(tag, msgspec.msgpack.encode(answer)))

    def recall(self, messages: Sequence[dict[str, Any]], *, tenant: str = "") -> PastAnswers:
        """What is known of a conversation's answers.

        A client that sends back a call without the thought before it gets the thought put in, for
        the template to decide about.
        """
        ready = list(messages)
        expected: dict[AnswerMeaning, deque[tuple[bytes, KnownAnswer]]] = {}
        for place, message in enumerate(messages):
            is_answer = isinstance(message, dict) and message.get("role") == "assistant"
            said = meaning_of_message(message) if is_answer else None
            if said is None or (found := self._find(said, message, tenant)) is None:
                continue
            tag, answer = found
            if (
                answer.reasoning
                and not said.reasoning
                and answer.call_ids
                and answer.call_ids == _call_ids(message)
            ):
                ready[place] = {**message, REASONING_FIELDS[0]: answer.reasoning}
            expected.setdefault(said._replace(reasoning=answer.reasoning), deque()).append(
                (tag, answer)
            )
        return PastAnswers(tuple(ready), expected)

    def count(self, past: PastAnswers, *, placed: int, tenant: str = "") -> int:
        """Book what became of a conversation's answers; returns the tokens of those that its text
        does not show.

        The template, or the client, has left a part of them out: what was written behind the
        beginning of such an answer has to be read again. Each counts once.
        """
        dropped = 0
        with self._lock:
            for said, answers in past.expected.items():
                for tag, answer in answers:
                    key = self._secret(said, tenant), tag
                    if key in self._answers and key not in self._dropped:
                        self._dropped.add(key)
                        dropped += answer.tokens
            self.dropped_tokens += dropped
            self.put_back_answers += placed
        return dropped

    def close(self) -> None:
        """Write what is to outlive the process. May be called twice."""
        if self._file is not None:
            self._file.close()

    def check_invariants(self) -> None:
        """Assert that the tokens are counted rightly and within their bound."""
        assert self._tokens == sum(answer.tokens for answer in self._answers.values()), (
            "tokens are miscounted"
        )
        assert self._tokens <= self._most_tokens, "more is remembered than may be"
        assert {
            (secret, tag) for secret, tags in self._tags.items() for tag in tags
        } == self._answers.keys(), "tags are amiss"
        assert self._dropped <= self._answers.keys(), "what is forgotten is still counted"

    def _find(
        self, said: AnswerMeaning, message: dict[str, Any], tenant: str
    ) -> tuple[bytes, KnownAnswer] | None:
        """The answer that a message is: by the ids of its calls, else by its thought, else the
        latest that says the rest.
        """
        secret = self._secret(said, tenant)
        with self._lock:
            if secret not in self._tags:
                self._load(secret)
            known = [(tag, self._answers[secret, tag]) for tag in self._tags.get(secret, ())]
            if not known:
                return None
            ids = _call_ids(message)
            own = [found for found in known if found[1].call_ids == ids] if ids else []
            same = [found for found in own or known if found[1].reasoning == said.reasoning]
            found = (same or own or known)[-1]
            self._answers.move_to_end((secret, found[0]))
            return found

    def _load(self, secret: Secret) -> None:
        for stored in self._file.find(secret) if self._file is not None else ():
            self._insert(secret, stored.tag, msgspec.msgpack.decode(stored.body, type=KnownAnswer))

    def _insert(self, secret: Secret, tag: bytes, answer: KnownAnswer) -> None:
        self._drop((secret, tag))
        if answer.tokens > self._most_tokens:
            return
        if len(alike := self._tags.get(secret, [])) >= _MOST_ALIKE:
            self._drop((secret, alike[0]))
        self._answers[secret, tag] = answer
        self._tags[secret].append(tag)
        self._tokens += answer.tokens
        while self._tokens > self._most_tokens:
            self._drop(next(iter(self._answers)))

    def _drop(self, key: tuple[Secret, bytes]) -> None:
        if (answer := self._answers.pop(key, None)) is None:
            return
        secret, tag = key
        self._tokens -= answer.tokens
        self._dropped.discard(key)
        self._tags[secret].remove(tag)
        if not self._tags[secret]:
            del self._tags[secret]

    def _secret(self, said: AnswerMeaning, tenant: str) -> Secret:
        """A hash of all that a client surely sends back; clients leave thoughts out."""
        return _digest((self._model, tenant, said.content, said.calls), SECRET_BYTES)


def _tag(reasoning: str, call_ids: Iterable[str]) -> bytes:
    return _digest((reasoning, tuple(call_ids)), _TAG_BYTES)


def _call_ids(message: dict[str, Any]) -> tuple[str, ...]:
    calls = message.get("tool_calls")
    return (
        tuple(str(call.get("id") or "") for call in calls if isinstance(call, dict))
        if isinstance(calls, list | tuple)
        else ()
    )


def _digest(parts: object, size: int) -> bytes:
    return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=size).digest()
