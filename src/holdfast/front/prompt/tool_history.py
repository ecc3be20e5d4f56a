"""Past calls of tools and their results as a model's chat template wants them: ids, names, order,
pairs, or plain text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, TypeAlias

from holdfast.front.prompt.conversation import REASONING_FIELDS, arguments_object
from holdfast.front.toolcalls.dialect import Call, CallFormat, IdForm

Message: TypeAlias = dict[str, Any]

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ALNUM9 = re.compile(r"[a-zA-Z0-9]{9}")
_FUNCTION_NUMBER = re.compile(r"functions\.[^:\s]+:\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolHabits:
    """What a chat template wants of a conversation in which tools were called."""

    id_form: IdForm = "random"
    # an answer may hold several calls; else they become pairs of call and result
    parallel: bool = True
    # the template leaves calls out: they are written into the answer's text in this format
    written: CallFormat | None = None
    # the template knows no tools: all of it is told in text, calls in this format
    in_text: CallFormat | None = None
    # the template shows no tools, but names this format: they are told in the system message
    told: CallFormat | None = None
    # the prompt ends with this, which belongs to the call: it is left to the model to write
    left_to_model: str = ""
    # an answer with calls may have both a thought and a text; else the thought is left out
    thought_beside_text: bool = True
    # an answer with this text has to stand between a result and a user's message
    answer_behind_results: str | None = None


@dataclass(slots=True)
class _CallingTurn:
    """An answer with calls and the results that follow it, each beside its call."""

    answer: Message
    calls: list[Message]
    results: list[list[Message]] = field(default_factory=list)  # of each call
    others: list[Message] = field(default_factory=list)  # results that belong to none of the calls


def with_habits(messages: Iterable[Message], habits: ToolHabits) -> list[Message]:
    """The messages, which are the caller's own copies, as the template wants them.

    Those without tools stay as they are.
    """
    ready: list[Message] = []
    numbers = count()
    for turn in _turns(list(messages)):
        if isinstance(turn, _CallingTurn):
            _rename(turn, habits.id_form, numbers)
            if not habits.thought_beside_text and turn.answer["content"]:
                turn.answer = {
                    key: value for key, value in turn.answer.items() if key not in REASONING_FIELDS
                }
            ready += (
                _in_pairs(turn) if not habits.parallel and len(turn.calls) > 1 else _in_one(turn)
            )
        else:
            ready.append(turn)
    if habits.written is not None:
        for message in ready:
            if "tool_calls" in message:
                write_calls(message, habits.written)
    return (
        ready
        if habits.answer_behind_results is None
        else [*_with_answers_between(ready, habits.answer_behind_results)]
    )


def write_calls(message: Message, form: CallFormat) -> None:
    """Put the calls of an answer behind its text, as its model would have written them."""
    calls = [
        Call(
            call["function"]["name"],
            arguments_object(call["function"].get("arguments")),
            str(call.get("id") or ""),
        )
        for call in message.pop("tool_calls")
    ]
    text, content = form.write(calls), message["content"]
    if isinstance(content, list):
        content.append({"type": "text", "text": text})
    else:
        message["content"] = f"{content}\n{text}" if content.strip() else text


def _turns(messages: Sequence[Message]) -> Iterator[Message | _CallingTurn]:
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        if not message.get("tool_calls"):
            yield message
            continue
        begun = place
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        yield _turn(message, messages[begun:place])


def _turn(answer: Message, results: Sequence[Message]) -> _CallingTurn:
    turn = _CallingTurn(answer, answer["tool_calls"])
    turn.results = [[] for _ in turn.calls]
    for result in results:
        at = _call_of(result, turn)
        (turn.others if at is None else turn.results[at]).append(result)
    return turn


def _call_of(result: Message, turn: _CallingTurn) -> int | None:
    """Which call a result belongs to: by its id; without one by name, and then by place, among
    those that still lack one.
    """
    waiting = [at for at, found in enumerate(turn.results) if not found]
    if wanted := result.get("tool_call_id"):
        same = [at for at, call in enumerate(turn.calls) if call.get("id") == wanted]
        return next((at for at in same if at in waiting), same[-1] if same else None)
    name = result.get("name") or result.get("tool_name")
    return next((at for at in waiting if name in (None, turn.calls[at]["function"]["name"])), None)


def _rename(turn: _CallingTurn, form: IdForm, numbers: Iterator[int]) -> None:
    for call, results in zip(turn.calls, turn.results, strict=True):
        name, number = call["function"]["name"], next(numbers)
        call["id"] = _id_in_form(form, str(call.get("id") or ""), name=name, number=number)
        call.setdefault("type", "function")
        for result in results:
            result["tool_call_id"] = call["id"]
            result.setdefault("name", name)
    for result in turn.others:
        if result.get("tool_call_id"):
            result["tool_call_id"] = _id_in_form(
                form, str(result["tool_call_id"]), name=str(result.get("name")), number=0
            )


def _id_in_form(form: IdForm, given: str, *, name: str, number: int) -> str:
    """The id that a call has for the model: the one that the client sent, unless its family has ids
    of another form.
    """
    if form == "alnum9":
        return given if _ALNUM9.fullmatch(given) else _hashed(given or f"{name}:{number}")
    if form == "function_number":
        return given if _FUNCTION_NUMBER.fullmatch(given) else f"functions.{name}:{number}"
    if form == "number":
        return str(number)
    return given or f"call_{number}"


def _hashed(given: str) -> str:
    value = int.from_bytes(blake2b(given.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return "".join(_LETTERS[value // 62**place % 62] for place in range(9))


def _in_one(turn: _CallingTurn) -> list[Message]:
    """Results in the order of their calls: templates without ids tell them apart by nothing else."""
    return [turn.answer, *(result for results in turn.results for result in results), *turn.others]


def _in_pairs(turn: _CallingTurn) -> list[Message]:
    first = True
    messages: list[Message] = []
    for call, results in zip(turn.calls, turn.results, strict=True):
        answer = (
            turn.answer if first else {"role": "assistant", "content": turn.answer["content"][:0]}
        )
        messages += [{**answer, "tool_calls": [call]}, *results]
        first = False
    return messages + turn.others


def _with_answers_between(messages: Iterable[Message], text: str) -> Iterator[Message]:
    before = ""
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": text}
        yield message
        before = message["role"]
