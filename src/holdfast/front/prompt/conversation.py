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
_TOOL_LIST = """\
# Tools

You may call functions. These are there, as JSON, one per line:
<tools>
{tools}
</tools>

"""
_HOW_TO_CALL_IN_JSON = """\
To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, once for each call:
<tool_call>
{"name": "the name", "arguments": {"an argument": "its value"}}
</tool_call>
Write nothing behind the last call. The results come back between <tool_response> and </tool_response>."""
_HOW_TO_CALL_IN_SYNTAX = """\
To call functions, use exactly this format, with their own names and arguments. Two calls look like this:
{example}
Write nothing after the last call. You will then be given the results."""
_EXAMPLE_CALLS: Final = (
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
    """As `template_message`, but makes a new message at each call."""
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
    """The content of a message as the template expects it: one text, or a list of text parts."""
    if content is None:
        parts = []
    elif isinstance(content, str):
        parts = [content]
    elif isinstance(content, list | tuple):
        parts = [_part(part, field=f"{field}.{index}") for index, part in enumerate(content)]
    else:
        raise InvalidRequest("content must be a string or a list of parts", field=field)
    return [_text_part(part) for part in parts] if keep_parts else "\n".join(parts)


def _part(part: Any, *, field: str) -> str:
    """The text of a content part. field: the request field of the part, for errors."""
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
    """The calls of a message, each with its arguments as the template expects them."""
    if not isinstance(calls, list | tuple):
        raise InvalidRequest("tool_calls must be a list", field=field)
    template_calls = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequest(
                "a tool call must have a function with a name", field=f"{field}.{index}.function"
            )
        convert_arguments = _arguments_text if arguments_as_text else arguments_object
        arguments = convert_arguments(function.get("arguments"))
        template_calls.append({**call, "function": {**function, "arguments": arguments}})
    return template_calls


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
    accepted: list[Message] = []
    for message in messages:
        role_before = accepted[-1]["role"] if accepted else ""
        is_first = role_before in ("", "system")
        accepts_system = habits.system and (habits.system_anywhere or is_first)
        if message["role"] == "system" and not accepts_system:
            message = {**message, "role": "user"}
        is_joined = role_before == "system" or (role_before == "user" and joins_users)
        if message["role"] == role_before and is_joined:
            accepted[-1] = {
                **message,
                "content": _joined_contents(accepted[-1]["content"], message["content"]),
            }
        elif message["role"] == "assistant" and is_first and not habits.same_in_a_row:
            accepted += [{"role": "user", "content": message["content"][:0]}, message]
        else:
            accepted.append(message)
    return accepted


def _joined_contents(first: Any, second: Any) -> Any:
    """The content of two messages that become one. Both are texts, or both are lists of parts."""
    return [*first, *second] if isinstance(first, list) else f"{first}\n\n{second}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolHabits:
    """What a chat template requires of a conversation with tool calls.

    Here, a *result* is the message with what a called tool returned.
    """

    id_form: IdForm = "random"  # the form of call ids that the template accepts
    # the template accepts several calls in one answer; otherwise each call becomes a separate
    # answer, followed by its result
    parallel: bool = True
    # if set: the template omits calls, so they are written into the answer's text in this format
    written_calls_format: CallFormat | None = None
    # if set: the template does not know tools, so tools, calls and results become text, with calls
    # in this format
    tools_in_text_format: CallFormat | None = None
    # if set: the template does not render tools, but names this call format, so the system message
    # describes the tools
    described_tools_format: CallFormat | None = None
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
        return self.tools_in_text_format is not None or self.described_tools_format is not None


@dataclass(slots=True, eq=False)
class _CallingTurn:
    """An answer with calls, and the result of each call, if there is one."""

    answer: Message
    calls: list[Message]
    # one entry for each call: its result, or None while the result is not found
    results: list[Message | None] = field(default_factory=list)


_CallPlace: TypeAlias = tuple[_CallingTurn, int]
"""A call: the answer that contains it, and its index among the calls of this answer."""


def with_habits(messages: Iterable[Message], habits: ToolHabits) -> list[Message]:
    """Bring calls and results into the form that the template requires.

    May change the given messages.
    """
    messages = list(messages)
    if not any("tool_calls" in each or each["role"] == "tool" for each in messages):
        return messages
    adapted: list[Message] = []
    call_numbers = count()
    for turn in _turns_with_results(messages):
        if not isinstance(turn, _CallingTurn):
            adapted.append(turn)
            continue
        _set_call_ids(turn, habits.id_form, call_numbers)
        if not habits.thought_beside_text and turn.answer["content"]:
            turn.answer = {
                key: value for key, value in turn.answer.items() if key not in REASONING_FIELDS
            }
        adapted += (
            _with_all_calls(turn)
            if habits.parallel or len(turn.calls) == 1
            else _with_one_message_per_call(turn)
        )
    if habits.written_calls_format is not None:
        for message in adapted:
            if "tool_calls" in message:
                _write_calls(message, habits.written_calls_format)
    if habits.answer_after_results is not None:
        adapted = list(_with_answers_between(adapted, habits.answer_after_results))
    return adapted


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


def _turns_with_results(messages: Sequence[Message]) -> Iterator[Message | _CallingTurn]:
    """The messages, with the results of calls moved to their answers.

    A result is moved no further than to the answer before it, because an earlier prompt must stay a
    prefix of later ones. A call without a result gets an empty one, because many templates tell
    results apart only by their order. Other results become user messages.
    """
    call_names: dict[str, str] = {}  # of the calls so far, by id
    index = 0
    while index < len(messages):
        start = index
        while index < len(messages) and messages[index]["role"] == "assistant":
            index += 1
        answers = messages[start:index]
        start = index
        while index < len(messages) and messages[index]["role"] != "assistant":
            index += 1
        following = messages[start:index]
        turns = [_CallingTurn(each, each.get("tool_calls") or []) for each in answers]
        for turn in turns:
            turn.results = [None for _ in turn.calls]
            call_names |= {str(call.get("id")): call["function"]["name"] for call in turn.calls}
        results = [each for each in following if each["role"] == "tool"]
        unmatched_results = _assign_results(results, turns) if results else []
        for turn in turns:
            is_last = turn is turns[-1] and index == len(messages) and not following
            if turn.calls and not is_last:
                _fill_missing_results(turn)
            yield turn if turn.calls else turn.answer
        yield from (_as_user_message(each, call_names) for each in unmatched_results)
        yield from (each for each in following if each["role"] != "tool")


def _assign_results(results: Sequence[Message], turns: Sequence[_CallingTurn]) -> list[Message]:
    """Assign results to the calls of answers. Returns the results that answer none of them.

    A result with an id answers the call with this id. A result without an id answers the first call
    of its name without a result. A second result of a call is appended to the first.
    """
    calls = _CallIndex(turns)
    unmatched: list[Message] = []
    for result in results:
        call_place = calls.answered_by(result)
        if call_place is None:
            unmatched.append(result)
            continue
        turn, call_index = call_place
        earlier_result = turn.results[call_index]
        if earlier_result is not None:
            result = {
                **earlier_result,
                "content": _joined_contents(earlier_result["content"], result["content"]),
            }
        turn.results[call_index] = result
    return unmatched


class _CallIndex:
    """The calls of some answers, to be found by their ids and names in constant time: a request may
    have thousands.
    """

    def __init__(self, turns: Sequence[_CallingTurn]) -> None:
        self._by_id: defaultdict[str, deque[_CallPlace]] = defaultdict(deque)
        self._by_name: defaultdict[str | None, deque[_CallPlace]] = defaultdict(deque)  # None: all
        for turn in turns:
            for call_index, call in enumerate(turn.calls):
                self._by_id[str(call.get("id"))].append((turn, call_index))
                self._by_name[call["function"]["name"]].append((turn, call_index))
                self._by_name[None].append((turn, call_index))

    def answered_by(self, result: Message) -> _CallPlace | None:
        """The call that a result answers; None if there is none. Calls that have a result are dropped
        from the front of a queue, but the last call with an id stays, for a second result.
        """
        call_id = result.get("tool_call_id")
        if call_id:
            calls_with_id = self._by_id.get(str(call_id), deque())
            while len(calls_with_id) > 1 and _has_result(calls_with_id[0]):
                calls_with_id.popleft()
            return calls_with_id[0] if calls_with_id else None
        name = result.get("name") or result.get("tool_name")
        calls_with_name = self._by_name.get(None if name is None else str(name), deque())
        while calls_with_name and _has_result(calls_with_name[0]):
            calls_with_name.popleft()
        return calls_with_name[0] if calls_with_name else None


def _has_result(place: _CallPlace) -> bool:
    turn, at = place
    return turn.results[at] is not None


def _fill_missing_results(turn: _CallingTurn) -> None:
    """Give an empty result to each call that has none."""
    empty_result = {"role": "tool", "content": _in_form_of(turn.answer["content"], "")}
    turn.results = [dict(empty_result) if each is None else each for each in turn.results]


def _as_user_message(result: Message, call_names: Mapping[str, str]) -> Message:
    """A user message for a result that answers no call of the latest answer.

    call_names: the names of all calls so far, by id.
    """
    name = call_names.get(str(result.get("tool_call_id"))) or result.get("name")
    note = f"[The result of an earlier call of {name}:]" if name else _UNKNOWN_CALL
    content = result["content"]
    marked_content = (
        [_text_part(note), *content] if isinstance(content, list) else f"{note}\n{content}"
    )
    return {"role": "user", "content": marked_content}


def _set_call_ids(turn: _CallingTurn, form: IdForm, call_numbers: Iterator[int]) -> None:
    """Give the calls of a turn ids in the form that the template expects, and their results the
    same.

    call_numbers: yields the number of each call in the conversation.
    """
    for call, result in zip(turn.calls, turn.results, strict=True):
        name = call["function"]["name"]
        call["id"] = _id_in_form(
            form, str(call.get("id") or ""), name=name, number=next(call_numbers)
        )
        call.setdefault("type", "function")
        if result is not None:
            result["tool_call_id"] = call["id"]
            result.setdefault("name", name)


def _id_in_form(form: IdForm, client_id: str, *, name: str, number: int) -> str:
    """The id of a call as the model sees it.

    This is the client's id, unless the model's family uses ids of another form.
    """
    if form == "alnum9":
        return (
            client_id
            if _ALNUM9.fullmatch(client_id)
            else _nine_characters_of(client_id or f"{name}:{number}")
        )
    if form == "function_number":
        return client_id if _FUNCTION_NUMBER.fullmatch(client_id) else f"functions.{name}:{number}"
    if form == "number":
        return str(number)
    return client_id or f"call_{number}"


def _nine_characters_of(text: str) -> str:
    """Nine letters and digits that are always the same for a text."""
    value = int.from_bytes(blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest())
    return "".join(_LETTERS[value // 62**digit % 62] for digit in range(9))


def _with_all_calls(turn: _CallingTurn) -> list[Message]:
    """One message with all calls, followed by their results in the order of the calls: templates
    without ids tell results apart by their order alone.
    """
    return [turn.answer, *(result for result in turn.results if result is not None)]


def _with_one_message_per_call(turn: _CallingTurn) -> list[Message]:
    """One message per call, followed by its result; the text is in the first message only."""
    messages: list[Message] = []
    next_answer = turn.answer
    for call, result in zip(turn.calls, turn.results, strict=True):
        messages.append({**next_answer, "tool_calls": [call]})
        if result is not None:
            messages.append(result)
        # without text, in the same form
        next_answer = {"role": "assistant", "content": next_answer["content"][:0]}
    return messages


def _with_answers_between(messages: Iterable[Message], answer_text: str) -> Iterator[Message]:
    """Put an answer with this text between each result and a user message right after it."""
    role_before = ""
    for message in messages:
        if role_before == "tool" and message["role"] == "user":
            yield {"role": "assistant", "content": answer_text}
        yield message
        role_before = message["role"]


def tools_in_text(
    messages: Iterable[Message], tools: Sequence[Message], form: CallFormat
) -> list[Message]:
    """The conversation with tools, calls and results as ordinary text. May change the messages.

    The results of one turn become one user message.
    """
    text_messages: list[Message] = []
    is_after_result = False
    for message in messages:
        if message.get("tool_calls"):
            _write_calls(message, form)
        if message["role"] != "tool":
            is_after_result = False
            text_messages.append(message)
            continue
        text = f"<tool_response>\n{_text(message['content'])}\n</tool_response>"
        if is_after_result:
            _append_text(text_messages[-1], "\n" + text)
        else:
            text_messages.append({"role": "user", "content": _in_form_of(message["content"], text)})
        is_after_result = True
    return _with_tools_in_system_message(text_messages, tools, _HOW_TO_CALL_IN_JSON)


def with_tools_described(
    messages: list[Message], tools: Sequence[Message], form: CallFormat
) -> list[Message]:
    """The conversation with a system message that describes the tools and the format of calls.

    May change the given messages.
    """
    return _with_tools_in_system_message(
        messages, tools, _HOW_TO_CALL_IN_SYNTAX.format(example=form.write(_EXAMPLE_CALLS).strip())
    )


def _with_tools_in_system_message(
    messages: list[Message], tools: Sequence[Message], how_to_call: str
) -> list[Message]:
    """The conversation with a list of the tools and these instructions on how to call them, at the
    end of a leading system message or in a new one.
    """
    if not tools:
        return messages
    tool_lines = "\n".join(
        json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools
    )
    description = _TOOL_LIST.format(tools=tool_lines) + how_to_call
    first = messages[0]
    if first["role"] != "system":
        return [
            {"role": "system", "content": _in_form_of(first["content"], description)},
            *messages,
        ]
    _append_text(first, "\n\n" + description if _text(first["content"]) else description)
    return messages


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _in_form_of(content: Any, text: str) -> Any:
    """The text as message content of the same kind as `content` (string or list of parts).

    Some templates accept only one of the two kinds.
    """
    return [_text_part(text)] if isinstance(content, list) else text


def _append_text(message: Message, text: str) -> None:
    """Add a text to the end of a message's content."""
    content = message["content"]
    if isinstance(content, list):
        message["content"] = [*content, _text_part(text)]
    else:
        message["content"] = content + text
