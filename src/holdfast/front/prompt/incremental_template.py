"""Chat templates that write each message for itself, so that of a conversation that goes on only
what is new is rendered.

It is proved by a template's syntax tree: what it writes of a message may depend on that message,
its neighbours, the first one, and on what is the same for the whole conversation. Others are
rendered whole: those that count messages or look for the last question, that carry something from
one message to the next, that know the date.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from jinja2 import Environment, Template, nodes

from holdfast.front.prompt.tool_definitions import KeptTool, exact_key, made_once

_MARK, _END = "\ue0f5", "\ue0f6"  # private use: no text has them, no template strips them
_NEW = "holdfast_new"  # a template's variable: the places of the messages that are rendered
# messages at the beginning that are always rendered: one that stands before the first is the last
# of all
_LEAD = 4
_IMPURE = frozenset({"strftime_now", "lipsum", "cycler", "joiner", "datetime", "self"})
_OF_LOOPS = frozenset(
    {"first", "last", "index", "index0", "previtem", "nextitem", "depth", "depth0"}
)
_STRANGE = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.CallBlock,
    nodes.FilterBlock,
    nodes.NSRef,
)
_FEWEST_MESSAGES = 12  # fewer are rendered in no time
_ENTRY_BYTES = 600  # of a text, however short: its key, its place in the table


def grows(environment: Environment, source: str) -> bool:
    """Whether it is proved that the template can be brought into the form of `growing`.

    Nothing is compiled.
    """
    return _local_loop(environment.parse(source)) is not None


def growing(environment: Environment, source: str) -> Template | None:
    """The template in a form that writes chosen messages only, with a mark before each; None where
    that is not proved.
    """
    tree = environment.parse(source)
    loop = _local_loop(tree)
    if loop is None:
        return None
    index = nodes.Getattr(nodes.Name("loop", "load"), "index0", "load")
    is_new = nodes.Compare(index, [nodes.Operand("in", nodes.Name(_NEW, "load"))])
    loop.body = [nodes.If(is_new, [_written(_MARK), *loop.body], [], [])]
    tree.body.insert(tree.body.index(loop) + 1, _written(_END))
    tree.set_environment(environment)
    return environment.from_string(tree.set_lineno(1))  # type: ignore[arg-type]


def _local_loop(tree: nodes.Template) -> nodes.For | None:
    """The only loop over the messages, if what it writes of one depends on nothing but what is near
    it.
    """
    loops = [node for node in tree.body if isinstance(node, nodes.For) and _is_messages(node.iter)]
    return loops[0] if len(loops) == 1 and _is_local(tree, loops[0]) else None


def _written(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)])


def _is_local(tree: nodes.Template, loop: nodes.For) -> bool:
    """Whether what the loop writes of a message depends on nothing but what is near it."""
    if (
        loop.test is not None
        or loop.else_
        or loop.recursive
        or not isinstance(loop.target, nodes.Name)
    ):
        return False
    behind = tree.body[tree.body.index(loop) + 1 :]  # is rendered anew each time, whatever it is
    before = [
        node
        for node in tree.body
        if node is not loop and (node not in behind or isinstance(node, nodes.Macro))
    ]
    return all(_is_harmless(node, in_loop=False) for node in before) and all(
        _is_harmless(node, in_loop=True) for node in loop.body
    )


def _is_harmless(node: nodes.Node, *, in_loop: bool) -> bool:
    """in_loop: `loop` is that over the messages."""
    if isinstance(node, _STRANGE) or type(node).__name__ in ("Break", "Do"):
        return False
    if isinstance(node, nodes.Filter) and node.name == "random":
        return False
    if isinstance(node, nodes.Name):
        return node.name not in _IMPURE and node.name not in ("messages", "loop")
    if (
        isinstance(node, nodes.Getattr)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
    ):
        return not in_loop or node.attr in _OF_LOOPS
    if isinstance(node, nodes.Getitem) and _is_messages(node.node):
        return _is_near(node.arg, in_loop=in_loop)
    if isinstance(node, nodes.For):
        outer = [node.iter, *([node.test] if node.test else []), *node.else_]
        return all(_is_harmless(each, in_loop=in_loop) for each in outer) and all(
            _is_harmless(each, in_loop=False) for each in node.body
        )
    return all(_is_harmless(child, in_loop=in_loop) for child in _looked_into(node))


def _looked_into(node: nodes.Node) -> Iterator[nodes.Node]:
    """The parts of a node, without `messages` where it is only asked whether there are any."""
    tested = isinstance(node, nodes.And | nodes.Or | nodes.Not)
    for child in node.iter_child_nodes():
        is_test = tested or (isinstance(node, nodes.If) and child is node.test)
        if not (is_test and _is_messages(child)):
            yield child


def _is_messages(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "messages" and node.ctx == "load"


def _is_near(place: nodes.Node, *, in_loop: bool) -> bool:
    """Whether a place among the messages is the first, or one at most behind that of the loop, or a
    few before it.
    """
    if isinstance(place, nodes.Const):
        return type(place.value) is int and place.value == 0
    offset = 0
    if isinstance(place, nodes.Add | nodes.Sub):
        if not isinstance(place.right, nodes.Const) or type(place.right.value) is not int:
            return False
        offset = place.right.value if isinstance(place, nodes.Add) else -place.right.value
        place = place.left
    if not (
        in_loop
        and isinstance(place, nodes.Getattr)
        and isinstance(place.node, nodes.Name)
        and place.node.name == "loop"
    ):
        return False
    return place.attr in ("index", "index0") and -_LEAD < offset + (place.attr == "index") <= 1


class Renders(Protocol):
    """A template, wherever it is rendered."""

    def render(self, variables: Mapping[str, Any], **more: Any) -> str:
        """The text."""


class RenderedMessages:
    """What templates wrote of single messages; the longest unused are forgotten.

    Any thread may call it.
    """

    def __init__(self, *, most_bytes: int = 16 << 20) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._texts: OrderedDict[Hashable, str] = OrderedDict()  # by all that they depend on
        self._lock = threading.Lock()

    def render(
        self,
        template: Renders,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        *,
        tenant: str,
    ) -> str | None:
        """The conversation's text, as the whole template would give it; None when it has to be
        asked.

        template: in the form of `growing`. variables: all but the messages. Raises what the
        template raises.
        """
        setting = _setting(variables, tenant)
        keys = [exact_key(message, tenant=tenant) for message in messages]
        if setting is None or None in keys or len(keys) < _FEWEST_MESSAGES:
            return None
        wanted = [
            (
                id(template),
                setting,
                at,
                keys[0],
                *keys[max(0, at - _LEAD) : at + 1],
                keys[at + 1] if at + 1 < len(keys) else None,
            )
            for at in range(len(keys))
        ]
        with self._lock:
            texts = [self._known(key) if at >= _LEAD else None for at, key in enumerate(wanted)]
        new = [at for at, text in enumerate(texts) if text is None]
        rendered = template.render(
            variables, messages=_looked_at(messages, new), **{_NEW: frozenset(new)}
        )
        loop, end, behind = rendered.partition(_END)
        before, *parts = loop.split(_MARK)
        if not end or _END in behind or _MARK in behind or len(parts) != len(new):
            return None  # a mark is in one of the messages
        for at, text in zip(new, parts, strict=True):
            texts[at] = text
        with self._lock:
            for at, text in zip(new[_LEAD:], parts[_LEAD:], strict=True):
                self._keep(wanted[at], text)
        return "".join((before, *(text for text in texts if text), behind))

    def check_invariants(self) -> None:
        """Assert that the bytes are counted rightly and within their bound."""
        with self._lock:
            assert self._bytes == sum(map(_size, self._texts.values())), "bytes are miscounted"
            assert self._bytes <= self._most_bytes, "more is remembered than may be"

    def _known(self, key: Hashable) -> str | None:
        if (text := self._texts.get(key)) is not None:
            self._texts.move_to_end(key)
        return text

    def _keep(self, key: Hashable, text: str) -> None:
        if key in self._texts:
            return
        self._texts[key] = text
        self._bytes += _size(text)
        while self._bytes > self._most_bytes:
            self._bytes -= _size(self._texts.popitem(last=False)[1])


def _looked_at(messages: Sequence[Any], new: Sequence[int]) -> list[Any]:
    """The messages that a template in the form of `growing` looks at to write the new ones; nothing
    where the others were.
    """
    # places before the first are counted from the end
    near = {0, *range(max(0, len(messages) - _LEAD), len(messages))}
    for at in new:
        near.update(range(max(0, at - _LEAD), min(len(messages), at + 2)))
    return [message if at in near else None for at, message in enumerate(messages)]


def _setting(variables: Mapping[str, Any], tenant: str) -> bytes | None:
    """Stands for all that is the same for all messages of a conversation; None when that cannot be
    told exactly.
    """
    tools = [_exact(tool) for tool in variables.get("tools") or ()]
    return None if None in tools else exact_key({**variables, "tools": tools}, tenant=tenant)


def _exact(tool: Any) -> bytes | None:
    if isinstance(tool, KeptTool):
        return made_once(tool, "exact", lambda: exact_key(dict(tool), tenant=""))
    return exact_key(tool, tenant="")


def _size(text: str) -> int:
    return sys.getsizeof(text) + _ENTRY_BYTES
