"""Conversations, rendered by the chat template of the bundled models, and raw texts."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

TEMPLATE_FILE = Path(__file__).with_name("chat_template.jinja")
END_OF_TEXT = 0
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
_ANSWER = re.compile(
    r"(?<=<\|im_start\|>assistant\n)(?:<think>\n\n</think>\n\n)?(.*?<\|im_end\|>)", re.DOTALL
)

Message = dict[str, Any]


@dataclass(frozen=True)
class PlainText:
    """A raw text, followed by the end-of-text token."""

    text: str


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
    known: list[Any] = field(default_factory=list, compare=False)
    """The facts that the user or the system prompt told."""
    offered: Any = field(default=None, compare=False)
    """The tools, as what draws requests for them."""

    def say(self, role: str, content: str) -> None:
        """Append one message."""
        self.messages.append({"role": role, "content": content})

    def exchange(self, question: str, answer: str) -> None:
        """Append a user message and its answer."""
        self.say("user", question)
        self.say("assistant", answer)

    def call(self, calls: list[dict[str, Any]], results: list[str]) -> None:
        """Append an assistant message that makes calls, and their results."""
        functions = [{"type": "function", "function": call} for call in calls]
        self.messages.append({"role": "assistant", "content": "", "tool_calls": functions})
        for result in results:
            self.say("tool", result)

    def prompt_before(self, index: int) -> str:
        """The prompt for message `index`."""
        before = Conversation(self.messages[:index], self.tools, self.enable_thinking)
        return render(before, add_generation_prompt=True)


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
    """The rendered text in parts; a flag says whether the loss of a part counts fully, because the
    model writes it.
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


class Encoder:
    """Encodes conversations with the bundled tokenizer."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(path))

    def encode(self, drawn: Conversation | PlainText) -> tuple[list[int], list[bool]]:
        """Token ids, and for each whether the model writes it. It writes all of a raw text."""
        if isinstance(drawn, PlainText):
            ids = [*self.tokenizer.encode(drawn.text).ids, END_OF_TEXT]
            return ids, [True] * len(ids)
        tokens: list[int] = []
        written: list[bool] = []
        for text, own in weighted_parts(drawn):
            ids = self.tokenizer.encode(text).ids
            tokens += ids
            written += [own] * len(ids)
        return tokens, written
