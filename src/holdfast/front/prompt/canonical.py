"""Brings conversations into canonical form, so that a later turn shares the prefix of an earlier
one.

Clients change a prompt unintentionally between turns: the key order of tool definitions and call
arguments (some languages shuffle it with every request), whether a text is one string or several
parts, whether content is null, empty or missing, and accounting headers in the system prompt.
"""

from __future__ import annotations

import copy
import hashlib
import json
import marshal
import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import msgspec

from holdfast.front.prompt.beginnings import Beginnings
from holdfast.front.prompt.conversation import (
    REASONING_FIELDS,
    Message,
    changeable,
    reasoning_of,
)
from holdfast.front.prompt.images import content_texts, joined
from holdfast.front.prompt.known_answers import (
    KnownAnswers,
    PastAnswers,
    SentAnswer,
    canonical_arguments,
)
from holdfast.front.prompt.template import ChatTemplate
from holdfast.front.prompt.tokenize import ControlGuard, guarded_value
from holdfast.front.prompt.tool_definitions import (
    MARSHAL_VERSION,
    KeptPart,
    exact_key,
    in_usual_order,
    made_once,
)
from holdfast.front.request import ChatPrompt
from holdfast.lru_cache import LruCache, bytes_of

# Claude Code puts a header that changes with every request before its system prompt.
_ACCOUNTING_NAME = "x-anthropic-billing-header:"
_ACCOUNTING = re.compile(rf"^{_ACCOUNTING_NAME}[^\n]*(?:\n+|\Z)", re.MULTILINE)
# how clients join the parts of a system prompt; the first separator is the one we use
_SEPARATORS = ("\n", "\n\n", "", " ")
_ENTRY_OVERHEAD_BYTES = 256  # overhead of an entry, on top of its text
_MESSAGE_OVERHEAD_BYTES = 400  # overhead of a message of a conversation
_COPIES_OF_PART = 3  # a part is stored as sent, with control tokens broken up, and as JSON
_CONVERSATIONS_DIVISOR = 2  # the memory for conversations is `max_bytes` divided by this
_PACKED_HEAD_BYTES = 5  # of a packed tuple: its type and length
_REFERENCE = "tool_reference"
_SYSTEM = frozenset({"system", "developer"})
_NAMES = frozenset({"name", "tool_name"})
_UNGUARDED = ControlGuard(())  # breaks up no text


class FirstForms:
    """Remembers each part of a conversation in the form in which it was first sent. Thread-safe.

    A client may send a tool definition or the arguments of a call again with another key order, or
    a system prompt first in parts and then as one text. The methods then return the first form. The
    least recently used parts are forgotten.
    """

    def __init__(self, *, max_bytes: int = 16_000_000) -> None:
        # Maps a hash of the content to its first form, and a hash of the exact text sent to the
        # hash of the content.
        self._forms: LruCache[bytes, Any] = LruCache(max_bytes)
        # results of `message`, by the hash of the exact message and what else they depend on
        self._messages: LruCache[tuple[bytes, Hashable], ReadyMessage] = LruCache(max_bytes)
        # the messages of long conversations, by the packed conversation
        self._conversations: Beginnings[bytes, _Conversation] = Beginnings(
            max_bytes // _CONVERSATIONS_DIVISOR
        )

    def tool(self, tool: Mapping[str, Any], *, tenant: str = "") -> dict[str, Any]:
        """A tool definition with its keys in their first order."""
        exact_hash = exact_key(tool, tenant=tenant)
        known_form = None if exact_hash is None else self._known_form(exact_hash)
        if known_form is not None:
            return cast(KeptPart, known_form)
        try:
            ordered_tool = copy.deepcopy(in_usual_order(tool))  # the caller may change the original
            content = json.dumps(ordered_tool, sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # not JSON
            return dict(tool)
        content_hash = _hash_of(tenant, "tool", content)
        first_form = self._first_form(
            content_hash, KeptPart(ordered_tool), _COPIES_OF_PART * len(content)
        )
        if exact_hash is not None:
            self._first_form(exact_hash, content_hash, 0)
        return cast(KeptPart, first_form)

    def message(
        self,
        message: Any,
        make: Callable[[Any], ReadyMessage],
        *,
        depends_on: Hashable,
        tenant: str = "",
    ) -> ReadyMessage:
        """The result of `make` for a message, which is kept: the same message gives the same object
        later, without another call of `make`.

        depends_on: everything else that the result depends on.
        """
        exact_hash = exact_key(message, tenant=tenant)
        known_message = None if exact_hash is None else self._messages.get((exact_hash, depends_on))
        if known_message is not None:
            return known_message
        ready = make(message)
        if exact_hash is None or not isinstance(ready.message, dict):
            return ready
        size = _COPIES_OF_PART * len(marshal.dumps(ready.message)) + _ENTRY_OVERHEAD_BYTES
        ready = ready._replace(message=KeptPart(ready.message))
        return self._messages.get_or_put((exact_hash, depends_on), ready, size=size)

    def beginning(
        self, messages: Sequence[Any], *, depends_on: Hashable, tenant: str
    ) -> _Beginning:
        """What a conversation has in common with an earlier one. depends_on: as for `message`."""
        return _Beginning(self._conversations, messages, depends_on=depends_on, tenant=tenant)

    def call(self, call: Any, *, tenant: str = "") -> Any:
        """An earlier call, with its arguments in their first form if they are JSON text."""
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            return call
        arguments, call_id = function.get("arguments"), call.get("id")
        if isinstance(arguments, str) and isinstance(call_id, str) and call_id:
            normalized = canonical_arguments(arguments)
            arguments = self._first_arguments(arguments, normalized, call_id=call_id, tenant=tenant)
        return {**call, "function": {**function, "arguments": arguments}}

    def remember_arguments(self, arguments: str, *, call_id: str, tenant: str = "") -> None:
        """Remember the arguments of a new call (JSON text) as their first form."""
        normalized = canonical_arguments(arguments)
        self._first_arguments(arguments, normalized, call_id=call_id, tenant=tenant)

    def _first_arguments(
        self, arguments: str, normalized: str, *, call_id: str, tenant: str
    ) -> str:
        """The arguments of a call in their first form.

        normalized: the arguments in one spelling, by which equal arguments are recognized.
        """
        key = _hash_of(tenant, "call", call_id, normalized)
        return cast(str, self._first_form(key, arguments, len(arguments)))

    def system_text(self, parts: Sequence[str], *, tenant: str = "") -> str:
        """The parts of a system prompt joined into one text.

        If the same text was sent before with other separators, that first text is returned.
        """
        candidates = list(parts)
        if len(parts) > 1:
            candidates = [separator.join(parts) for separator in _SEPARATORS]
        keys = [_hash_of(tenant, "system", candidate) for candidate in candidates]
        known_texts = (self._forms.get(key) for key in keys)
        text = next((each for each in known_texts if each is not None), "".join(candidates[:1]))
        for key in keys:
            self._first_form(key, text, len(text))
        return text

    def check_invariants(self) -> None:
        """Assert that the bytes are counted correctly and within their limits."""
        self._forms.check_invariants()
        self._messages.check_invariants()
        self._conversations.check_invariants()
        for each in (known.value for known in self._conversations.items()):
            assert len(each.ends) == len(each.sizes) == len(each.ready), (
                "the messages are counted wrongly"
            )

    def _known_form(self, exact_hash: bytes) -> Any:
        """The first form of a part, given the hash of the exact text sent; None if it is new."""
        content_hash = self._forms.get(exact_hash)
        return None if content_hash is None else self._forms.get(content_hash)

    def _first_form(self, key: bytes, new_form: Any, size: int) -> Any:
        """The form that is remembered under a key; if there is none, the new form, which is
        remembered then.
        """
        return self._forms.get_or_put(key, new_form, size=size + _ENTRY_OVERHEAD_BYTES)


def _hash_of(*parts: str) -> bytes:
    """A hash that identifies these texts as the key of a cache entry."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class ReadyMessage(NamedTuple):
    """A message in canonical form.

    answer: set if it may be an answer whose generated tokens are known. adapted: the message as the
    chat template expects it; set in a conversation that is rendered.
    """

    message: Any
    answer: SentAnswer | None
    adapted: Message | None = None


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a conversation, and where each ends in the packed conversation, which is the
    output of `marshal` for all of them.

    depends_on: everything else that the messages depend on.
    """

    depends_on: Hashable
    ends: Sequence[int]  # offsets in bytes, one for each message
    sizes: Sequence[int]  # bytes held for the messages up to each
    ready: Sequence[ReadyMessage]  # the messages in their first forms


class _Beginning:
    """The messages that a conversation shares with an earlier one of its tenant.

    The packed messages follow one another, so a later turn begins with the bytes of an earlier one.
    messages: the shared ones, in canonical form.
    """

    def __init__(
        self,
        conversations: Beginnings[bytes, _Conversation],
        sent_messages: Sequence[Any],
        *,
        depends_on: Hashable,
        tenant: str,
    ) -> None:
        self._conversations = conversations
        self._sent_messages = sent_messages
        self._depends_on = depends_on
        self._tenant = tenant
        try:
            self._packed_messages = marshal.dumps(tuple(sent_messages), MARSHAL_VERSION)[
                _PACKED_HEAD_BYTES:
            ]
        except ValueError:  # not JSON
            self._packed_messages = b""
        self._earlier, self._shared_bytes = conversations.closest(
            self._packed_messages, tenant=tenant
        )
        self.messages: Sequence[ReadyMessage] = ()
        self._ends: Sequence[int] = ()
        self._sizes: Sequence[int] = ()
        if self._earlier is not None and self._earlier.value.depends_on == depends_on:
            earlier = self._earlier.value
            shared_count = bisect_right(earlier.ends, self._shared_bytes)
            self.messages = earlier.ready[:shared_count]
            self._ends = earlier.ends[:shared_count]
            self._sizes = earlier.sizes[:shared_count]

    def keep(self, ready: Sequence[ReadyMessage]) -> None:
        """Remember the conversation. ready: its messages, or the first ones.

        The packed conversation and the messages are counted, the latter as if `FirstForms` had
        forgotten them, but not the values that are derived from them later. Later turns measure only
        their new messages.
        """
        if not self._packed_messages:
            return
        ends = list(self._ends[: len(ready)])  # a message to be continued is not kept
        sizes = list(self._sizes[: len(ready)])
        for index in range(len(ends), len(ready)):
            length = len(marshal.dumps(self._sent_messages[index], MARSHAL_VERSION))
            ends.append(length + (ends[-1] if ends else 0))
            size = bytes_of(ready[index]) + _MESSAGE_OVERHEAD_BYTES
            sizes.append(size + (sizes[-1] if sizes else 0))
        self._conversations.remember(
            self._packed_messages,
            _Conversation(self._depends_on, ends, sizes, ready),
            size=len(self._packed_messages) + (sizes[-1] if sizes else 0),
            tenant=self._tenant,
            after=self._earlier,
            shared=self._shared_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CanonicalForm:
    """Converts conversations to the form that is cached.

    guard: breaks up control texts in every text that a client can write. Otherwise a tool result
        that contains `<|im_end|>` would end its message. Afterwards, only the template writes
        control texts, with one exception: a message to be continued may begin with a thought.
    thought: the markers around a thought.
    moves_thoughts: whether thoughts that clients send in the text of answers are moved to the
        reasoning field.
    past_answers: recalls the known answers, and adds the thoughts that the client left out.
    template: None: no messages for a template are made.
    request_field: that of the messages, for errors.
    """

    forms: FirstForms
    guard: ControlGuard = _UNGUARDED
    thought: tuple[str, str] = ("", "")
    moves_thoughts: bool = False
    past_answers: PastAnswers = field(default_factory=lambda: PastAnswers(KnownAnswers()))
    template: ChatTemplate | None = None
    request_field: str = "messages"
    tenant: str = ""

    def of(self, prompt: ChatPrompt) -> tuple[ChatPrompt, list[Message]]:
        """The conversation in canonical form, and its messages as the template expects them
        (`ChatTemplate.adapted`), both made in one walk.

        If the client lets the model search for tools, the definition of a found tool is written
        into the message that reports the tool. Raises InvalidRequest for a message that no template
        could use.
        """
        tools = tuple(
            self.forms.tool(tool, tenant=self.tenant) if isinstance(tool, Mapping) else tool
            for tool in prompt.tools
        )
        messages = self._messages(prompt, tools)
        canonical_prompt = msgspec.structs.replace(
            prompt,
            messages=tuple(each.message for each in messages),
            tools=tuple(_guarded_tool(tool, self.guard) for tool in tools),
            found_tools=tuple(map(self.guard, prompt.found_tools)),
            template_options=guarded_value(prompt.template_options, self.guard),
        )
        return canonical_prompt, [each.adapted for each in messages if each.adapted is not None]

    def _messages(self, prompt: ChatPrompt, tools: Sequence[Any]) -> list[ReadyMessage]:
        """The messages in canonical form, and adapted to the template."""
        definitions = _functions_by_name(tools, prompt.found_tools)
        beginning = self.forms.beginning(
            () if definitions else prompt.messages,
            depends_on=(self.guard, self.moves_thoughts, self.template),
            tenant=self.tenant,
        )
        kept_messages: list[ReadyMessage] = []
        messages: list[ReadyMessage] = []
        for index, message in enumerate(prompt.messages):
            field = f"{self.request_field}.{index}"
            if prompt.continue_last and index == len(prompt.messages) - 1:
                ready = self._ready(_with_definitions(message, definitions), is_continued=True)
            else:
                if index < len(beginning.messages):
                    ready = beginning.messages[index]
                else:
                    ready = self._first_form(_with_definitions(message, definitions), field)
                kept_messages.append(ready)
            messages.append(self._complete(ready, field))
        beginning.keep(kept_messages)
        return messages

    def _first_form(self, message: Any, field: str) -> ReadyMessage:
        """A message that is not continued, in its first form."""
        ready = self.forms.message(
            message, self._ready, depends_on=(self.guard, self.moves_thoughts), tenant=self.tenant
        )
        if self.template is None:
            return ready
        return ready._replace(adapted=self.template.adapted(ready.message, field=field))

    def _ready(self, message: Any, *, is_continued: bool = False) -> ReadyMessage:
        """Bring a message into canonical form, with control texts broken up.

        is_continued: whether the model is to continue this message.
        """
        unguarded = _canonical_message(message, self.forms, self.tenant)
        if self.moves_thoughts and not is_continued:
            unguarded = _with_separate_thought(unguarded, *self.thought)
        guarded = _guarded_message(unguarded, self.guard)
        if is_continued and self.thought[0]:
            guarded = _with_open_thought(guarded, unguarded, self.guard, *self.thought)
        answer = self.past_answers.known_answers.sent_answer(unguarded, tenant=self.tenant)
        return ReadyMessage(guarded, answer)

    def _complete(self, ready: ReadyMessage, field: str) -> ReadyMessage:
        """Add the thought that the client left out, and adapt the message to the template."""
        message, answer, adapted = ready
        if answer is not None and (reasoning := self.past_answers.recall(answer)):
            message = {**message, REASONING_FIELDS[0]: self.guard(reasoning)}
            adapted = None
        if self.template is not None:
            adapted = changeable(adapted or self.template.adapted(message, field=field))
        return ReadyMessage(message, answer, adapted)


def _functions_by_name(tools: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """The definitions of the tools with these names, by name."""
    functions = (tool["function"] for tool in tools if names)
    return {each["name"]: each for each in functions if each["name"] in names}


def _with_definitions(message: Any, definitions: dict[str, Any]) -> Any:
    """The message with each tool reference replaced by the definition of the tool, as text.

    definitions: by tool name. One that was written is removed, so that later references do not
        repeat it.
    """
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(map(_is_reference, content)):
        return message
    parts = [
        _definition(part["tool_name"], definitions) if _is_reference(part) else part
        for part in content
    ]
    return {**message, "content": parts}


def _is_reference(part: Any) -> bool:
    """Whether a content part refers to the tool that the model has searched for and found."""
    return (
        isinstance(part, dict)
        and part.get("type") == _REFERENCE
        and isinstance(part.get("tool_name"), str)
    )


def _definition(name: str, definitions: dict[str, Any]) -> dict[str, str]:
    """The part that tells the model about a tool. Its definition is taken out of `definitions`, so
    that it is written only once.
    """
    text = f"The tool {name} can be called from now on."
    if name in definitions:
        text += f" This is its definition:\n{json.dumps(definitions.pop(name), ensure_ascii=False)}"
    return {"type": "text", "text": text}


def _canonical_message(message: Any, forms: FirstForms, tenant: str) -> Any:
    """The message with its text as one string, in which images are marks.

    Content that no template can use is left unchanged, so that an error can name it.
    """
    if not isinstance(message, dict):
        return message
    canonical_message = dict(message)
    parts = content_texts(message.get("content"))
    if parts is not None and message.get("role") in _SYSTEM:
        text = forms.system_text(_without_accounting(parts), tenant=tenant)
        canonical_message["content"] = text or None
    elif parts is not None:
        canonical_message["content"] = joined(parts) or None
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        canonical_message["tool_calls"] = [forms.call(call, tenant=tenant) for call in calls]
    return canonical_message


def _without_accounting(parts: Sequence[str]) -> list[str]:
    """The parts without accounting headers. A part that was nothing else is left out."""
    kept_parts = []
    for part in parts:
        remaining_text = _ACCOUNTING.sub("", part) if _ACCOUNTING_NAME in part else part
        if remaining_text == part or remaining_text.strip():
            kept_parts.append(remaining_text)
    return kept_parts


def _guarded_message(message: Any, guard: ControlGuard) -> Any:
    """The message with control texts broken up in all of its texts, names and call arguments."""
    if not isinstance(message, dict):
        return message
    guarded = {
        key: guarded_value(value, guard.name if key in _NAMES else guard)
        for key, value in message.items()
        if key != "tool_calls"
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        guarded["tool_calls"] = [_guarded_call(call, guard) for call in calls]
    return guarded


def _guarded_call(call: Any, guard: ControlGuard) -> Any:
    """The call with control texts broken up in its name, arguments and other fields."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return guarded_value(call, guard)
    guarded = guarded_value({**call, "function": None}, guard)
    guarded["function"] = {
        **guarded_value({**function, "arguments": None}, guard),
        "name": guarded_value(function.get("name"), guard.name),
        "arguments": _guarded_arguments(function.get("arguments"), guard),
    }
    return guarded


def _guarded_arguments(arguments: Any, guard: ControlGuard) -> Any:
    """The arguments of a call, as JSON text if they were sent as such.

    A template may write keys into tags. It may also parse the text, which would turn an escaped
    control text into a real one.
    """
    if not isinstance(arguments, str):
        return _guarded_keys(arguments, guard)
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return guard(arguments)
    guarded = _guarded_keys(value, guard)
    # The text may have more than the value: of members with the same key, only the last one counts.
    is_unchanged = guarded == value and guard(arguments) == arguments
    return arguments if is_unchanged else json.dumps(guarded, ensure_ascii=False)


def _guarded_keys(value: Any, guard: ControlGuard) -> Any:
    """A JSON value with its strings guarded, and its keys guarded as names."""
    if isinstance(value, Mapping):
        return {
            guarded_value(key, guard.name): _guarded_keys(each, guard)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [_guarded_keys(each, guard) for each in value]
    return guarded_value(value, guard)


def _with_open_thought(
    guarded_message: Any, message: Any, guard: ControlGuard, start: str, end: str
) -> Any:
    """The guarded message to be continued, with the markers of its leading thought restored."""
    content = message.get("content") if isinstance(message, dict) else None
    text_before, start_found, text_after = (
        content.partition(start) if isinstance(content, str) else ("", "", "")
    )
    if not start_found or text_before.strip():
        return guarded_message
    thought, end_found, text = text_after.partition(end)
    return {
        **guarded_message,
        "content": f"{text_before}{start_found}{guard(thought)}{end_found}{guard(text)}",
    }


def _guarded_tool(tool: Any, guard: ControlGuard) -> Any:
    """The definition with control texts broken up; made only once for a remembered definition."""
    if isinstance(tool, KeptPart):
        return made_once(tool, guard, lambda: KeptPart(guarded_value(tool, guard)))
    return guarded_value(tool, guard)


def _with_separate_thought(message: Any, start: str, end: str) -> Any:
    """The message with the thought at the beginning of its text moved to the reasoning field.

    start, end: the markers around a thought.
    """
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    content = message.get("content")
    if not isinstance(content, str) or reasoning_of(message):
        return message
    text_before, start_found, text_after = content.partition(start)
    thought, end_found, text = text_after.partition(end)
    if not start_found or not end_found or text_before.strip():
        return message
    return {**message, REASONING_FIELDS[0]: thought.strip("\n"), "content": text.lstrip("\n")}
