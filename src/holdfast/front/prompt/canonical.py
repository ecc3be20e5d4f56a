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
from dataclasses import dataclass
from functools import partial
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
_ENTRY_BYTES = 256  # overhead of an entry, on top of its text
_MESSAGE_BYTES = 400  # overhead of a message of a conversation
_COPIES_OF_PART = 3  # a part is stored as sent, with control tokens broken up, and as JSON
_SHARE = 2  # the conversations get this fraction of the memory
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
        self._conversations: Beginnings[bytes, _Conversation] = Beginnings(max_bytes // _SHARE)

    def tool(self, tool: Mapping[str, Any], *, tenant: str = "") -> dict[str, Any]:
        """A tool definition with its keys in their first order."""
        exact = exact_key(tool, tenant=tenant)
        known = None if exact is None else self._known(exact)
        if known is not None:
            return cast(KeptPart, known)
        try:
            ordered = copy.deepcopy(in_usual_order(tool))  # the caller may change the original
            content = json.dumps(ordered, sort_keys=True)
        except (TypeError, ValueError, RecursionError):  # not JSON
            return dict(tool)
        key = _key(tenant, "tool", content)
        first = self._first_of(key, KeptPart(ordered), _COPIES_OF_PART * len(content))
        if exact is not None:
            self._first_of(exact, key, 0)
        return cast(KeptPart, first)

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
        exact = exact_key(message, tenant=tenant)
        known = None if exact is None else self._messages.get((exact, depends_on))
        if known is not None:
            return known
        made = make(message)
        if exact is None or not isinstance(made.message, dict):
            return made
        size = _COPIES_OF_PART * len(marshal.dumps(made.message)) + _ENTRY_BYTES
        made = made._replace(message=KeptPart(made.message))
        return self._messages.get_or_put((exact, depends_on), made, size=size)

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
            settled = canonical_arguments(arguments)
            arguments = self._first_arguments(arguments, settled, call_id=call_id, tenant=tenant)
        return {**call, "function": {**function, "arguments": arguments}}

    def arguments(self, arguments: str, *, call_id: str, tenant: str = "") -> None:
        """Remember the arguments of a new call (JSON text) as their first form."""
        settled = canonical_arguments(arguments)
        self._first_arguments(arguments, settled, call_id=call_id, tenant=tenant)

    def _first_arguments(self, arguments: str, settled: str, *, call_id: str, tenant: str) -> str:
        key = _key(tenant, "call", call_id, settled)
        return cast(str, self._first_of(key, arguments, len(arguments)))

    def system_text(self, parts: Sequence[str], *, tenant: str = "") -> str:
        """The parts of a system prompt joined into one text.

        If the same text was sent before with other separators, that first text is returned.
        """
        ways = list(parts)
        if len(parts) > 1:
            ways = [separator.join(parts) for separator in _SEPARATORS]
        keys = [_key(tenant, "system", way) for way in ways]
        known = (self._forms.get(key) for key in keys)
        text = next((each for each in known if each is not None), "".join(ways[:1]))
        for key in keys:
            self._first_of(key, text, len(text))
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

    def _known(self, exact: bytes) -> Any:
        """The first form of a part, given the hash of the exact text sent; None if it is new."""
        key = self._forms.get(exact)
        return None if key is None else self._forms.get(key)

    def _first_of(self, key: bytes, form: Any, size: int) -> Any:
        return self._forms.get_or_put(key, form, size=size + _ENTRY_BYTES)


def _key(*parts: str) -> bytes:
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return hashlib.blake2b(text, digest_size=16).digest()


class ReadyMessage(NamedTuple):
    """A message in canonical form. answer: set if it may be a known answer. adapted: the message as
    the chat template expects it; set in a conversation that is rendered.
    """

    message: Any
    answer: SentAnswer | None
    adapted: Message | None = None


@dataclass(frozen=True, slots=True)
class _Conversation:
    """The messages of a conversation, and where each ends in the packed conversation.
    depends_on: everything else that they depend on. sizes: the memory of the messages up to each.
    """

    depends_on: Hashable
    ends: Sequence[int]  # offsets in bytes, one for each message
    sizes: Sequence[int]  # bytes held for the messages up to each
    ready: Sequence[ReadyMessage]  # the messages in their first forms


class _Beginning:
    """The messages that a conversation shares with an earlier one of its tenant.

    Packed messages follow one another, so a later turn begins with the bytes of an earlier one.
    """

    def __init__(
        self,
        known: Beginnings[bytes, _Conversation],
        sent: Sequence[Any],
        *,
        depends_on: Hashable,
        tenant: str,
    ) -> None:
        self._known = known
        self._sent = sent
        self._depends_on = depends_on
        self._tenant = tenant
        try:
            self._packed = marshal.dumps(tuple(sent), MARSHAL_VERSION)[_PACKED_HEAD_BYTES:]
        except ValueError:  # not JSON
            self._packed = b""
        self._earlier, self._shared = known.closest(self._packed, tenant=tenant)
        self.messages: Sequence[ReadyMessage] = ()
        self._ends: Sequence[int] = ()
        self._sizes: Sequence[int] = ()
        if self._earlier is not None and self._earlier.value.depends_on == depends_on:
            earlier = self._earlier.value
            begun = bisect_right(earlier.ends, self._shared)
            self.messages, self._ends = earlier.ready[:begun], earlier.ends[:begun]
            self._sizes = earlier.sizes[:begun]

    def keep(self, ready: Sequence[ReadyMessage]) -> None:
        """Remember the conversation. ready: its messages, or the first ones.

        The packed conversation and the messages are counted, the latter as if `FirstForms` had
        forgotten them, but not what is derived from them later (`made_once`). Later turns measure
        only their new messages.
        """
        if not self._packed:
            return
        ends = list(self._ends[: len(ready)])  # a message to be continued is not kept
        sizes = list(self._sizes[: len(ready)])
        for place in range(len(ends), len(ready)):
            length = len(marshal.dumps(self._sent[place], MARSHAL_VERSION))
            ends.append(length + (ends[-1] if ends else 0))
            size = bytes_of(ready[place]) + _MESSAGE_BYTES
            sizes.append(size + (sizes[-1] if sizes else 0))
        self._known.remember(
            self._packed,
            _Conversation(self._depends_on, ends, sizes, ready),
            size=len(self._packed) + (sizes[-1] if sizes else 0),
            tenant=self._tenant,
            after=self._earlier,
            shared=self._shared,
        )


def canonical(
    prompt: ChatPrompt,
    forms: FirstForms,
    *,
    guard: ControlGuard = _UNGUARDED,
    thought: tuple[str, str] = ("", ""),
    parts_thoughts: bool = False,
    past: PastAnswers | None = None,
    template: ChatTemplate | None = None,
    field: str = "messages",
    tenant: str = "",
) -> tuple[ChatPrompt, list[Message]]:
    """The conversation in the form that is cached, and its messages as the template expects them
    (`ChatTemplate.adapted`), both made in one walk.

    If the client lets the model search for tools, the definition of a found tool is written into
    the message that reports the tool. Raises InvalidRequest for a message that no template could
    use.

    guard: breaks up control texts in every text that a client can write. Otherwise a tool result
        that contains `<|im_end|>` would end its message. Afterwards, only the template writes
        control texts, with one exception: a message to be continued may begin with a thought.
    thought: the markers around a thought.
    parts_thoughts: whether thoughts that clients send in the text of answers are moved to the
        reasoning field.
    past: recalls the known answers, and adds the thoughts that the client left out.
    template: None: no messages for a template are made.
    field: the request field of the messages, for errors.
    """
    tools = tuple(
        forms.tool(tool, tenant=tenant) if isinstance(tool, Mapping) else tool
        for tool in prompt.tools
    )
    found = _found_functions(tools, prompt.found_tools)
    past = past or PastAnswers(KnownAnswers())
    make = partial(
        _ready, forms=forms, known=past.known, guard=guard, thought=thought, tenant=tenant
    )
    made = partial(make, parts_thoughts=parts_thoughts)
    depends_on = (guard, parts_thoughts)
    beginning = forms.beginning(
        () if found else prompt.messages, depends_on=(*depends_on, template), tenant=tenant
    )
    begun = beginning.messages
    kept: list[ReadyMessage] = []
    messages: list[Any] = []
    adapted: list[Message] = []
    for place, sent in enumerate(prompt.messages):
        at = f"{field}.{place}"
        if prompt.continue_last and place == len(prompt.messages) - 1:
            ready = make(_with_definitions(sent, found), is_continued=True)
        elif place < len(begun):
            ready = begun[place]
            kept.append(ready)
        else:
            message = _with_definitions(sent, found)
            ready = forms.message(message, made, depends_on=depends_on, tenant=tenant)
            if template is not None:
                ready = ready._replace(adapted=template.adapted(ready.message, field=at))
            kept.append(ready)
        shown, for_template = ready.message, ready.adapted
        if ready.answer is not None and (reasoning := past.recall(ready.answer)):
            shown = {**shown, REASONING_FIELDS[0]: guard(reasoning)}
            for_template = None
        messages.append(shown)
        if template is not None:
            adapted.append(changeable(for_template or template.adapted(shown, field=at)))
    beginning.keep(kept)
    made_prompt = msgspec.structs.replace(
        prompt,
        messages=tuple(messages),
        tools=tuple(_guarded_tool(tool, guard) for tool in tools),
        found_tools=tuple(map(guard, prompt.found_tools)),
        template_options=guarded_value(prompt.template_options, guard),
    )
    return made_prompt, adapted


def _found_functions(tools: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    functions = (tool["function"] for tool in tools if names)
    return {each["name"]: each for each in functions if each["name"] in names}


def _ready(
    message: Any,
    *,
    forms: FirstForms,
    known: KnownAnswers,
    guard: ControlGuard,
    thought: tuple[str, str],
    tenant: str,
    parts_thoughts: bool = False,
    is_continued: bool = False,
) -> ReadyMessage:
    ready = _canonical_message(message, forms, tenant)
    if parts_thoughts:
        ready = _with_thought_apart(ready, *thought)
    shown = _guarded_message(ready, guard)
    if is_continued and thought[0]:
        shown = _with_open_thought(shown, ready, guard, *thought)
    return ReadyMessage(shown, known.sent(ready, tenant=tenant))


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
    return (
        isinstance(part, dict)
        and part.get("type") == _REFERENCE
        and isinstance(part.get("tool_name"), str)
    )


def _definition(name: str, definitions: dict[str, Any]) -> dict[str, str]:
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
    ready = dict(message)
    parts = content_texts(message.get("content"))
    if parts is not None and message.get("role") in _SYSTEM:
        text = forms.system_text(_without_accounting(parts), tenant=tenant)
        ready["content"] = text or None
    elif parts is not None:
        ready["content"] = joined(parts) or None
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        ready["tool_calls"] = [forms.call(call, tenant=tenant) for call in calls]
    return ready


def _without_accounting(parts: Sequence[str]) -> list[str]:
    kept = []
    for part in parts:
        rest = _ACCOUNTING.sub("", part) if _ACCOUNTING_NAME in part else part
        if rest == part or rest.strip():
            kept.append(rest)
    return kept


def _guarded_message(message: Any, guard: ControlGuard) -> Any:
    if not isinstance(message, dict):
        return message
    ready = {
        key: guarded_value(value, guard.name if key in _NAMES else guard)
        for key, value in message.items()
        if key != "tool_calls"
    }
    calls = message.get("tool_calls")
    if isinstance(calls, list | tuple):
        ready["tool_calls"] = [_guarded_call(call, guard) for call in calls]
    return ready


def _guarded_call(call: Any, guard: ControlGuard) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return guarded_value(call, guard)
    ready = guarded_value({**call, "function": None}, guard)
    ready["function"] = {
        **guarded_value({**function, "arguments": None}, guard),
        "name": guarded_value(function.get("name"), guard.name),
        "arguments": _guarded_arguments(function.get("arguments"), guard),
    }
    return ready


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
    safe = _guarded_keys(value, guard)
    # The text may have more than the value: of members with the same key, only the last one counts.
    is_safe = safe == value and guard(arguments) == arguments
    return arguments if is_safe else json.dumps(safe, ensure_ascii=False)


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


def _with_open_thought(ready: Any, message: Any, guard: ControlGuard, start: str, end: str) -> Any:
    """The guarded message to be continued, with the markers of its leading thought restored."""
    content = message.get("content") if isinstance(message, dict) else None
    before, found, rest = content.partition(start) if isinstance(content, str) else ("", "", "")
    if not found or before.strip():
        return ready
    thought, closing, text = rest.partition(end)
    return {**ready, "content": f"{before}{found}{guard(thought)}{closing}{guard(text)}"}


def _guarded_tool(tool: Any, guard: ControlGuard) -> Any:
    if isinstance(tool, KeptPart):
        return made_once(tool, guard, lambda: KeptPart(guarded_value(tool, guard)))
    return guarded_value(tool, guard)


def _with_thought_apart(message: Any, start: str, end: str) -> Any:
    if not isinstance(message, dict) or message.get("role") != "assistant":
        return message
    content = message.get("content")
    if not isinstance(content, str) or reasoning_of(message):
        return message
    before, found, rest = content.partition(start)
    thought, closing, text = rest.partition(end)
    if not found or not closing or before.strip():
        return message
    return {**message, REASONING_FIELDS[0]: thought.strip("\n"), "content": text.lstrip("\n")}
