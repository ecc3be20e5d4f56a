"""Jinja as `transformers` runs chat templates: in a sandbox, with its filters and functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.front.prompt.tool_definitions import KeptTool, made_once

# What rendering a template may raise, by itself or through its expressions.
RENDER_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_OF_DICTIONARIES = frozenset(dir(dict))


class _GenerationBlock(Extension):
    """{% generation %}…{% endgeneration %} marks answers for training; here it is its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The nodes between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """As in `transformers`, but templates may append to lists and take from them: some that people
    mended by hand do.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        """The same as the original's, sooner for dictionaries, as messages are: no exception is
        raised on the way.
        """
        if type(obj) is dict and attribute not in _OF_DICTIONARIES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """What a template may reach."""
        if type(obj) in (str, LoopContext):
            return not attr.startswith("_")  # which is what the original comes to
        return (isinstance(obj, list) and attr in ("append", "pop")) or super().is_safe_attribute(
            obj, attr, value
        )


def jinja_environment() -> ImmutableSandboxedEnvironment:
    """A fresh environment, in which chat templates are compiled."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike jinja2's own: nothing escaped for HTML, the order of keys kept.

    Templates pass these names.
    """

    def written() -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
            default=_listed,
        )

    if not isinstance(value, KeptTool):
        return written()
    form = (ensure_ascii, indent, None if separators is None else tuple(separators), sort_keys)
    return made_once(value, form, written)


def _listed(value: Any) -> list[Any]:
    """What filters such as `map` give, which other implementations of Jinja write as lists too."""
    if isinstance(value, Iterator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
