"""Answers that come back in the next turn, as the tokens that were generated.

A model may write a text in other tokens than a tokenizer cuts it into, and a call of a tool with
other spaces than its chat template. Rendered and tokenized anew, the next turn would part from what
is in memory at the first difference, and the rest of the conversation would be read again. So
answers are remembered by what they say, and put back in place of the tokenizer's tokens where the
rendered conversation says the same.
"""

from __future__ import annotations

import hashlib
import json
import threading
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import msgspec

from holdfast.front.prompt.conversation import REASONING_FIELDS
from holdfast.front.prompt.text_places import AnswerFrame
from holdfast.front.toolcalls.segments import (
    AnswerPart,
    CallArguments,
    CallBegun,
    Segment,
    SegmentFormat,
    TextJoints,
)
from holdfast.store.answers import SECRET_BYTES, AnswerFile, Secret, StoredAnswer
from holdfast.wire.output import OutputDelta, text_of, tool_calls_of
from holdfast.wire.requests import PlacedAnswer

# characters that are read at once: each step of a reader looks through all that has come
_PIECE = 1024
_MOST_EXACT = 2**53  # a larger whole number does not survive a client that computes in doubles


class AnswerMeaning(NamedTuple):
    """An answer without what may change on its way through a client: white space at edges, the
    spelling of arguments.
    """

    reasoning: str = ""
    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()  # names, and arguments as canonical JSON


def meaning(reasoning: str, content: str, calls: Iterable[tuple[str, Any]]) -> AnswerMeaning:
    """The meaning of an answer with these parts; arguments are JSON text or objects."""
    settled = tuple((name, canonical_arguments(arguments)) for name, arguments in calls)
    return AnswerMeaning(reasoning.strip(), content.strip(), settled)


def meaning_of_message(message: Mapping[str, Any]) -> AnswerMeaning | None:
    """What a message of the assistant says; None when it is not of text and calls."""
    content = message.get("content") or ""
    reasoning = next(
        (
            found
            for name in REASONING_FIELDS
            if isinstance(found := message.get(name), str) and found
        ),
        "",
    )
    calls: list[tuple[str, Any]] = []
    sent = message.get("tool_calls") or ()
    for call in sent if isinstance(sent, list | tuple) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        calls.append((function["name"], function.get("arguments")))
    return meaning(reasoning, content, calls) if isinstance(content, str) else None


def meaning_of_deltas(deltas: Sequence[OutputDelta]) -> AnswerMeaning | None:
    """What an answer has said; None when a call was cut, which nobody sends back."""
    calls = tool_calls_of(deltas)
    if not all(call.is_complete for call in calls):
        return None
    return meaning(
        text_of(deltas, "reasoning"),
        text_of(deltas),
        ((call.name, call.arguments) for call in calls),
    )


def meaning_of_text(text: str, form: SegmentFormat, *, cut: bool = False) -> AnswerMeaning:
    """What a text says, as a fresh format reads it.

    cut: the text ends because the answer had become too long, so that what is open in it is not
    closed.
    """
    texts: dict[str, list[str]] = {"text": [], "reasoning": []}
    joints = TextJoints()
    calls: list[tuple[str, list[str]]] = []
    pieces = (text[place : place + _PIECE] for place in range(0, len(text), _PIECE))
    parts: Iterable[AnswerPart] = (
        *(part for piece in pieces for part in form.push(piece)),
        *form.flush(cut=cut),
    )
    for part in parts:
        separator = joints.separator(part)
        if isinstance(part, Segment):
            texts[part.kind].append(separator + part.text)
        elif isinstance(part, CallBegun):
            calls.append((part.name, []))
        elif isinstance(part, CallArguments):
            calls[-1][1].append(part.text)
    return meaning(
        "".join(texts["reasoning"]),
        "".join(texts["text"]),
        ((name, "".join(given)) for name, given in calls),
    )


def canonical_arguments(arguments: Any) -> str:
    """One spelling for arguments that say the same: order of keys, white space, escapes and the
    spelling of numbers are settled.

    Text that is no JSON stays as it is.
    """
    if arguments is None or arguments == "":
        return "{}"
    try:
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        value = json.loads(text, parse_int=_number, parse_float=_number)
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return arguments.strip() if isinstance(arguments, str) else ""


def _number(spelled: str) -> int | float:
    """1, 1.0 and 1e0 are one number, and so are those that one double stands for."""
    value = float(spelled)
    if value.is_integer() and abs(value) <= _MOST_EXACT:
        return int(value)
    return value


class ReadTexts:
    """What texts say, so that the answers of a long conversation are not parsed with every turn;
    the longest unused go first.

    Any thread may call it.
    """

    def __init__(self, *, most_characters: int = 4_000_000) -> None:
        self._most_characters, self._characters = most_characters, 0
        self._meanings: OrderedDict[bytes, tuple[AnswerMeaning, int]] = OrderedDict()
        self._lock = threading.Lock()

    def meaning(
        self, text: str, form: Callable[[], SegmentFormat], *, context: str
    ) -> AnswerMeaning:
        """What a text says. context: stands for the format and all that it reads by, such as the
        tools.
        """
        key = hashlib.blake2b(
            f"{context}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16
        ).digest()
        with self._lock:
            if (known := self._meanings.get(key)) is not None:
                self._meanings.move_to_end(key)
                return known[0]
        found = meaning_of_text(text, form())
        with self._lock:
            if self._meanings.setdefault(key, (found, len(text)))[0] is found:
                self._characters += len(text)
            while self._characters > self._most_characters:
                self._characters -= self._meanings.popitem(last=False)[1][1]
        return found


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
