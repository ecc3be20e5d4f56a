"""Converts messages from the form that clients send to the form that a chat template expects.

Past tool calls and results get the ids, names, order and grouping that the template expects. If the
template does not render tools, the system message describes them. If such a template nevertheless
names the call syntax of a model family and renders results, the system message tells the model to
use that syntax. Otherwise calls and results become ordinary text, too, in Hermes' syntax, which
most models know: a JSON object between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any, Final, TypeAlias

from holdfast.errors import InvalidRequest
from holdfast.front.output import ToolCall
from holdfast.front.prompt.tool_definitions import made_once
from holdfast.front.toolcalls.call_format import Call, CallFormat, IdForm

Message: TypeAlias = dict[str, Any]

# names under which clients send, and templates read, past reasoning
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
PART_KINDS = frozenset({"text", "input_text", "output_text", "refusal"})  # that contain text
_ROLES = {"developer": "system"}  # OpenAI's newer name for the same role
_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_ALNUM9 = re.compile(r"[a-zA-Z0-9]{9}")
_FUNCTION_NUMBER = re.compile(r"functions\.[^:\s]+:\d+")
_UNKNOWN_CALL = "[The result of a call that is not in this conversation:]"
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


def answer_message(text: str, *, reasoning: str = "", calls: Iterable[ToolCall] = ()) -> Message:
    """An answer as the assistant message that clients send with the next turn.

    Incomplete calls are left out.
    """
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message[REASONING_FIELDS[0]] = reasoning
    complete = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in calls
        if call.is_complete
    ]
    if complete:
        message["tool_calls"] = complete
    return message


def template_message(
    message: Any, *, keep_parts: bool, arguments_as_text: bool, field: str
) -> Message:
    """A message, checked and in the form that a template expects. It must not be changed.

    Raises InvalidRequest, which names the message or part that no template could use.

    keep_parts: True if the template iterates over content parts; otherwise the texts of the parts
        are joined with line breaks.
    arguments_as_text: True if the template writes the arguments of calls verbatim; otherwise it
        expects objects.
    field: the request field of the message, for errors.
    """
    return made_once(
        message,
        (keep_parts, arguments_as_text),
        lambda: _template_message(
            message, keep_parts=keep_parts, arguments_as_text=arguments_as_text, field=field
        ),
    )


def changeable(message: Message) -> Message:
    """A copy of a `template_message` for functions that change messages."""
    copied = dict(message)
    if isinstance(copied["content"], list):
        copied["content"] = [*copied["content"]]
    if "tool_calls" in copied:
        copied["tool_calls"] = [{**call} for call in copied["tool_calls"]]
    return copied


def _template_message(
    message: Any, *, keep_parts: bool, arguments_as_text: bool, field: str
) -> Message:
    if not isinstance(message, dict):
        raise InvalidRequest("a message must be an object", field=field)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest("a message must have a role", field=f"{field}.role")
    # Templates check whether a key exists, so keys with null values are left out.
    adapted = {key: value for key, value in message.items() if value is not None}
    adapted["role"] = _ROLES.get(role, role)
    adapted["content"] = _content(
        message.get("content"), keep_parts=keep_parts, field=f"{field}.content"
    )
    calls = adapted.pop("tool_calls", None)
    if calls:
        adapted["tool_calls"] = _tool_calls(
            calls, arguments_as_text=arguments_as_text, field=f"{field}.tool_calls"
        )
    reasoning = reasoning_of(adapted)
    if reasoning:
        adapted |= dict.fromkeys(REASONING_FIELDS, reasoning)
    return adapted


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning that a client sent with an answer, under any of the known names."""
    for name in REASONING_FIELDS:
        value = message.get(name)
        if isinstance(value, str) and value:
            return value
    return ""


def _content(content: Any, *, keep_parts: bool, field: str) -> str | list[Message]:
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list | tuple):
        parts = [_part(part, field=f"{field}.{place}") for place, part in enumerate(content)]
    else:
        raise InvalidRequest("content must be a string or a list of parts", field=field)
    return [_text_part(part) for part in parts] if keep_parts else "\n".join(parts)


def _part(part: Any, *, field: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequest("a content part must be an object", field=field)
    kind = part.get("type", "text")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in PART_KINDS:
        raise InvalidRequest(
            f"content parts of type {kind!r} are not supported: this model reads only text",
            field=f"{field}.type",
        )
    if not isinstance(text, str):
        raise InvalidRequest("the text of a content part must be a string", field=f"{field}.text")
    return text


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _tool_calls(calls: Any, *, arguments_as_text: bool, field: str) -> list[Message]:
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("tool_calls must be a list", field=field)
    ready = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                "a tool call must have a function with a name", field=f"{field}.{place}.function"
            )
        form = _arguments_text if arguments_as_text else arguments_object
        arguments = form(function.get("arguments"))
        ready.append({**call, "function": {**function, "arguments": arguments}})
    return ready


def arguments_object(arguments: Any) -> dict[str, Any]:
    """The arguments of a call as an object, because some templates iterate over it.

    If the model wrote another JSON value or invalid JSON, the conversation must still be able to
    continue: such arguments become the value of the key "raw".
    """
    if arguments is None or arguments == "":
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"raw": arguments}


def _arguments_text(arguments: Any) -> str:
    if arguments is None or arguments == "":
        return "{}"
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleHabits:
    """Which roles a chat template accepts, and in which order."""

    # accepts system messages; otherwise their text goes into the first user message
    system: bool = True
    # accepts several system messages, anywhere; otherwise leading ones are joined, and later ones
    # become user messages
    system_anywhere: bool = True
    # accepts consecutive user messages, and an answer as the first message; otherwise user messages
    # are joined, and an empty user message precedes the answer
    same_in_a_row: bool = True


def with_roles(messages: list[Message], habits: RoleHabits) -> list[Message]:
    """Bring messages into an order that the template accepts. May change the given messages."""
    if habits == RoleHabits():
        return messages
    joins_users = not (habits.system and habits.same_in_a_row)
    ready: list[Message] = []
    for message in messages:
        before = ready[-1]["role"] if ready else ""
        is_first = before in ("", "system")
        takes_system = habits.system and (habits.system_anywhere or is_first)
        if message["role"] == "system" and not takes_system:
            message = {**message, "role": "user"}
        is_joined = before == "system" or (before == "user" and joins_users)
        if message["role"] == before and is_joined:
            ready[-1] = {**message, "content": _joined(ready[-1]["content"], message["content"])}
        elif message["role"] == "assistant" and is_first and not habits.same_in_a_row:
            ready += [{"role": "user", "content": message["content"][:0]}, message]
        else:
            ready.append(message)
    return ready


def _joined(first: Any, second: Any) -> Any:
    return [*first, *second] if isinstance(first, list) else f"{first}\n\n{second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolHabits:
    """What a chat template requires of a conversation with tool calls."""

    id_form: IdForm = "random"  # the form of call ids that the template accepts
    # the template accepts several calls in one answer; otherwise each call becomes a separate
    # answer, followed by its result
    parallel: bool = True
    # if set: the template omits calls, so they are written into the answer's text in this format
    written: CallFormat | None = None
    # if set: the template does not know tools, so tools, calls and results become text, with calls
    # in this format
    in_text: CallFormat | None = None
    # if set: the template does not render tools, but names this call format, so the system message
    # describes the tools
    told: CallFormat | None = None
    # if the template ends the prompt with the beginning of a call: that text, which is removed, so
    # that the model generates it
    left_to_model: str = ""
    # the template accepts a thought and a text in an answer with calls; otherwise the thought is
    # left out
    thought_beside_text: bool = True
    # if set: the template does not accept a user message right after a result, so an answer with
    # this text is put between them
    answer_after_results: str | None = None

    @property
    def describes_tools(self) -> bool:
        """Whether the conversation itself describes the tools, so that the template gets none."""
        return self.in_text is not None or self.told is not None


@dataclass(slots=True, eq=False)
class _CallingTurn:
    """An answer with calls, and the result of each call, if there is one."""

    answer: Message
    calls: list[Message]
    # one entry for each call: its result, or None while the result is not found
    results: list[Message | None] = field(default_factory=list)


_Place: TypeAlias = tuple[_CallingTurn, int]
"""An answer, and the index of one of its calls."""


def with_habits(messages: Iterable[Message], habits: ToolHabits) -> list[Message]:
    """Bring calls and results into the form that the template requires.

    May change the given messages.
    """
    messages = list(messages)
    if not any("tool_calls" in each or each["role"] == "tool" for each in messages):
        return messages
    ready: list[Message] = []
    numbers = count()
    for turn in _turns(messages):
        if not isinstance(turn, _CallingTurn):
            ready.append(turn)
            continue
        _rename(turn, habits.id_form, numbers)
        if not habits.thought_beside_text and turn.answer["content"]:
            turn.answer = {
                key: value for key, value in turn.answer.items() if key not in REASONING_FIELDS
            }
        ready += (
            _in_one(turn) if habits.parallel or len(turn.calls) == 1 else _with_one_call_each(turn)
        )
    if habits.written is not None:
        for message in ready:
            if "tool_calls" in message:
                _write_calls(message, habits.written)
    if habits.answer_after_results is not None:
        ready = list(_with_answers_between(ready, habits.answer_after_results))
    return ready


def _write_calls(message: Message, form: CallFormat) -> None:
    """Append the calls of an answer to its text, as the model would have written them."""
    calls = [
        Call(
            call["function"]["name"],
            arguments_object(call["function"].get("arguments")),
            str(call.get("id") or ""),
        )
        for call in message.pop("tool_calls")
    ]
    text = form.write(calls)
    content = message["content"]
    if isinstance(content, list):
        content.append(_text_part(text))
    else:
        message["content"] = f"{content}\n{text}" if content.strip() else text


def _turns(messages: Sequence[Message]) -> Iterator[Message | _CallingTurn]:
    """The messages, with the results of calls moved to their answers.

    A result is moved no further than to the answer before it, because an earlier prompt must stay a
    prefix of later ones. A call without a result gets an empty one, because many templates tell
    results apart only by their order. Other results become user messages.
    """
    names: dict[str, str] = {}  # of the calls so far, by id
    place = 0
    while place < len(messages):
        start = place
        while place < len(messages) and messages[place]["role"] == "assistant":
            place += 1
        answers = messages[start:place]
        start = place
        while place < len(messages) and messages[place]["role"] != "assistant":
            place += 1
        following = messages[start:place]
        turns = [_CallingTurn(each, each.get("tool_calls") or []) for each in answers]
        for turn in turns:
            turn.results = [None for _ in turn.calls]
            names |= {str(call.get("id")): call["function"]["name"] for call in turn.calls}
        results = [each for each in following if each["role"] == "tool"]
        others = _assign(results, turns) if results else []
        for turn in turns:
            is_last = turn is turns[-1] and place == len(messages) and not following
            if turn.calls and not is_last:
                _answer_every_call(turn)
            yield turn if turn.calls else turn.answer
        yield from (_as_user_message(each, names) for each in others)
        yield from (each for each in following if each["role"] != "tool")


def _assign(results: Sequence[Message], turns: Sequence[_CallingTurn]) -> list[Message]:
    """Assign results to the calls of answers. Returns the results that answer none of them.

    A result with an id answers the call with this id. A result without an id answers the first call
    of its name without a result. A second result of a call is appended to the first.
    """
    calls = _Calls(turns)
    others: list[Message] = []
    for result in results:
        found = calls.answered_by(result)
        if found is None:
            others.append(result)
            continue
        turn, at = found
        before = turn.results[at]
        if before is not None:
            result = {**before, "content": _joined(before["content"], result["content"])}
        turn.results[at] = result
    return others


class _Calls:
    """The calls of some answers, to be found by their ids and names in constant time: a request may
    have thousands.
    """

    def __init__(self, turns: Sequence[_CallingTurn]) -> None:
        self._by_id: defaultdict[str, deque[_Place]] = defaultdict(deque)
        self._by_name: defaultdict[str | None, deque[_Place]] = defaultdict(deque)  # None: all
        for turn in turns:
            for at, call in enumerate(turn.calls):
                self._by_id[str(call.get("id"))].append((turn, at))
                self._by_name[call["function"]["name"]].append((turn, at))
                self._by_name[None].append((turn, at))

    def answered_by(self, result: Message) -> _Place | None:
        """The call that a result answers; None if there is none."""
        wanted = result.get("tool_call_id")
        if wanted:
            same = self._by_id.get(str(wanted), deque())
            while len(same) > 1 and _has_result(same[0]):
                same.popleft()
            return same[0] if same else None
        name = result.get("name") or result.get("tool_name")
        waiting = self._by_name.get(None if name is None else str(name), deque())
        while waiting and _has_result(waiting[0]):
            waiting.popleft()
        return waiting[0] if waiting else None


def _has_result(place: _Place) -> bool:
    turn, at = place
    return turn.results[at] is not None


def _answer_every_call(turn: _CallingTurn) -> None:
    empty = {"role": "tool", "content": _like(turn.answer["content"], "")}
    turn.results = [dict(empty) if each is None else each for each in turn.results]


def _as_user_message(result: Message, names: Mapping[str, str]) -> Message:
    """A user message for a result that answers no call of the latest answer."""
    name = names.get(str(result.get("tool_call_id"))) or result.get("name")
    note = f"[The result of an earlier call of {name}:]" if name else _UNKNOWN_CALL
    content = result["content"]
    said = [_text_part(note), *content] if isinstance(content, list) else f"{note}\n{content}"
    return {"role": "user", "content": said}


def _rename(turn: _CallingTurn, form: IdForm, numbers: Iterator[int]) -> None:
    for call, result in zip(turn.calls, turn.results, strict=True):
        name = call["function"]["name"]
        call["id"] = _id_in_form(form, str(call.get("id") or ""), name=name, number=next(numbers))
        call.setdefault("type", "function")
        if result is not None:
            result["tool_call_id"] = call["id"]
            result.setdefault("name", name)


def _id_in_form(form: IdForm, given: str, *, name: str, number: int) -> str:
    """The id of a call as the model sees it.

    This is the client's id, unless the model's family uses ids of another form.
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
    # Templates without ids tell results apart by their order alone.
    return [turn.answer, *(result for result in turn.results if result is not None)]


def _with_one_call_each(turn: _CallingTurn) -> list[Message]:
    """One message per call, followed by its result; the text is in the first message only."""
    messages: list[Message] = []
    answer = turn.answer
    for call, result in zip(turn.calls, turn.results, strict=True):
        messages.append({**answer, "tool_calls": [call]})
        if result is not None:
            messages.append(result)
        answer = {
            "role": "assistant",
            "content": answer["content"][:0],
        }  # no text, in the same form
    return messages


def _with_answers_between(messages: Iterable[Message], text: str) -> Iterator[Message]:
    before = ""
    for message in messages:
        if before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": text}
        yield message
        before = message["role"]


def tools_in_text(
    messages: Iterable[Message], tools: Sequence[Message], form: CallFormat
) -> list[Message]:
    """The conversation with tools, calls and results as ordinary text. May change the messages.

    The results of one turn become one user message.
    """
    ready: list[Message] = []
    in_results = False
    for message in messages:
        if message.get("tool_calls"):
            _write_calls(message, form)
        if message["role"] != "tool":
            in_results = False
            ready.append(message)
            continue
        text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
        if in_results:
            _append(ready[-1], "\n" + text)
        else:
            ready.append({"role": "user", "content": _like(message["content"], text)})
        in_results = True
    return _with_tools_described(ready, tools, _IN_JSON)


def tools_told(
    messages: list[Message], tools: Sequence[Message], form: CallFormat
) -> list[Message]:
    """The conversation with a system message that describes the tools and the format of calls.

    May change the given messages.
    """
    return _with_tools_described(
        messages, tools, _IN_SYNTAX.format(example=form.write(_EXAMPLE).strip())
    )


def _with_tools_described(
    messages: list[Message], tools: Sequence[Message], how_to_call: str
) -> list[Message]:
    if not tools:
        return messages
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
    """The text as message content of the same kind as `content` (string or list of parts).

    Some templates accept only one of the two kinds.
    """
    return [_text_part(text)] if isinstance(content, list) else text


def _append(message: Message, text: str) -> None:
    content = message["content"]
    if isinstance(content, list):
        message["content"] = [*content, _text_part(text)]
    else:
        message["content"] = content + text
