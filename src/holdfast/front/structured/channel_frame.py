"""Answers in channels: each thought, text and call stands in one of its own, which its opening
names. gpt-oss, Kimi K3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from holdfast.front.structured.lark import Rules, json_value, pattern
from holdfast.front.structured.raw_values import ArgumentTags, RawArguments
from holdfast.front.structured.tools import CallableTool, CallBlock
from holdfast.front.toolcalls.channels import Channels
from holdfast.front.toolcalls.dialect import CallFormat
from holdfast.front.toolcalls.kimi_k3 import KimiK3

_KINDS: Final = ("number", "boolean", "null", "array", "object")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelTexts:
    """The markup around a thought that the answer itself opens, and around visible text."""

    thought: tuple[str, str] = ("", "")
    said: tuple[str, str] = ("", "")

    def lead(self, rules: Rules) -> str:
        """A thought that the answer may open with."""
        opening, end = self.thought
        return f"({rules.literal(opening)} {rules.text_before(end)})?" if opening else ""

    def around(self, rules: Rules, form: str) -> str:
        """Visible text of a form, in its channel."""
        return " ".join(
            (
                rules.literal(self.said[0]),
                form,
                *([rules.literal(self.said[1])] if self.said[1] else ()),
            )
        )

    def free(self, rules: Rules, form: CallFormat) -> str:
        """Any visible text, in its channel."""
        text = rules.text_before(self.said[1]) if self.said[1] else rules.text_without(form.marks)
        return f"{rules.literal(self.said[0])} {text}"


def channel_texts(form: CallFormat | None) -> ChannelTexts | None:
    """The channels of a family; None: it has none."""
    match form:
        case Channels(calls=None):
            opening = f"{form.channel}analysis{form.message}"
            thought = (opening, f"{form.ends[0]}{form.start}assistant")
            return ChannelTexts(thought=thought, said=(f"{form.channel}final{form.message}", ""))
        case KimiK3():
            return ChannelTexts(
                said=(
                    f"{form.open}response{form.separator}",
                    f"{form.close}response{form.separator}",
                )
            )
        case _:
            return None


def harmony_calls(rules: Rules, form: Channels, tools: Sequence[CallableTool]) -> CallBlock:
    """A message to a tool.

    It ends the answer, with a token that stops it, so that there is no second one.
    """
    calls = list[tuple[str, str]]()
    for tool in tools:
        to, kind = f" to={form.prefix}{tool.name}", f"{form.channel}commentary"
        headers = (
            f"{kind}{to} {form.constrain}json",
            f"{to}{kind} {form.constrain}json",
            f"{to}{kind} json",
        )
        calls += [(header + form.message, json_value(tool.arguments)) for header in headers]
    return CallBlock(opening="", calls=calls, again="", is_single=True)


def kimi_k3_calls(rules: Rules, form: KimiK3, tools: Sequence[CallableTool]) -> CallBlock:
    """`<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>...`."""
    tags = ArgumentTags(
        before=f'{form.open}argument key="',
        text=f'" type="string"{form.separator}',
        json=tuple(f'" type="{kind}"{form.separator}' for kind in _KINDS),
        end=f"{form.close}argument{form.separator}",
    )
    again, calls, left_out = (
        f'{form.open}call tool="',
        list[tuple[str, str]](),
        dict[str, tuple[str, ...]](),
    )
    for tool in tools:
        arguments = RawArguments(rules, tool, tags)
        index = f"{pattern('[1-9][0-9]?')} {rules.literal(chr(34) + form.separator)}"
        end = rules.literal(f"{form.close}call{form.separator}")
        calls.append((f'{tool.name}" index="', f"{index} {arguments.expression()} {end}"))
        left_out[tool.name] = tuple(arguments.left_out)
    section = (f"{form.open}tools{form.separator}", f"{form.close}tools{form.separator}")
    return CallBlock(
        opening=section[0] + again, calls=calls, again=again, closing=section[1], left_out=left_out
    )
