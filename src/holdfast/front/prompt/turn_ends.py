"""Finds the tokens that end an answer, by rendering answers and checking what follows them.

Many converted models declare only an end-of-text token, and would otherwise write the next turns
themselves. Some tokens end an answer only sometimes: a token that ends a message may also stand
between the thought and the text of one answer, or between its text and a call.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from holdfast.front.prompt.conversation import Message
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import any_of
from holdfast.front.request import ChatPrompt
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.front.toolcalls.incoming import markers_in

_MIN_LENGTH: Final = 3  # in characters; shorter added tokens are runs of white space and letters
_QUESTION: Final[Message] = {"role": "user", "content": "question5107"}
_NEXT: Final = "next6218"
_THOUGHT: Final = "thought7329"
_TEXT: Final = "text8430"
_CALLED: Final = "called9541"
_CALL: Final[Message] = {
    "type": "function",
    "id": "call00001",  # nine characters: some templates refuse other ids
    "function": {"name": "look_up", "arguments": f'{{"subject": "{_CALLED}"}}'},
}
_TOOLS: Final[tuple[dict[str, Any], ...]] = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up.",
            "parameters": {
                "type": "object",
                "properties": {"subject": {"type": "string", "description": "what"}},
                "required": ["subject"],
            },
        },
    },
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """End tokens, as text. turn: they end every answer. message: they also end a thought or
    precede calls, so they end an answer only if no more follows.
    """

    turn: tuple[str, ...] = ()
    message: tuple[str, ...] = ()


def find_turn_ends(
    template: ChatTemplate, dialect: ModelDialect, *, tokens: Collection[str]
) -> TurnEnds:
    """Find the tokens that end the answers of a model. tokens: all its added tokens."""
    marked = {token for token in tokens if len(token.strip()) >= _MIN_LENGTH}
    if not marked:
        return TurnEnds()
    find = any_of(marked).findall
    markup = {token for text in _markup(dialect) for token in find(text)}
    within = markup.union(
        *(find(text) for text in _between_parts(template)),
        *(find(text) for text in _thought(dialect)),
    )
    turn: list[str] = []
    message: list[str] = []
    for answer, following, tools in _turns():
        tails = [*_tails(template, answer, following, tools)]
        written = [token for tail in tails for token in find(tail)]
        if ends := [token for token in written if token not in markup]:
            (message if ends[0] in within else turn).append(ends[0])
        elif "tool_calls" in answer:
            turn += _closing(dialect, tails)
    family = FAMILIES[dialect.family].end_tokens if dialect.family else ()
    turn += [token for token in family if token in tokens]
    return TurnEnds(
        turn=tuple(dict.fromkeys(turn)),
        message=tuple(end for end in dict.fromkeys(message) if end not in turn),
    )


def _markup(dialect: ModelDialect) -> Iterator[str]:
    """The markup around calls and around the text of an answer."""
    yield from dialect.dropped_markers
    for form in dialect.readable_formats:
        for layout in (form.layout, *form.grammar_layouts):
            yield from layout.markup
        if form.channels is not None:
            yield from form.channels.text


def _thought(dialect: ModelDialect) -> Iterator[str]:
    """The markup around a thought."""
    if dialect.reasoning is not None:
        yield from (dialect.reasoning.start, dialect.reasoning.end)
    if dialect.calls is not None and dialect.calls.channels is not None:
        yield from dialect.calls.channels.thought


def _turns() -> Iterator[tuple[Message, Message, tuple[dict[str, Any], ...]]]:
    """Answers, each with the message that follows it, and the tools of the conversation."""
    said = {"role": "assistant", "content": _TEXT}
    follow_up = {"role": "user", "content": _NEXT}
    called = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "content": _NEXT, "tool_call_id": _CALL["id"], "name": "look_up"}
    yield said, follow_up, ()
    yield said, follow_up, _TOOLS
    yield called, result, _TOOLS


def _tails(
    template: ChatTemplate, answer: Message, following: Message, tools: tuple[dict[str, Any], ...]
) -> Iterator[str]:
    """What the template writes after an answer: at the end of the conversation, and before the next
    message.
    """
    last = _CALLED if "tool_calls" in answer else _TEXT
    for messages in ((_QUESTION, answer), (_QUESTION, answer, following)):
        text = template.render_history(ChatPrompt(messages=messages, tools=tools))
        _, is_shown, tail = text.partition(_NEXT)[0].rpartition(last)
        if is_shown:
            yield tail


def _between_parts(template: ChatTemplate) -> Iterator[str]:
    """What the template writes between the parts of one answer."""
    for content, calls in ((_TEXT, ()), ("", (_CALL,)), (_TEXT, (_CALL,))):
        answer: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            answer["tool_calls"] = [*calls]
        for thought in ("", _THOUGHT):
            if thought:
                answer["reasoning_content"] = thought
            prompt = ChatPrompt(messages=(_QUESTION, answer), tools=_TOOLS if calls else ())
            text = template.render_history(prompt)
            places = [text.rfind(part) for part in (_THOUGHT, _TEXT, _CALLED)]
            shown = [place for place in places if place >= 0]
            if len(shown) > 1:
                yield text[min(shown) : max(shown)]


def _closing(dialect: ModelDialect, tails: Iterable[str]) -> Iterator[str]:
    """The marker that closes all calls, if the template writes their results directly after it, in
    the same turn.
    """
    closing = "" if dialect.calls is None else dialect.calls.layout.closing
    for mark in markers_in(closing)[-1:]:
        if any(
            mark in tail and not any(map(str.isalnum, tail.rpartition(mark)[2])) for tail in tails
        ):
            yield mark
