"""Tools and what is asked of them, whatever the protocol: names, limits, and which of them may be
called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from holdfast.front.prompt.limits import nesting_of
from holdfast.front.server.problem import RequestRefused
from holdfast.wire.requests import ToolChoice

_LONGEST_NAME = 256
_DEEPEST_SCHEMA = 64
FunctionName = Annotated[
    str, Field(min_length=1, max_length=_LONGEST_NAME, pattern=r"^[^\s\x00-\x1f\"<>{}]+$")
]
ToolMode: TypeAlias = Literal["auto", "none", "required"]


def choice_among(
    mode: ToolMode,
    names: Sequence[str],
    *,
    tools: Sequence[Mapping[str, Any]],
    parallel: bool,
    field: str,
) -> ToolChoice:
    """What is asked of these tools, OpenAI-shaped.

    Raises RequestRefused for a name that is none of theirs.
    """
    known = {tool["function"]["name"] for tool in tools}
    if mode == "required" and not (known or names):
        raise RequestRefused(f"`{field}`: there are no tools to choose from", field=field)
    for name in names:
        if name not in known:
            raise RequestRefused(
                f"`{field}`: there is no such tool", field=field, shown=f": {name[:100]!r}"
            )
    return ToolChoice(mode=mode, names=tuple(dict.fromkeys(names)), parallel=parallel)


def checked_definitions(
    tools: Sequence[dict[str, Any]],
    *,
    most_parts: int,
    field: str = "",
    fields: Sequence[str] = (),
    schema: str = "parameters",
) -> tuple[dict[str, Any], ...]:
    """Definitions, OpenAI-shaped, as a prompt has them. Raises RequestRefused.

    Names in errors: `field` has a place for the number of a tool; or `fields` has one for each.
    """
    names: set[str] = set()
    parts = 0
    for place, tool in enumerate(tools):
        function, named = tool["function"], fields[place] if fields else field.format(place)
        if (name := function["name"]) in names:
            raise RequestRefused(
                f"`{named}.name`: two tools have this name",
                field=f"{named}.name",
                shown=f": {name!r}",
            )
        nesting = nesting_of(function.get("parameters"), most_parts=most_parts)
        if nesting.levels > _DEEPEST_SCHEMA:
            reason = f"`{named}.{schema}`: deeper than {_DEEPEST_SCHEMA} levels"
            raise RequestRefused(reason, field=f"{named}.{schema}")
        parts += nesting.parts
        if parts > most_parts:
            reason = (
                f"`{named}`: with it the definitions of the tools have more than {most_parts:,} "
                "keys and values"
            )
            raise RequestRefused(reason, field=named)
        names.add(name)
    return tuple(tools)
