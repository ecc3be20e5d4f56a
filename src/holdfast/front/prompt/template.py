"""Chat templates: Jinja as `transformers` runs it, in a sandbox and in a process that can be ended,
compiled once.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from holdfast.errors import InvalidRequest, ModelLoadError
from holdfast.front.prompt.conversation import (
    Message,
    RoleHabits,
    ToolHabits,
    template_messages,
    tools_in_text,
    tools_told,
    with_habits,
    with_roles,
)
from holdfast.front.prompt.template_process import SandboxedTemplate
from holdfast.front.prompt.template_worker import RENDER_ERRORS
from holdfast.front.prompt.tool_definitions import KeptTool, complete_tool
from holdfast.models.tokenizer_files import named_special_tokens, read_json
from holdfast.wire.requests import RESERVED_TEMPLATE_ARGUMENTS, ChatPrompt

_MARK = "\ue0f1continue\ue0f2"  # private use: no text has it, no template strips it
_PROBE, _LATER = "probe7391", "probe8204"
_CHANGES_LISTS = re.compile(r"\.(?:append|pop)\(")
_FUNCTIONS = re.compile(r"\+ *functions\b")
_SYSTEM = frozenset({"system", "developer"})
_JUDGED = ("query", "document")  # roles that templates of models for ranking know


class ChatTemplate:
    """A model's chat template.

    Thread-safe; never call it on an event loop, because a render may take seconds.

    Rendering usually costs 10 to 35 µs per message, plus 0.1 ms for the exchange with another
    process.
    """

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """sources: the templates by name, "default" among them and "tool_use" if there is one.

        Raises ModelLoadError. Like everything here that renders, it also raises TemplateOverrun and
        RenderingUnavailable.
        """
        self._special_tokens = dict(special_tokens)
        self.sources = dict(sources)
        self._templates: dict[str, SandboxedTemplate] = {}
        self._roles, self._habits = RoleHabits(), ToolHabits()
        for name, source in sources.items():
            try:
                self._templates[name] = SandboxedTemplate(name, source)
            except TemplateError as error:
                raise ModelLoadError(
                    f"the chat template {name!r} is broken: {error.message}"
                ) from error
        self._keep_parts = not self._shows(_PROBE) and self._shows(
            [{"type": "text", "text": _PROBE}]
        )
        self._roles = self._probed_roles()
        # printed as Python would
        as_object = self._shows_call({"key": _PROBE}, spoiled=f"'{_PROBE}'")
        # JSON within JSON
        as_text = self._shows_call(json.dumps({"key": _PROBE}), spoiled=f'\\"{_PROBE}')
        self._arguments_as_text = as_text and not as_object

    def with_tool_habits(self, habits: ToolHabits) -> ChatTemplate:
        """The same template, for conversations with tools that are brought into this form first."""
        adapted = copy.copy(self)
        adapted._habits = habits
        return adapted

    @property
    def with_tools(self) -> str:
        """The source that is used for requests with tools."""
        return self.sources.get("tool_use", self.sources["default"])

    def render(self, prompt: ChatPrompt, *, field: str = "messages") -> str:
        """The conversation as the model's text. Raises InvalidRequest when the template refuses it."""
        if clash := sorted(RESERVED_TEMPLATE_ARGUMENTS & prompt.template_options.keys()):
            raise InvalidRequest(
                f"chat template options may not be named {', '.join(clash)}",
                field="chat_template_kwargs",
            )
        if prompt.continue_last and not _is_text_of_assistant(prompt.messages[-1]):
            raise InvalidRequest(
                "only a text of the assistant can be continued",
                field=f"{field}.{len(prompt.messages) - 1}",
            )
        messages = self._messages(prompt, field)
        if prompt.continue_last:
            _mark_last(messages)
        try:
            text = self._run_for(prompt, messages, answer=not prompt.continue_last)
        except RENDER_ERRORS as error:
            message = "the model's chat template refuses this conversation"
            # templates may quote what they refuse
            raise InvalidRequest(message, field=field, shown=f": {error}") from error
        return (
            self._before_mark(text, field)
            if prompt.continue_last
            else text.removesuffix(self._habits.left_to_model)
        )

    def opening(self, prompt: ChatPrompt, text: str) -> str:
        """What the template writes behind the last message of a rendered conversation to have it
        answered.
        """
        if prompt.continue_last:
            return ""
        asked = self._common(prompt, text, upto="")
        return text[asked:] if asked else ""

    def without_opening(self, prompt: ChatPrompt) -> str:
        """The conversation without what the template writes to have it answered; empty when the
        template refuses it.
        """
        try:
            return self._run_for(prompt, self._messages(prompt, ""), answer=False)
        except (*RENDER_ERRORS, InvalidRequest):
            return ""

    def branch_points(self, prompt: ChatPrompt, text: str) -> tuple[int, ...]:
        """Where in its rendered text (as characters) other prompts are likely to part from this
        one, ascending.

        Behind system prompt and tools, where another conversation begins; and behind the last
        message, since what the template writes to have it answered may not be what it writes in
        front of an answer of the past.
        """
        system = [message for message in prompt.messages if message.get("role") in _SYSTEM]
        probe = {"role": "user", "content": _PROBE}
        beginning = msgspec.structs.replace(prompt, messages=(*system, probe), continue_last=False)
        found = {self._common(beginning, text, upto=_PROBE)}
        if not prompt.continue_last:
            found.add(self._common(prompt, text, upto=""))
        return tuple(sorted(found - {0, len(text)}))

    def _common(self, prompt: ChatPrompt, text: str, *, upto: str) -> int:
        """Characters of a conversation, up to `upto` in it, with which a text begins; 0 if it does
        not begin with all of them.
        """
        try:
            other = self._run_for(prompt, self._messages(prompt, ""), answer=False)
        except (*RENDER_ERRORS, InvalidRequest):
            return 0
        if upto:
            other = other.partition(upto)[0]
        return len(other) if text.startswith(other) else 0

    def _messages(self, prompt: ChatPrompt, field: str) -> list[Message]:
        messages = template_messages(
            prompt.messages,
            keep_parts=self._keep_parts,
            arguments_as_text=self._arguments_as_text,
            field=field,
        )
        messages = with_habits(messages, self._habits)
        if self._habits.in_text is not None:
            messages = tools_in_text(messages, prompt.listed_tools, self._habits.in_text)
        elif self._habits.told is not None:
            messages = tools_told(messages, prompt.listed_tools, self._habits.told)
        return with_roles(messages, self._roles)

    def _run_for(self, prompt: ChatPrompt, messages: list[Message], *, answer: bool) -> str:
        tools = [tool if isinstance(tool, KeptTool) else dict(tool) for tool in prompt.listed_tools]
        tools = tools if self._habits.in_text is None and self._habits.told is None else []
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        if _CHANGES_LISTS.search(self.sources[name]):
            tools = copy.deepcopy(tools)  # they are kept for other requests
        try:
            return self._run(
                name, messages, tools=tools or None, options=prompt.template_options, answer=answer
            )
        except RENDER_ERRORS:
            if not tools:
                raise
            # Some templates take descriptions and types for granted.
            tools = [complete_tool(tool) for tool in prompt.listed_tools]
            return self._run(
                name, messages, tools=tools, options=prompt.template_options, answer=answer
            )

    def judging(self, *, instruction: str, query: str, document: str) -> str:
        """The text by which a model is asked to judge a document, where the template names roles
        for that; else empty.
        """
        if not all(re.search(rf"['\"]{role}['\"]", self.sources["default"]) for role in _JUDGED):
            return ""
        system = (
            [{"role": "system", "content": self._as_content(instruction)}] if instruction else []
        )
        messages = [
            *system,
            *({"role": role, "content": self._as_content(_PROBE + role)} for role in _JUDGED),
        ]
        try:
            text = self._run("default", messages, tools=None, options={}, answer=True)
        except RENDER_ERRORS:
            return ""
        if [text.count(_PROBE + role) for role in _JUDGED] != [1, 1]:
            return ""
        contents = {_PROBE + "query": query, _PROBE + "document": document}
        return re.sub("|".join(contents), lambda found: contents[found[0]], text)

    def behind_answer(self) -> str:
        """What the template writes behind an answer of the assistant; empty when it cannot be told."""
        answer = {"role": "assistant", "content": self._as_content(_PROBE)}
        _, shown, behind = self._try(
            [{"role": "user", "content": self._as_content("text")}, answer]
        ).rpartition(_PROBE)
        return behind if shown else ""

    def _run(
        self,
        name: str,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        answer: bool,
    ) -> str:
        variables = {
            **self._special_tokens,
            **self._wanted(name, tools),
            **options,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": answer,
        }
        return self._templates[name].render(variables)

    def _wanted(self, name: str, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Tools as text, for those templates that take them so."""
        if not _FUNCTIONS.search(self.sources[name]):
            return {}
        functions = [tool.get("function", tool) for tool in tools or ()]
        return {
            "functions": json.dumps(functions, ensure_ascii=False, indent=4),
            "datetime": datetime.now().strftime("%Y-%m-%d"),
        }

    def _before_mark(self, text: str, field: str) -> str:
        before, mark, _ = text.rpartition(_MARK)
        if not mark:
            raise InvalidRequest(
                "the model's chat template leaves out the message that is to be continued",
                field=field,
            )
        return before

    def _probed_roles(self) -> RoleHabits:
        user: Message = {"role": "user", "content": self._as_content(_PROBE)}
        if not self._try([user]):
            return RoleHabits()
        system = {"role": "system", "content": self._as_content(_PROBE)}
        answer, later = (
            {**user, "role": "assistant"},
            {"role": "system", "content": self._as_content(_LATER)},
        )
        several = self._try([system, user, answer, later, user])
        return RoleHabits(
            system=bool(self._try([system, user])),
            system_anywhere=_LATER in several and several.count(_PROBE) == 4,
            same_in_a_row=bool(self._try([user, user])),
        )

    def _shows(self, content: Any) -> bool:
        """Whether a user's content reaches the text.

        A template that fails at this does not show it.
        """
        return _PROBE in self._try([{"role": "user", "content": content}])

    def _shows_call(self, arguments: Any, *, spoiled: str) -> bool:
        """Whether the arguments of a tool call reach the text, and not in a form that shows that
        the other kind is expected.
        """
        content = self._as_content("text")
        call = {
            "type": "function",
            "id": "call00001",
            "function": {"name": "name", "arguments": arguments},
        }
        messages = [
            {"role": "user", "content": content},
            {"role": "assistant", "content": content, "tool_calls": [call]},
        ]
        text = self._try(messages, "tool_use" if "tool_use" in self._templates else "default")
        return _PROBE in text and spoiled not in text

    def _as_content(self, text: str) -> Any:
        return [{"type": "text", "text": text}] if self._keep_parts else text

    def _try(self, messages: list[dict[str, Any]], name: str = "default") -> str:
        try:
            return self._run(name, messages, tools=None, options={}, answer=False)
        except RENDER_ERRORS:
            return ""


def _is_text_of_assistant(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and not message.get("tool_calls")
    )


def _mark_last(messages: list[Message]) -> None:
    last = messages[-1]
    if isinstance(last["content"], list):
        last["content"].append({"type": "text", "text": _MARK})
    else:
        last["content"] += _MARK


def load_template(folder: Path) -> ChatTemplate | None:
    """A model folder's chat template, None when it has none.

    Raises ModelLoadError when it is broken.
    """
    config = read_json(folder / "tokenizer_config.json")
    sources = _named_templates(config.get("chat_template"))
    sources |= _named_templates(read_json(folder / "chat_template.json").get("chat_template"))
    if (path := folder / "chat_template.jinja").is_file():
        sources["default"] = _read_text(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read_text(path)
    if not sources:
        return None
    sources.setdefault("default", next(iter(sources.values())))
    special_tokens = named_special_tokens(
        {**read_json(folder / "special_tokens_map.json"), **config}
    )
    return ChatTemplate(sources, special_tokens=special_tokens)


def _named_templates(value: Any) -> dict[str, str]:
    """`chat_template` is one template, or a list of {"name": …, "template": …}."""
    if isinstance(value, str) and value:
        return {"default": value}
    if isinstance(value, list):
        return {
            str(item["name"]): str(item["template"])
            for item in value
            if isinstance(item, dict) and "template" in item and "name" in item
        }
    return {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
