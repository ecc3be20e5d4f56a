"""Chat templates: reads them from a model's folder, probes what they accept, and renders them in
another process as `transformers` would.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
from jinja2 import TemplateError

from holdfast.errors import InvalidRequest, UnusableModel
from holdfast.front.prompt.conversation import (
    REASONING_FIELDS,
    Message,
    RoleHabits,
    ToolHabits,
    changeable,
    template_message,
    tools_in_text,
    with_habits,
    with_roles,
    with_tools_described,
)
from holdfast.front.prompt.images import (
    content_parts,
    has_images,
    images_of,
    require_no_images,
    with_placeholders,
)
from holdfast.front.prompt.template_process import SandboxedTemplate
from holdfast.front.prompt.template_worker import RENDER_ERRORS
from holdfast.front.prompt.tool_definitions import KeptPart, complete_tool
from holdfast.front.request import RESERVED_TEMPLATE_ARGUMENTS, ChatPrompt
from holdfast.models.chat_templates import template_sources
from holdfast.models.tokenizer_files import named_special_tokens, read_json
from holdfast.wire.images import VisionInfo

# Put at the end of the message to be continued; what the template writes after it is cut off. In
# private-use characters, which no text contains and no template strips.
_CONTINUE_MARK = "\ue0f1continue\ue0f2"
_PROBE = "probe7391"
_LATER_PROBE = "probe8204"
_CHANGES_LISTS = re.compile(r"\.(?:append|pop)\(")
_PRINTS_FUNCTIONS = re.compile(r"\+ *functions\b")
_WITH_IMAGE = (
    {"type": "text", "text": _PROBE},
    {"type": "image"},
    {"type": "text", "text": _LATER_PROBE},
)
_SYSTEM = frozenset({"system", "developer"})
_JUDGE_ROLES = ("query", "document")  # roles in the templates of reranking models


def common_prefix(one: str, other: str) -> str:
    """The longest text with which both texts begin."""
    return os.path.commonprefix((one, other))  # noqa: RUF071 - compares characters on purpose


class ChatTemplate:
    """A model's chat template. Thread-safe.

    Rendering takes 10 to 35 µs per message, plus 0.1 ms for the exchange with the other process. Do
    not render on an event loop, because a bad template may take seconds.
    """

    def __init__(self, sources: Mapping[str, str], *, special_tokens: Mapping[str, str]) -> None:
        """sources: the templates by name: "default", and "tool_use" if there is one.

        Raises UnusableModel. This and all methods that render also raise TemplateOverrun and
        RenderingUnavailable.
        """
        # variables of the template, such as `bos_token`
        self._special_tokens = dict(special_tokens)
        self.sources = dict(sources)
        self._templates: dict[str, SandboxedTemplate] = {}  # by name, as in `sources`
        self._roles = RoleHabits()  # which roles the template accepts
        self._habits = ToolHabits()  # what it requires of tool calls
        for name, source in sources.items():
            try:
                self._templates[name] = SandboxedTemplate(name, source)
            except TemplateError as error:
                raise UnusableModel(
                    f"the chat template {name!r} is broken: {error.message}"
                ) from error
        self._vision: _ImageWriting | None = None  # None: it is not known to write images
        # whether the template iterates over content parts; otherwise it expects a text
        self._keep_parts = not self._renders_content(_PROBE) and self._renders_content(
            [{"type": "text", "text": _PROBE}]
        )
        self._roles = self._probed_roles()
        # Call arguments may be passed as an object or as JSON text. A template that does not expect
        # an object prints it as Python does; one that does not expect text turns it into JSON
        # within JSON.
        takes_object = self._renders_call({"key": _PROBE}, wrong_form=f"'{_PROBE}'")
        takes_text = self._renders_call(json.dumps({"key": _PROBE}), wrong_form=f'\\"{_PROBE}')
        self._arguments_as_text = takes_text and not takes_object

    def with_tool_habits(self, habits: ToolHabits) -> ChatTemplate:
        """Return a copy of this template that adapts conversations with tools to `habits`."""
        adapted = copy.copy(self)
        adapted._habits = habits
        return adapted

    def with_vision(self, vision: VisionInfo) -> ChatTemplate:
        """Return a copy of this template for conversations with images.

        In these conversations, texts that would be read as an image must be broken up.
        """
        adapted = copy.copy(self)
        adapted._vision = _ImageWriting(
            vision,
            roles=frozenset(
                role
                for role, messages in self._probes_with_content([*_WITH_IMAGE]).items()
                if self._writes_image(messages, vision)
            ),
            image_text=self._image_text(vision),
        )
        return adapted

    @property
    def with_tools(self) -> str:
        """The source of the template that is used for requests with tools."""
        return self.sources.get("tool_use", self.sources["default"])

    def reads_thoughts(self, end: str) -> bool:
        """Whether the template handles thoughts of past answers: renders them, or cuts them out.

        end: the marker that ends a thought.
        """
        source = self.with_tools
        return end in source or any(name in source for name in REASONING_FIELDS)

    def render(self, prompt: ChatPrompt, *, field: str = "messages") -> str:
        """Render a conversation. Raises InvalidRequest when the template refuses it."""
        self.check(prompt, field=field)
        adapted = self._adapted_messages(prompt, field=field)
        return self.rendered(prompt, adapted, field=field)[0]

    def check(self, prompt: ChatPrompt, *, field: str = "messages") -> None:
        """Raise InvalidRequest if no template could render the conversation."""
        if clash := sorted(RESERVED_TEMPLATE_ARGUMENTS & prompt.template_options.keys()):
            raise InvalidRequest(
                f"chat_template_kwargs may not contain {', '.join(clash)}, which the server sets",
                field="chat_template_kwargs",
            )
        if prompt.continue_last and not _is_text_of_assistant(prompt.messages[-1]):
            raise InvalidRequest(
                "only an assistant message without calls can be continued",
                field=f"{field}.{len(prompt.messages) - 1}",
            )

    def adapted(self, message: Any, *, field: str) -> Message:
        """A message, checked and in the form that the template expects. It must not be changed.

        field: the request field of the message, for errors.
        """
        return template_message(
            message,
            keep_parts=self._keep_parts,
            arguments_as_text=self._arguments_as_text,
            field=field,
        )

    def rendered(
        self, prompt: ChatPrompt, adapted: list[Message], *, field: str = "messages"
    ) -> tuple[str, tuple[str, ...]]:
        """Render a conversation that passed `check`; also returns the images in the order in which
        the template writes them. Raises InvalidRequest when the template refuses it.

        adapted: the messages of the prompt in the form that the template expects. They are changed.
        """
        messages = self._text_messages(prompt, adapted)
        images: tuple[str, ...] = ()
        if self._vision is not None:
            images = tuple(image for each in messages for image in images_of(_text_of(each)))
            messages = [*map(self._vision.replace_marks, messages)]
        if prompt.continue_last:
            _mark_last(messages)
        try:
            text = self._render_messages(prompt, messages, opens_answer=not prompt.continue_last)
        except RENDER_ERRORS as error:
            require_no_images(str(error))
            raise InvalidRequest(
                "the model's chat template refuses this conversation",
                field=field,
                shown=f": {error}",  # may quote the conversation
            ) from error
        if self._vision is not None and self._vision.is_incomplete(text, images):
            raise InvalidRequest("the model's chat template leaves out an image", field=field)
        if not prompt.continue_last:
            return text.removesuffix(self._habits.left_to_model), images
        text_before, mark, _ = text.rpartition(_CONTINUE_MARK)
        if not mark:
            raise InvalidRequest(
                "the model's chat template leaves out the message that is to be continued",
                field=field,
            )
        return text_before, images

    def try_render(self, prompt: ChatPrompt) -> str:
        """Like `render`, but returns an empty text if the template refuses the conversation."""
        try:
            return self.render(prompt)
        except InvalidRequest:
            return ""

    def render_history(self, prompt: ChatPrompt) -> str:
        """Render the conversation without a generation prompt; empty if the template refuses it."""
        try:
            return self._render_messages(prompt, self._messages(prompt, ""), opens_answer=False)
        except (*RENDER_ERRORS, InvalidRequest):
            return ""

    def opening(self, prompt: ChatPrompt, text: str) -> str:
        """The generation prompt at the end of a rendered conversation."""
        if prompt.continue_last:
            return ""
        history_characters = self._shared_characters(prompt, text)
        return text[history_characters:] if history_characters else ""

    def branch_points(self, prompt: ChatPrompt, text: str) -> tuple[int, ...]:
        """The positions in a prompt's rendered text after which other prompts are likely to differ.

        One position is after the system prompt and tools, where other conversations branch off. The
        other is after the last message, because in the next turn something other than the
        generation prompt may follow that message.
        """
        system = [message for message in prompt.messages if message.get("role") in _SYSTEM]
        probe_message = {"role": "user", "content": _PROBE}
        beginning = msgspec.structs.replace(
            prompt, messages=(*system, probe_message), continue_last=False
        )
        points = {self._shared_characters(beginning, text, up_to=_PROBE)}
        if not prompt.continue_last:
            points.add(self._shared_characters(prompt, text))
        return tuple(sorted(points - {0, len(text)}))

    def judging(self, *, instruction: str, query: str, document: str) -> str:
        """The prompt that asks a reranking model to judge a document.

        Empty if the template is not one of a reranking model.
        """
        if not all(
            re.search(rf"['\"]{role}['\"]", self.sources["default"]) for role in _JUDGE_ROLES
        ):
            return ""
        messages = [self._message(role, _PROBE + role) for role in _JUDGE_ROLES]
        if instruction:
            messages.insert(0, self._message("system", instruction))
        text = self._try_messages(messages, opens_answer=True)
        content_by_probe = {_PROBE + "query": query, _PROBE + "document": document}
        if any(text.count(probe) != 1 for probe in content_by_probe):
            return ""
        return re.sub("|".join(content_by_probe), lambda match: content_by_probe[match[0]], text)

    def _shared_characters(self, prompt: ChatPrompt, text: str, *, up_to: str = "") -> int:
        """The length of the rendered conversation if `text` begins with it; otherwise 0.

        up_to: the rendered conversation is cut before this text; if empty, it is not cut.
        """
        history = self.render_history(prompt)
        if up_to:
            history = history.partition(up_to)[0]
        return len(history) if text.startswith(history) else 0

    def _messages(self, prompt: ChatPrompt, field: str) -> list[Message]:
        """The messages of a conversation as the template expects them, with image parts for images."""
        messages = self._text_messages(prompt, self._adapted_messages(prompt, field=field))
        return messages if self._vision is None else [*map(self._vision.replace_marks, messages)]

    def _adapted_messages(self, prompt: ChatPrompt, *, field: str) -> list[Message]:
        """The messages of a prompt, each in the form that the template expects, to be changed."""
        if not prompt.messages:
            raise InvalidRequest("there must be at least one message", field=field)
        return [
            changeable(self.adapted(message, field=f"{field}.{place}"))
            for place, message in enumerate(prompt.messages)
        ]

    def _text_messages(self, prompt: ChatPrompt, adapted: list[Message]) -> list[Message]:
        """The messages for the template, in which images are marks."""
        messages = with_habits(adapted, self._habits)
        if self._habits.tools_in_text_format is not None:
            messages = tools_in_text(
                messages, prompt.listed_tools, self._habits.tools_in_text_format
            )
        elif self._habits.described_tools_format is not None:
            messages = with_tools_described(
                messages, prompt.listed_tools, self._habits.described_tools_format
            )
        return with_roles(messages, self._roles)

    def _render_messages(
        self, prompt: ChatPrompt, messages: list[Message], *, opens_answer: bool
    ) -> str:
        """Render messages with the tools and options of a prompt.

        opens_answer: whether the text ends with a generation prompt: the header of a new answer.
        """
        options = prompt.template_options
        if self._habits.describes_tools or not prompt.listed_tools:
            return self._render_template(
                "default", messages, tools=None, options=options, opens_answer=opens_answer
            )
        name = "tool_use" if "tool_use" in self._templates else "default"
        tools = [tool if isinstance(tool, KeptPart) else dict(tool) for tool in prompt.listed_tools]
        if _CHANGES_LISTS.search(self.sources[name]):
            tools = copy.deepcopy(tools)  # the originals are reused for other requests
        try:
            return self._render_template(
                name, messages, tools=tools, options=options, opens_answer=opens_answer
            )
        except RENDER_ERRORS:
            # some templates fail if a tool lacks descriptions or types
            tools = [complete_tool(tool) for tool in prompt.listed_tools]
            return self._render_template(
                name, messages, tools=tools, options=options, opens_answer=opens_answer
            )

    def _render_template(
        self,
        name: str,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None,
        options: Mapping[str, Any],
        opens_answer: bool,
    ) -> str:
        """Render one of the templates. name: "default" or "tool_use"."""
        variables = {
            **self._special_tokens,
            **self._text_arguments(name, tools),
            **options,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": opens_answer,
        }
        text = self._templates[name].render(variables)
        require_no_images(text)
        return text if self._vision is None else self._vision.as_tokenized(text)

    def _text_arguments(self, name: str, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """Template arguments for templates that expect the tools as text and today's date."""
        if not _PRINTS_FUNCTIONS.search(self.sources[name]):
            return {}
        functions = [tool.get("function", tool) for tool in tools or ()]
        return {
            "functions": json.dumps(functions, ensure_ascii=False, indent=4),
            "datetime": datetime.now().strftime("%Y-%m-%d"),
        }

    def _probed_roles(self) -> RoleHabits:
        """Try which roles the template accepts.

        If it cannot render even one message of a user, it is assumed to accept all.
        """
        user = self._message("user", _PROBE)
        if not self._try_messages([user]):
            return RoleHabits()
        system = self._message("system", _PROBE)
        answer = self._message("assistant", _PROBE)
        later_system = self._message("system", _LATER_PROBE)
        several_text = self._try_messages([system, user, answer, later_system, user])
        return RoleHabits(
            system=bool(self._try_messages([system, user])),
            system_anywhere=_LATER_PROBE in several_text and several_text.count(_PROBE) == 4,
            same_in_a_row=bool(self._try_messages([user, user])),
        )

    def _probes_with_content(self, content: Any) -> dict[str, list[Message]]:
        """Conversations with this content, by the role of the message with it."""
        user = self._message("user", "text")
        call = {
            "type": "function",
            "id": "call00001",
            "function": {"name": "name", "arguments": "{}" if self._arguments_as_text else {}},
        }
        calling_answer = {**self._message("assistant", ""), "tool_calls": [call]}
        result = {"role": "tool", "content": content, "tool_call_id": "call00001", "name": "name"}
        return {
            "user": [{"role": "user", "content": content}],
            "tool": [user, calling_answer, result],
            "system": [{"role": "system", "content": content}, user],
        }

    def _writes_image(self, messages: list[Message], vision: VisionInfo) -> bool:
        """Whether the template writes two texts and one placeholder for the image between them."""
        text = self._try_messages(messages)
        return (
            _PROBE in text and _LATER_PROBE in text and text.count(vision.template_placeholder) == 1
        )

    def _image_text(self, vision: VisionInfo) -> str:
        """What the template writes for an image between two texts."""
        text = self._try_messages(self._probes_with_content([*_WITH_IMAGE])["user"])
        between = text.partition(_PROBE)[2].partition(_LATER_PROBE)[0]
        is_placeholder_between = between.count(vision.template_placeholder) == 1
        return between if is_placeholder_between else vision.template_placeholder

    def _renders_content(self, content: Any) -> bool:
        """Whether the rendered text contains this content of a user message."""
        return _PROBE in self._try_messages([{"role": "user", "content": content}])

    def _renders_call(self, arguments: Any, *, wrong_form: str) -> bool:
        """Whether the rendered text contains a call's arguments, and not in `wrong_form`."""
        function = {"name": "name", "arguments": arguments}
        call = {"type": "function", "id": "call00001", "function": function}
        messages = [
            self._message("user", "text"),
            {**self._message("assistant", "text"), "tool_calls": [call]},
        ]
        text = self._try_messages(
            messages, "tool_use" if "tool_use" in self._templates else "default"
        )
        return _PROBE in text and wrong_form not in text

    def _message(self, role: str, text: str) -> Message:
        content = [{"type": "text", "text": text}] if self._keep_parts else text
        return {"role": role, "content": content}

    def _try_messages(
        self, messages: list[Message], name: str = "default", *, opens_answer: bool = False
    ) -> str:
        """Render messages without tools; empty if the template refuses them."""
        try:
            return self._render_template(
                name, messages, tools=None, options={}, opens_answer=opens_answer
            )
        except RENDER_ERRORS:
            return ""


@dataclass(frozen=True, slots=True)
class _ImageWriting:
    """How a template writes images.

    roles: of messages in which the template writes image parts. image_text: what takes the place of
        an image in other messages.
    """

    vision: VisionInfo  # the tokens and texts around the model's images
    roles: frozenset[str]
    image_text: str

    def replace_marks(self, message: Message) -> Message:
        """A message with its marks replaced by parts or text."""
        content = message["content"]
        text = _text_of(message)
        if not has_images(text):
            return message
        if message["role"] in self.roles:
            marked_texts = (
                [content] if isinstance(content, str) else [part["text"] for part in content]
            )
            return {
                **message,
                "content": [part for each in marked_texts for part in content_parts(each)],
            }
        if isinstance(content, str):
            return {**message, "content": with_placeholders(content, self.image_text)}
        parts = [
            {**part, "text": with_placeholders(part["text"], self.image_text)} for part in content
        ]
        return {**message, "content": parts}

    def as_tokenized(self, text: str) -> str:
        """A rendered text in the form that is tokenized."""
        return text.replace(self.vision.template_placeholder, self.vision.written)

    def is_incomplete(self, text: str, images: Sequence[str]) -> bool:
        """Whether the rendered text does not have one placeholder for each image."""
        return bool(images) and text.count(self.vision.placeholder) != len(images)


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _is_text_of_assistant(message: Any) -> bool:
    """Whether a message is an answer without calls."""
    return (
        isinstance(message, dict)
        and message.get("role") == "assistant"
        and not message.get("tool_calls")
    )


def _mark_last(messages: list[Message]) -> None:
    """Mark the end of the last message, which is to be continued."""
    last = messages[-1]
    if isinstance(last["content"], list):
        last["content"].append({"type": "text", "text": _CONTINUE_MARK})
    else:
        last["content"] += _CONTINUE_MARK


def load_template(folder: Path) -> ChatTemplate | None:
    """The chat template of a model folder; None if the folder has none.

    Raises UnusableModel if the template is broken.
    """
    sources = template_sources(folder)
    if not sources:
        return None
    sources.setdefault("default", next(iter(sources.values())))
    special_tokens = named_special_tokens(
        {
            **read_json(folder / "special_tokens_map.json"),
            **read_json(folder / "tokenizer_config.json"),
        }
    )
    return ChatTemplate(sources, special_tokens=special_tokens)
