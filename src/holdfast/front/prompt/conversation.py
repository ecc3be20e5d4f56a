"""Messages as clients send them → messages as chat templates expect them.

Where a message can be read in one way only, it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Final, TypeAlias

from holdfast.errors import InvalidRequest
from holdfast.front.toolcalls.dialect import Call, CallFormat, IdForm
from holdfast.wire.output import ToolCall

_ROLES = {"developer": "system"}  # OpenAI's newer name for the same thing
# Names under which clients send, and templates read, past reasoning.
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
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
class RoleHabits:
    """Which orders of messages a chat template takes."""

    system: bool = True  # a system message; else it goes into the first one of the user
    system_anywhere: bool = (
        # several of them, and behind others; else those at the beginning are one, and later ones
        # the user's
        True
    )
    # messages of the user without an answer between; else they are joined, and an answer comes
    # second
    same_in_a_row: bool = True


def with_roles(messages: list[dict[str, Any]], habits: RoleHabits) -> list[dict[str, Any]]:
    """The messages, which are the caller's own copies, in an order that the template takes."""
    if habits == RoleHabits():
        return messages
    ready: list[dict[str, Any]] = []
    for message in messages:
        before = ready[-1]["role"] if ready else ""
        if message["role"] == "system" and not (
            habits.system and (habits.system_anywhere or before in ("", "system"))
        ):
            message = {**message, "role": "user"}
        is_first = before in ("", "system")
        if message["role"] == before and (
            before == "system" or (before == "user" and habits != _ALL_BUT_LATER_SYSTEM)
        ):
            ready[-1] = {**message, "content": _joined(ready[-1]["content"], message["content"])}
        elif message["role"] == "assistant" and is_first and not habits.same_in_a_row:
            ready += [{"role": "user", "content": message["content"][:0]}, message]
        else:
            ready.append(message)
    return ready


_ALL_BUT_LATER_SYSTEM = RoleHabits(system_anywhere=False)


def answer_message(
    text: str, *, reasoning: str = "", calls: Iterable[ToolCall] = ()
) -> dict[str, Any]:
    """An answer as a message of the conversation that goes on behind it; calls that were cut are
    left out.
    """
    made = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
        if call.is_complete
    ]
    return {
        "role": "assistant",
        "content": text,
        **({REASONING_FIELDS[0]: reasoning} if reasoning else {}),
        **({"tool_calls": made} if made else {}),
    }


def _joined(first: Any, second: Any) -> Any:
    return [*first, *second] if isinstance(first, list) else f"{first}\n\n{second}"


def template_messages(
    messages: Iterable[dict[str, Any]],
    *,
    keep_parts: bool,
    arguments_as_text: bool,
    field: str = "messages",
) -> list[dict[str, Any]]:
    """Messages for a template, as fresh copies.

    Raises InvalidRequest naming the part that no template could use.

    keep_parts: the template goes through lists of content parts itself; else the text of the parts
        is joined, one per line.
    arguments_as_text: the template writes the arguments of tool calls as they are; else it expects
        objects.
    """
    ready = [
        _message(
            message,
            keep_parts=keep_parts,
            arguments_as_text=arguments_as_text,
            field=f"{field}.{place}",
        )
        for place, message in enumerate(messages)
    ]
    if not ready:
        raise InvalidRequest("there must be at least one message", field=field)
    return ready


def _message(
    message: dict[str, Any], *, keep_parts: bool, arguments_as_text: bool, field: str
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequest("a message must be an object", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest("a message must have a role", field=f"{field}.role")
    # Templates ask whether a key is there: one that is null is left out.
    ready = {key: value for key, value in message.items() if value is not None}
    ready["role"] = _ROLES.get(role, role)
    ready["content"] = _content(
        message.get("content"), keep_parts=keep_parts, field=f"{field}.content"
    )
    if calls := ready.pop("tool_calls", None):
        ready["tool_calls"] = _tool_calls(
            calls, arguments_as_text=arguments_as_text, field=f"{field}.tool_calls"
        )
    if reasoning := next(
        (ready[name] for name in REASONING_FIELDS if isinstance(ready.get(name), str)), ""
    ):
        ready |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return ready


def _content(content: Any, *, keep_parts: bool, field: str) -> str | list[dict[str, Any]]:
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list | tuple):
        parts = [_part(part, field=f"{field}.{place}") for place, part in enumerate(content)]
    else:
        raise InvalidRequest("content must be a string or a list of parts", field=field)
    return [{"type": "text", "text": part} for part in parts] if keep_parts else "\n".join(parts)


def _part(part: Any, *, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a content part must be an object", field=field)
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise InvalidRequest(
            f"content parts of type {kind!r} are not supported by this model: it reads text only",
            field=f"{field}.type",
        )
    if not isinstance(text, str):
        raise InvalidRequest("the text of a content part must be a string", field=f"{field}.text")
    return text


def _tool_calls(calls: Any, *, arguments_as_text: bool, field: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("tool_calls must be a list", field=field)
    return [
        _tool_call(call, arguments_as_text=arguments_as_text, field=f"{field}.{place}")
        for place, call in enumerate(calls)
    ]


def _tool_call(call: Any, *, arguments_as_text: bool, field: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(
            "a tool call must have a function with a name", field=f"{field}.function"
        )
    arguments = function.get("arguments")
    ready = arguments_text(arguments) if arguments_as_text else arguments_object(arguments)
    return {**call, "function": {**function, "arguments": ready}}


def arguments_object(arguments: Any) -> dict[str, Any]:
    """Arguments as an object.

    A model may have written another value, or no JSON at all, and the conversation must be able to
    go on: templates that go through arguments get it under a name.
    """
    if arguments is None or arguments == "":
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw": arguments}


def arguments_text(arguments: Any) -> str:
    """Arguments as JSON text."""
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


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
