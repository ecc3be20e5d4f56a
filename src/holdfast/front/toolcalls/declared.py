"""The tools that a request declares, as a reader of calls needs them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from holdfast.front.toolcalls.typed_values import ParameterTypes

_NAME = re.compile(r"[^\s<>\"'={}()\[\],;]{1,256}")
_PREFIX = "functions."


class ToolName(NamedTuple):
    """The tool that a call is of."""

    name: str
    declared: bool
    repaired: bool = False


class DeclaredTools:
    """Names and parameters of the tools of a request, given as OpenAI shapes them."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {
            each["name"]: each.get("parameters")
            for each in functions
            if isinstance(each.get("name"), str)
        }

    def named(self, written: str) -> ToolName | None:
        """The tool that is meant; None: that is no name.

        Case and `-`, `_`, `.` are mended where only one tool fits then.
        """
        written = written.strip().strip("\"'")
        if not _NAME.fullmatch(written):
            return None
        if written in self._parameters:
            return ToolName(written, declared=True)
        alike = self._alike.get(_essence(written), ())
        return (
            ToolName(alike[0], declared=True, repaired=True)
            if len(alike) == 1
            else ToolName(written, declared=False)
        )

    def declares(self, name: str) -> bool:
        """Whether there is a tool of exactly this name."""
        return name in self._parameters

    def required(self, name: str) -> frozenset[str]:
        """The arguments that a tool cannot do without."""
        parameters = self._parameters.get(name)
        found = parameters.get("required") if isinstance(parameters, Mapping) else None
        return (
            frozenset(key for key in found if isinstance(key, str))
            if isinstance(found, list)
            else frozenset()
        )

    def only_fitting(self, arguments: Any) -> str:
        """The only tool that takes these arguments; empty when there are several, or none."""
        if not isinstance(arguments, Mapping) or not arguments:
            return ""
        given = set(arguments)
        fitting = [
            name
            for name in self._parameters
            if self.required(name) <= given <= set(self.parameters(name).properties)
        ]
        return fitting[0] if len(fitting) == 1 else ""

    def parameters(self, name: str) -> ParameterTypes:
        """The types of a tool's parameters."""
        return ParameterTypes(self._parameters.get(name))

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name in self._parameters:
            found.setdefault(_essence(name), []).append(name)
        return found


def _essence(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.removeprefix(_PREFIX)).lower()
