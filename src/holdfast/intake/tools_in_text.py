"""Tools for models whose chat template has none: told in the system message, called and answered as text of ordinary messages.

The syntax is the one that most models have seen, Hermes': a JSON object between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from holdfast.intake.tool_history import Message, write_calls
from holdfast.parsing.dialect import CallFormat

_INSTRUCTIONS = """\
# Tools

You may call functions. These are there, as JSON, one per line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as a JSON object between <tool_call> and </tool_call>, once for each call:
<tool_call>
{{"name": "the name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
Write nothing behind the last call. The results come back between <tool_response> and </tool_response>."""


def tools_in_text(messages: Iterable[Message], tools: Sequence[dict[str, Any]], form: CallFormat) -> list[Message]:
    """The conversation (the caller's own copies) without anything that a template must know of tools.

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
    return _told(ready, tools) if tools else ready


def _told(messages: list[Message], tools: Sequence[dict[str, Any]]) -> list[Message]:
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
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
    message["content"] = [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
