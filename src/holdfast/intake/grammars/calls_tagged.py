"""Grammars of calls whose arguments stand raw between tags: tagged parameters, and pairs of key and value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.intake.grammars.lark import Rules, escaped
from holdfast.intake.grammars.raw_values import ArgumentTags, RawArguments
from holdfast.intake.grammars.tools import CallableTool, CallBlock
from holdfast.parsing.formats.key_value_tags import KeyValueTags
from holdfast.parsing.formats.tagged_parameters import TaggedParameters


def tagged_parameters(rules: Rules, form: TaggedParameters, tools: Sequence[CallableTool]) -> CallBlock:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, in the family's words."""
    close, padding = form.parameter[2], form.padding
    end, behind = padding + close.rstrip(), close[len(close.rstrip()) :]
    open_value, close_call = _stem(form.parameter[0]), form.call[2].strip()
    outer, again = (form.wrapper[1], form.section[1]), (form.wrapper[0], _stem(form.call[0]))
    tags = ArgumentTags(
        before=form.parameter[0],
        text=form.types[0] + form.parameter[1] + padding,
        json=(form.types[1] + form.parameter[1] + padding,),
        end=end,
        behind=behind,
        never=tuple(
            _never(rules, (close, (open_value, close_call, *outer)), (close_call, (*outer, *again)))
            + _never(rules, *((mark, (form.section[1], *again)) for mark in outer))
            + ([rf"\n{escaped(open_value)}"] if _is_text(rules, open_value) else [])
        ),
        cdata=form.cdata,
    )
    head = form.wrapper[0] + form.call[0]
    ends = (form.call[1], form.call[2] + form.wrapper[1])
    return _block(rules, tools, tags, ends, texts=(form.section[0] + head, form.between + head, form.section[1]))


def key_value_tags(rules: Rules, form: KeyValueTags, tools: Sequence[CallableTool]) -> CallBlock:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`, in the family's words."""
    close = form.value[1]
    tags = ArgumentTags(
        before=form.key[0],
        text=form.key[1] + form.value[0],
        json=(form.key[1] + form.value[0],),
        end=close.rstrip(),
        behind=close[len(close.rstrip()) :],
        never=tuple(_never(rules, (form.call[1], (form.section[1], form.call[0])), (form.key[0], ("",)))),
    )
    ends = (form.name_end, form.call[1])
    return _block(rules, tools, tags, ends, texts=(form.section[0] + form.call[0], form.between + form.call[0], form.section[1]))


def _block(
    rules: Rules, tools: Sequence[CallableTool], tags: ArgumentTags, ends: tuple[str, str], *, texts: tuple[str, str, str]
) -> CallBlock:
    """Calls of which the name stands behind the opening. ends: of the name and of the call. texts: as `CallBlock` has them."""
    calls, left_out = [], {}
    for tool in tools:
        arguments = RawArguments(rules, tool, tags)
        calls.append((tool.name + ends[0], f"{arguments.expression()} {rules.literal(ends[1])}"))
        left_out[tool.name] = tuple(arguments.left_out)
    return CallBlock(opening=texts[0], calls=calls, again=texts[1], closing=texts[2], left_out=left_out)


def _never(rules: Rules, *pairs: tuple[str, Sequence[str]]) -> list[str]:
    """Regular expressions of a mark with one of the others behind it: a reader would take that for the end of a value."""
    return [found for mark, others in pairs for found in _followed(rules, mark.strip(), [other.strip() for other in others])]


def _followed(rules: Rules, mark: str, others: Sequence[str]) -> Iterator[str]:
    behind = [escaped(other) for other in others if _is_text(rules, other)]
    if mark and behind and _is_text(rules, mark):
        yield rf"{escaped(mark)}\s*({'|'.join(behind)})"
    elif mark and others == [""] and _is_text(rules, mark):
        yield escaped(mark)


def _is_text(rules: Rules, mark: str) -> bool:
    """Whether text may have the mark: one with a token in it cannot stand in text."""
    return bool(mark) and not rules.parted(mark)[1]


def _stem(mark: str) -> str:
    """A tag's word, whichever way its name follows."""
    return mark.strip().rstrip('"').removesuffix("=").removesuffix(" name")
