"""Conversations, rendered by the chat template of the bundled models."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_ANSWER = re.compile(
    r"(?<=<\|im_start\|>assistant\n)(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL
)

Message = dict[str, Any]


@dataclass
class Conversation:
    """Messages, tools, and the thinking switch (None: not set)."""

    messages: list[Message] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    given: str = ""
    """What a grammar forces the last answer to begin with: it counts as little as a prompt."""
    foreign: set[str] = field(default_factory=set)
    """Answers that somebody else gave, which count as little as a prompt."""

    def say(self, role: str, content: str, **more: Any) -> None:
        """Append one message."""
        self.messages.append({"role": role, "content": content, **more})

    def exchange(self, question: str, answer: str) -> None:
        """Append a user message and its answer."""
        self.say("user", question)
        self.say("assistant", answer)

    def prompt_before(self, index: int) -> str:
        """The prompt for message `index`."""
        return render(
            Conversation(self.messages[:index], self.tools, self.enable_thinking),
            add_generation_prompt=True,
        )


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    """The `tojson` filter of transformers: no HTML escapes, and keys keep their order."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


@lru_cache(maxsize=1)
def compiled_template() -> Template:
    """The template, compiled like in transformers."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    return environment.from_string(TEMPLATE_FILE.read_text())


def render(conversation: Conversation, add_generation_prompt: bool = False) -> str:
    """The text of a conversation."""
    variables: dict[str, Any] = {"messages": conversation.messages, "tools": conversation.tools}
    if conversation.enable_thinking is not None:
        variables["enable_thinking"] = conversation.enable_thinking
    return compiled_template().render(add_generation_prompt=add_generation_prompt, **variables)


def weighted_parts(conversation: Conversation) -> list[tuple[str, bool]]:
    """The rendered text in parts. The flag says whether the model writes the part, so that its loss
    counts fully.
    """
    text = render(conversation)
    parts: list[tuple[str, bool]] = []
    position = 0
    for match in _ANSWER.finditer(text):
        start, end = match.span(1)
        is_own = match[1].removesuffix("<|im_end|>") not in conversation.foreign
        parts += [(text[position:start], False), (text[start:end], is_own)]
        position = end
    if conversation.given:
        last = parts.pop()[0]
        own = last.removeprefix(conversation.given)
        parts += [(last[: len(last) - len(own)], False), (own, True)]
    return [*parts, (text[position:], False)]
