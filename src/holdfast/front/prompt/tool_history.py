"""Past tool calls and their results in the form that a model's chat template wants: ids, names, order,
pairs, or plain text.

Where the template shows no tools, they are described in the system message. If it names the syntax
of a family and writes results, the model is told to call tools in that syntax. Otherwise calls and
results become text of ordinary messages too, in the syntax that most models have seen, Hermes': a
JSON object between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Final, TypeAlias

from holdfast.front.prompt.conversation import REASONING_FIELDS, arguments_object
from holdfast.front.toolcalls.dialect import Call, CallFormat, IdForm

Message: TypeAlias = dict[str, Any]

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ALNUM9 = re.compile(r"[a-zA-Z0-9]{9}")
_FUNCTION_NUMBER = re.compile(r"functions\.[^:\s]+:\d+")
_LIST = """\
# Tools

You may call functions. These are there, as JSON, one per line:
<tools>
{tools}
</tools>

"""
_IN_JSON = """\
To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, once for each call:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
Write nothing behind the last call. The results come back between <tool_response> and </tool_response>."""
_IN_SYNTAX = """\
To call functions, use exactly this format, with their own names and arguments. Two calls look like this:
{example}
Write nothing after the last call. You will then be given the results."""
_EXAMPLE: Final = (
    Call("first_function", {"argument": "value"}, "functions.first_function:0"),
    Call("second_function", {"argument": "value"}, "functions.second_function:1"),
)


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


def tools_in_text(
    messages: Iterable[Message], tools: Sequence[dict[str, Any]], form: CallFormat
) -> list[Message]:
    """The conversation (the caller's own copies) without anything that a template must know of
    tools.

    Results of one turn become one message of the user.
    """
    ready: list[Message] = []
    in_results = False
    for message in messages:
        if message.get("tool_calls"):
            write_calls(message, form)
        if message["role"] == "tool":
            text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
            if in_results:
                _append(ready[-1], "\n" + text)
            else:
                ready.append({"role": "user", "content": _like(message["content"], text)})
            in_results = True
            continue
        in_results = False
        ready.append(message)
    return _told(ready, tools, _IN_JSON) if tools else ready


def tools_told(
    messages: list[Message], tools: Sequence[dict[str, Any]], form: CallFormat
) -> list[Message]:
    """The conversation (the caller's own copies) with its tools in the system message, and how to
    call them in this format.
    """
    return (
        _told(messages, tools, _IN_SYNTAX.format(example=form.write(_EXAMPLE).strip()))
        if tools
        else messages
    )


def _told(
    messages: list[Message], tools: Sequence[dict[str, Any]], how_to_call: str
) -> list[Message]:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _LIST.format(tools=lines) + how_to_call
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": _like(first["content"], text)}, *messages]
    _append(first, "\n\n" + text if _text(first["content"]) else text)
    return messages


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _like(content: Any, text: str) -> Any:
    """The text as a content of the same kind: templates may know but one."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def _append(message: Message, text: str) -> None:
    content = message["content"]
    message["content"] = (
        [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    )
