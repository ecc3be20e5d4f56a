"""Tools for models whose chat template shows none: told in the system message.

If the template names the syntax of a family, and writes results, the model is told to call them in
that syntax. Otherwise calls and results are text of ordinary messages, too, in the syntax that most
models have seen, Hermes': a JSON object between <tool_call> and </tool_call>.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from holdfast.front.prompt.tool_history import Message, write_calls
from holdfast.front.toolcalls.dialect import Call, CallFormat

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


def tools_in_text(
    messages: Iterable[Message], tools: Sequence[dict[str, Any]], form: CallFormat
) -> list[Message]:
    """The conversation (the caller's own copies) without anything that a template must know of
    tools.

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
    return _told(ready, tools, _IN_JSON) if tools else ready


def tools_told(
    messages: list[Message], tools: Sequence[dict[str, Any]], form: CallFormat
) -> list[Message]:
    """The conversation (the caller's own copies) with its tools in the system message, and how to
    call them in this format.
    """
    return (
        _told(messages, tools, _IN_SYNTAX.format(example=form.write(_EXAMPLE).strip()))
        if tools
        else messages
    )


def _told(
    messages: list[Message], tools: Sequence[dict[str, Any]], how_to_call: str
) -> list[Message]:
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
    """The text as a content of the same kind: templates may know but one."""
    return [{"type": "text", "text": text}] if isinstance(content, list) else text


def _append(message: Message, text: str) -> None:
    content = message["content"]
    message["content"] = (
        [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text
    )
