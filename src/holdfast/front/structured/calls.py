"""The grammars of tool calls."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from holdfast.errors import InvalidRequest
from holdfast.front.structured.lark import (
    ANY,
    Rules,
    escaped,
    json_value,
    literal,
    members,
    one_of,
    pattern,
)
from holdfast.front.structured.schema import Schema
from holdfast.front.structured.tools import CallableTool, CallBlock, in_tool
from holdfast.front.structured.values import (
    ArgumentTags,
    LiteralValues,
    RawArguments,
    ValueSyntax,
    content_of,
)
from holdfast.front.toolcalls.channels import Channels, KimiK3
from holdfast.front.toolcalls.dialect import CallFormat, IdForm
from holdfast.front.toolcalls.json_calls import JsonCalls, NamedJson
from holdfast.front.toolcalls.literal_calls import BracedCalls, PythonCalls
from holdfast.front.toolcalls.nested_tags import KeyValueTags, NestedTags
from holdfast.front.toolcalls.tagged_parameters import TaggedParameters

_KINDS: Final = ("number", "boolean", "null", "array", "object")
_DEEPEST_TAGS = 4  # levels of references that are followed; below them anything may stand
_PYTHON = ValueSyntax(words=("True", "False", "None"))
_IDS: Final[dict[IdForm, str]] = {"alnum9": "[a-zA-Z0-9]{9}", "number": "[0-9]{1,3}"}
_ANY_ID: Final = "[a-zA-Z0-9_.:-]{0,64}"
_FIELD: Final = re.compile(r"(\{name\}|\{id\})")


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


def nested_tags(rules: Rules, form: NestedTags, tools: Sequence[CallableTool]) -> CallBlock:
    """`<invoke name="NAME"><KEY>VALUE</KEY></invoke>`, each tag behind the family's mark."""
    opening = f'{form.mark}<{form.call} name="'
    calls, left_out = list[tuple[str, str]](), dict[str, tuple[str, ...]]()
    for tool in tools:
        values = _NestedValues(rules, tool, form)
        arguments = values.inside(tool.arguments, depth=0)
        calls.append(
            (
                f'{tool.name}">',
                f"{arguments} {rules.literal(f'{form.mark}</{form.call}>' + chr(10))}",
            )
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(
        opening=f"{form.mark}<{form.section}>\n{opening}",
        calls=calls,
        again=opening,
        closing=f"{form.mark}</{form.section}>",
        left_out=left_out,
    )


class _NestedValues:
    """Makes expressions for values between tags.

    Nothing stands for null: such members are left out.
    """

    def __init__(self, rules: Rules, tool: CallableTool, form: NestedTags) -> None:
        self.left_out: list[str] = []
        self._rules, self._tool, self._form = rules, tool, form

    def inside(self, node: Schema, *, depth: int) -> str:
        """The members of an object, each in its tag."""
        found = self._tool.members(node)
        self.left_out += found.left_out
        given = {
            name: self._tagged(name, value, depth=depth) for name, value in found.properties.items()
        }
        return members(self._rules, given, required=found.required, separator="")

    def _tagged(self, name: str, node: Any, *, depth: int) -> str:
        mark, end = self._form.mark, self._rules.literal(f"{self._form.mark}</{name}>")
        values = [
            self._value(branch, name, end, depth=depth)
            for branch in self._branches(node, depth=depth)
        ]
        return self._rules.rule(
            f"{self._rules.literal(f'{mark}<{name}>')} {one_of(filter(None, values))}"
        )

    def _value(self, node: Schema, name: str, end: str, *, depth: int) -> str:
        """A value and the tag that closes it; empty where there is no way to write it."""
        kind = node.get("type")
        if kind == "null":
            return ""
        if "enum" in node or "const" in node:
            listed = [
                value
                for value in node.get("enum", [node.get("const")])
                if isinstance(value, str | int | float)
            ]
            written = (value if isinstance(value, str) else json.dumps(value) for value in listed)
            return f"{one_of(map(self._rules.literal, written))} {end}" if listed else ""
        if kind == "object" and depth < _DEEPEST_TAGS:
            return f"{self.inside(node, depth=depth + 1)} {end}"
        if (
            kind == "array"
            and isinstance(node.get("items", {}), dict)
            and "prefixItems" not in node
            and depth < _DEEPEST_TAGS
        ):
            item = self._tagged(self._form.item, node.get("items", {}), depth=depth + 1)
            least, most = node.get("minItems", 0), node.get("maxItems", "")
            return end if most == 0 else f"{item}{{{least},{most}}} {end}"
        if kind in ("integer", "number", "boolean"):
            return f"{json_value(node)} {end}"
        content, left_out = content_of(node)
        if left_out or kind not in (None, "string"):
            self.left_out.append(left_out or str(kind))
        return self._rules.text_before(f"{self._form.mark}</{name}>", content=content)

    def _branches(self, node: Any, *, depth: int) -> Sequence[Schema]:
        if not isinstance(node, dict):
            return ({},)
        if "$ref" in node and depth < _DEEPEST_TAGS:
            return self._branches(self._tool.definition(node["$ref"]), depth=depth + 1)
        for keyword in ("anyOf", "oneOf"):
            if keyword in node:
                return [
                    branch
                    for member in node[keyword]
                    for branch in self._branches(member, depth=depth + 1)
                ]
        kinds = node.get("type")
        if isinstance(kinds, list | tuple):
            return [{**node, "type": kind} for kind in kinds]
        return (node,)


def python_calls(rules: Rules, form: PythonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`[NAME(KEY=VALUE, ...), ...]`."""
    opening, closing = form.wrapper[0] + "[", "]" + form.wrapper[1]
    calls, left_out = list[tuple[str, str]](), dict[str, tuple[str, ...]]()
    for tool in tools:
        values = LiteralValues(rules, tool, _PYTHON)
        calls.append(
            (f"{tool.name}(", f"{values.arguments(tool.arguments, assign='=')} {literal(')')}")
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(
        opening=opening, calls=calls, again=form.between, closing=closing, left_out=left_out
    )


def braced_calls(rules: Rules, form: BracedCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`call:NAME{KEY:VALUE,...}` between two markers."""
    syntax = ValueSyntax(quote=form.quote, quoted_keys=False, colon=":", comma=",")
    opening, calls, left_out = (
        form.wrapper[0] + form.lead,
        list[tuple[str, str]](),
        dict[str, tuple[str, ...]](),
    )
    for tool in tools:
        values = LiteralValues(rules, tool, syntax)
        calls.append(
            (
                tool.name + "{",
                f"{values.arguments(tool.arguments)} {rules.literal('}' + form.wrapper[1])}",
            )
        )
        left_out[tool.name] = tuple(values.left_out)
    return CallBlock(opening=opening, calls=calls, again=opening, left_out=left_out)


def id_pattern(form: IdForm) -> str:
    """A call's id as the model writes it, as an expression."""
    return pattern(_IDS.get(form, _ANY_ID))


def json_calls(rules: Rules, form: JsonCalls, tools: Sequence[CallableTool]) -> CallBlock:
    """`{"name": NAME, "arguments": {...}}`, as the family's templates space it."""
    calls = []
    for tool in tools:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = (
            f"{{{name}: "
            if form.name_is_key
            else f'{{"{form.name_key}": {name}, "{form.arguments_key}": '
        )
        call_id = ""
        if form.id_key and not form.name_is_key:
            value = pattern('"' + _IDS.get(form.id_form, _ANY_ID) + '"')
            call_id = f"({literal(f', {json.dumps(form.id_key)}: ')} {value})?"
        rest = f"{json_value(tool.arguments)} {call_id} {rules.literal('}' + form.wrapper[1])}"
        calls.append((head, rest))
    between = form.between or (", " if form.array else "")
    return CallBlock(
        opening=form.section[0] + ("[" if form.array else "") + form.wrapper[0],
        calls=calls,
        again=between + form.wrapper[0],
        closing=("]" if form.array else "") + form.section[1],
    )


def named_json(rules: Rules, form: NamedJson, tools: Sequence[CallableTool]) -> CallBlock:
    """`MARKER NAME MARKER {...}`, with or without an id in front."""
    lead, *fields = _FIELD.split(form.head)
    calls = []
    for tool in tools:
        head, behind = "", fields
        if fields[0] == "{name}":
            head, behind = tool.name + fields[1], fields[2:]
        end = rules.literal(form.close) if form.close else ""
        calls.append(
            (
                head,
                " ".join((*_head(rules, form, behind, tool.name), json_value(tool.arguments), end)),
            )
        )
    return CallBlock(
        opening=form.section[0] + lead,
        calls=calls,
        again=form.between + lead,
        closing=form.section[1],
    )


def _head(rules: Rules, form: NamedJson, fields: Sequence[str], name: str) -> list[str]:
    """What stands between a call's first marker and its arguments."""
    found = []
    for part in filter(None, fields):
        if part == "{name}":
            found.append(literal(name))
        elif part != "{id}":
            found.append(rules.literal(part))
        elif form.id_form == "function_number":
            found.append(f"{literal(f'functions.{name}:')} {pattern('[0-9]{1,4}')}")
        else:
            found.append(id_pattern(form.id_form))
    return found


def tagged_parameters(
    rules: Rules, form: TaggedParameters, tools: Sequence[CallableTool]
) -> CallBlock:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, in the family's words."""
    close, padding = form.parameter[2], form.padding
    end, behind = padding + close.rstrip(), close[len(close.rstrip()) :]
    tags = ArgumentTags(
        before=form.parameter[0],
        text=form.types[0] + form.parameter[1] + padding,
        json=(form.types[1] + form.parameter[1] + padding,),
        end=end,
        behind=behind,
        cdata=form.cdata,
    )
    head = form.wrapper[0] + form.call[0]
    ends = (form.call[1], form.call[2] + form.wrapper[1])
    return _block(
        rules,
        tools,
        tags,
        ends,
        texts=(form.section[0] + head, form.between + head, form.section[1]),
    )


def key_value_tags(rules: Rules, form: KeyValueTags, tools: Sequence[CallableTool]) -> CallBlock:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, in the
    family's words.
    """
    close = form.value[1]
    tags = ArgumentTags(
        before=form.key[0],
        text=form.key[1] + form.value[0],
        json=(form.key[1] + form.value[0],),
        end=close.rstrip(),
        behind=close[len(close.rstrip()) :],
    )
    ends = (form.name_end, form.call[1])
    return _block(
        rules,
        tools,
        tags,
        ends,
        texts=(form.section[0] + form.call[0], form.between + form.call[0], form.section[1]),
    )


def _block(
    rules: Rules,
    tools: Sequence[CallableTool],
    tags: ArgumentTags,
    ends: tuple[str, str],
    *,
    texts: tuple[str, str, str],
) -> CallBlock:
    """Calls of which the name stands behind the opening. ends: of the name and of the call. texts:
    as `CallBlock` has them.
    """
    calls, left_out = [], {}
    for tool in tools:
        arguments = RawArguments(rules, tool, tags)
        calls.append((tool.name + ends[0], f"{arguments.expression()} {rules.literal(ends[1])}"))
        left_out[tool.name] = tuple(arguments.left_out)
    return CallBlock(
        opening=texts[0], calls=calls, again=texts[1], closing=texts[2], left_out=left_out
    )


_MECHANISMS: Final[dict[type, Callable[[Rules, Any, Sequence[CallableTool]], CallBlock]]] = {
    BracedCalls: braced_calls,
    Channels: harmony_calls,
    JsonCalls: json_calls,
    KeyValueTags: key_value_tags,
    KimiK3: kimi_k3_calls,
    NamedJson: named_json,
    NestedTags: nested_tags,
    PythonCalls: python_calls,
    TaggedParameters: tagged_parameters,
}


def can_constrain(form: CallFormat | None) -> bool:
    """Whether calls of this form can be held to a grammar."""
    return type(form) in _MECHANISMS and getattr(form, "calls", None) is None


def call_block(rules: Rules, form: CallFormat, tools: Sequence[CallableTool]) -> CallBlock:
    """All calls of an answer.

    Raises InvalidRequest for a strict tool that the family's syntax cannot hold to its schema.
    """
    block = _MECHANISMS[type(form)](rules, form, tools)
    for tool in tools:
        if tool.strict and block.left_out.get(tool.name):
            place = block.left_out[tool.name][0]
            reason = (
                "the model's own syntax of calls has no way to enforce a keyword of this schema"
            )
            raise InvalidRequest(f"`{tool.place}`: {reason}", field=tool.place, shown=f": {place}")
    return block


def unenforced(tools: Sequence[CallableTool], block: CallBlock) -> tuple[str, ...]:
    """Places, by the tools' names, of keywords that nothing enforces."""
    return tuple(
        place
        for tool in tools
        for place in (*tool.unenforced, *in_tool(tool.name, block.left_out.get(tool.name, ())))
    )


def only_calls(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    """Calls from the beginning on, and nothing else."""
    space = block.opening[: len(block.opening) - len(block.opening.lstrip())]
    lead = f"({rules.literal(space)})?" if space else ""
    return (
        f"{lead} {rules.literal(block.opening.lstrip())} "
        f"{_behind_opening(rules, block, parallel=parallel)}"
    )


def text_or_calls(rules: Rules, form: CallFormat, block: CallBlock, *, parallel: bool) -> str:
    """Free text, behind which calls may follow, and nothing behind these."""
    if channels := channel_texts(form):
        text = channels.free(rules, form)
        calls = only_calls(rules, block, parallel=parallel)
        return f"({text} | {calls})" if block.is_single else f"({text} | ({text})? {calls})"
    opening = block.opening.lstrip()
    mark = max(
        (mark for mark in form.openers if mark in form.marks and opening.startswith(mark)),
        key=len,
        default="",
    )
    # a call's beginning is one lexeme with the name: so it is told from a text that begins alike
    if not mark:
        first = one_of(f"{rules.literal(opening + head)} {rest}" for head, rest in block.calls)
        text = rules.terminal(f"/{ANY}/ & ~/({ANY}\\n)?\\s*{_beginning(block)}{ANY}/")
        return f"({text} | {rules.rule(first)} {_behind_call(rules, block, parallel=parallel)})"
    others = [other for other in form.openers if other in form.marks]
    rest = opening.removeprefix(mark)
    behind = (
        f"{rules.literal(rest) if rest else ''} {_behind_opening(rules, block, parallel=parallel)}"
    )
    text = rules.text_without(others)
    never = [
        escaped(other)
        for other in others
        if other != mark and not rules.parted(other)[1] and other not in mark
    ]
    return f"({text} | {rules.text_before(mark, never=never)} {behind})"


def text_without_calls(rules: Rules, form: CallFormat) -> str:
    """Free text in which no call can begin."""
    if channels := channel_texts(form):
        return channels.free(rules, form)
    return rules.text_without([mark for mark in form.openers if mark in form.marks])


def tokens_of_openers(rules: Rules, form: CallFormat) -> tuple[tuple[int, ...], bool]:
    """The tokens that calls begin with, and whether some begin with text instead."""
    if channel_texts(form):
        return (), True  # text is opened by the same tokens
    parted = [rules.parted(mark)[1] for mark in form.openers if mark in form.marks]
    return tuple({rules.marker_ids[token]: None for token in parted if token}), not all(parted)


def _behind_opening(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    call = rules.rule(one_of(f"{rules.literal(head)} {rest}" for head, rest in block.calls))
    return f"{call} {_behind_call(rules, block, parallel=parallel)}"


def _behind_call(rules: Rules, block: CallBlock, *, parallel: bool) -> str:
    closing = rules.literal(block.closing) if block.closing else ""
    if block.is_single or not parallel:
        return closing
    call = rules.rule(one_of(f"{rules.literal(head)} {rest}" for head, rest in block.calls))
    return f"({rules.literal(block.again)} {call})* {closing}"


def _beginning(block: CallBlock) -> str:
    """A regular expression of what a call without a marker begins with, white space in it as it may
    be.
    """
    heads = "|".join(escaped(block.opening.lstrip() + head) for head, _ in block.calls)
    return "(" + heads.replace(" ", r"\s*") + ")"
