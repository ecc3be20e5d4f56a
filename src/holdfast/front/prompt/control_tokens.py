"""Text of users, tools and system prompts that spells a control token is kept from becoming one.

A tool's result that holds `<|im_end|>` would else end the message that it stands in. In front of
tokenization such text is broken by a character that the tokenizer leaves out again, behind the
point where it looks for added tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import normalizers

from holdfast.front.prompt.tool_definitions import KeptTool, made_once
from holdfast.wire.requests import ChatPrompt

_BREAK: Final = "\ufdd5"  # a noncharacter of Unicode: no text has it
Guard: TypeAlias = Callable[[str], str]


def leave_out_breaks(backend: Backend) -> None:
    """Have the tokenizer drop the breaks: added tokens are looked for in what is not normalized
    yet.
    """
    drop = normalizers.Replace(_BREAK, "")
    backend.normalizer = (
        drop if backend.normalizer is None else normalizers.Sequence([drop, backend.normalizer])
    )


def guard_against(backend: Backend) -> Guard:
    """A function that breaks the control tokens in a text.

    Tokens that are matched in normalized text cannot be broken.
    """
    added = backend.get_added_tokens_decoder().values()
    contents = [
        token.content
        for token in added
        if token.special and not token.normalized and len(token.content) > 1
    ]
    if not contents:
        return lambda text: text
    pattern = re.compile("|".join(map(re.escape, sorted(contents, key=len, reverse=True))))
    return lambda text: pattern.sub(lambda found: found[0][0] + _BREAK + found[0][1:], text)


def guarded(prompt: ChatPrompt, guard: Guard) -> ChatPrompt:
    """The conversation with all that is not the model's own text broken where it spells a control
    token.
    """
    messages = tuple(
        message if not isinstance(message, dict) or message.get("role") == "assistant" or "content" not in message
        else {**message, "content": _guarded(message["content"], guard)}
        for message in prompt.messages
    )  # fmt: skip
    return msgspec.structs.replace(
        prompt, messages=messages, tools=tuple(_guarded_tool(tool, guard) for tool in prompt.tools)
    )


def _guarded_tool(tool: Any, guard: Guard) -> Any:
    if isinstance(tool, KeptTool):
        return made_once(tool, guard, lambda: KeptTool(_guarded(tool, guard)))
    return _guarded(tool, guard)


def _guarded(value: Any, guard: Guard) -> Any:
    if isinstance(value, str):
        return guard(value)
    if isinstance(value, Mapping):
        return {key: _guarded(each, guard) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_guarded(each, guard) for each in value]
    return value
