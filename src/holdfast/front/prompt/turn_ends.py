"""Finds the tokens that end an answer, by rendering answers and checking what follows them.

Many converted models declare only an end-of-text token, and would otherwise write the next turns
themselves. Some tokens end an answer only sometimes: a token that ends a message may also stand
between the thought and the text of one answer, or between its text and a call. Some model families
write these parts of an answer in *channels*, each with its own markup.
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
    candidates = {token for token in tokens if len(token.strip()) >= _MIN_LENGTH}
    if not candidates:
        return TurnEnds()
    find_tokens = any_of(candidates).findall
    markup = {token for text in _answer_markup(dialect) for token in find_tokens(text)}
    inner_tokens = markup.union(
        *(find_tokens(text) for text in _texts_between_parts(template)),
        *(find_tokens(text) for text in _thought_markup(dialect)),
    )
    turn_ends: list[str] = []
    message_ends: list[str] = []
    for answer, next_message, tools in _probe_turns():
        tails = [*_texts_after_answer(template, answer, next_message, tools)]
        tokens_after = [token for tail in tails for token in find_tokens(tail)]
        if end_tokens := [token for token in tokens_after if token not in markup]:
            (message_ends if end_tokens[0] in inner_tokens else turn_ends).append(end_tokens[0])
        elif "tool_calls" in answer:
            turn_ends += _closing_marker(dialect, tails)
    family_ends = FAMILIES[dialect.family].end_tokens if dialect.family else ()
    turn_ends += [token for token in family_ends if token in tokens]
    return TurnEnds(
        turn=tuple(dict.fromkeys(turn_ends)),
        message=tuple(end for end in dict.fromkeys(message_ends) if end not in turn_ends),
    )


def _answer_markup(dialect: ModelDialect) -> Iterator[str]:
    """The markup around calls and around the text of an answer."""
    yield from dialect.dropped_markers
    for form in dialect.readable_formats:
        for layout in (form.layout, *form.grammar_layouts):
            yield from layout.markup
        if form.channels is not None:
            yield from form.channels.text


def _thought_markup(dialect: ModelDialect) -> Iterator[str]:
    """The markup around a thought."""
    if dialect.reasoning is not None:
        yield from (dialect.reasoning.start, dialect.reasoning.end)
    if dialect.calls is not None and dialect.calls.channels is not None:
        yield from dialect.calls.channels.thought


def _probe_turns() -> Iterator[tuple[Message, Message, tuple[dict[str, Any], ...]]]:
    """Answers, each with the message that follows it, and the tools of the conversation."""
    text_answer = {"role": "assistant", "content": _TEXT}
    follow_up = {"role": "user", "content": _NEXT}
    calling_answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "content": _NEXT, "tool_call_id": _CALL["id"], "name": "look_up"}
    yield text_answer, follow_up, ()
    yield text_answer, follow_up, _TOOLS
    yield calling_answer, result, _TOOLS


def _texts_after_answer(
    template: ChatTemplate,
    answer: Message,
    next_message: Message,
    tools: tuple[dict[str, Any], ...],
) -> Iterator[str]:
    """What the template writes after an answer: at the end of the conversation, and before the next
    message.
    """
    last_word = _CALLED if "tool_calls" in answer else _TEXT
    for messages in ((_QUESTION, answer), (_QUESTION, answer, next_message)):
        text = template.render_history(ChatPrompt(messages=messages, tools=tools))
        _, is_shown, text_after = text.partition(_NEXT)[0].rpartition(last_word)
        if is_shown:
            yield text_after


def _texts_between_parts(template: ChatTemplate) -> Iterator[str]:
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
            part_starts = [text.rfind(part) for part in (_THOUGHT, _TEXT, _CALLED)]
            shown_starts = [start for start in part_starts if start >= 0]
            if len(shown_starts) > 1:
                yield text[min(shown_starts) : max(shown_starts)]


def _closing_marker(dialect: ModelDialect, tails: Iterable[str]) -> Iterator[str]:
    """The marker that closes all calls, if the template writes their results directly after it, in
    the same turn.
    """
    closing_markup = "" if dialect.calls is None else dialect.calls.layout.closing
    for mark in markers_in(closing_markup)[-1:]:
        if any(
            mark in tail and not any(map(str.isalnum, tail.rpartition(mark)[2])) for tail in tails
        ):
            yield mark
