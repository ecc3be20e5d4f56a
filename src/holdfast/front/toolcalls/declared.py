"""The tools that a request declares, and which of them a model means by a name. No I/O."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, NamedTuple

from holdfast.front.toolcalls.argument_types import ParameterTypes
from holdfast.front.toolcalls.json_schema import strings

_NAME: Final = re.compile(r"[^\s<>\"'={}()\[\],;]{1,256}")


class ToolName(NamedTuple):
    """The tool that a call names.

    declared: whether the request declares the tool. repaired: whether the model spelled its name
    differently.
    """

    name: str
    declared: bool
    repaired: bool = False


class DeclaredTools:
    """The names and parameters of a request's tools, given in OpenAI's format."""

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self._parameters = {
            each["name"]: each.get("parameters")
            for each in functions
            if isinstance(each.get("name"), str)
        }

    def resolve(self, name: str) -> ToolName | None:
        """Return the tool that the model means, or None if the text cannot be a tool's name.

        Differences in case, `-`, `_` and `.` are ignored if only one declared tool matches.
        """
        name = name.strip().strip("\"'")
        if not _NAME.fullmatch(name):
            return None
        if name in self._parameters:
            return ToolName(name, declared=True)
        similar_names = self._by_normalized_name.get(_normalized_name(name), ())
        if len(similar_names) == 1:
            return ToolName(similar_names[0], declared=True, repaired=True)
        return ToolName(name, declared=False)

    def declares(self, name: str) -> bool:
        """Whether there is a tool with exactly this name."""
        return name in self._parameters

    def required(self, name: str) -> frozenset[str]:
        """Return the names of a tool's required arguments."""
        parameters = self._parameters.get(name)
        names = parameters.get("required") if isinstance(parameters, Mapping) else None
        return frozenset(strings(names))

    def only_match(self, arguments: Any) -> str:
        """Return the only tool that accepts these arguments; empty unless exactly one does."""
        if not isinstance(arguments, Mapping) or not arguments:
            return ""
        argument_names = set(arguments)
        matching = [
            name
            for name in self._parameters
            if self.required(name) <= argument_names <= set(self.parameters(name).properties)
        ]
        return matching[0] if len(matching) == 1 else ""

    def parameters(self, name: str) -> ParameterTypes:
        """Return the types of a tool's parameters."""
        return ParameterTypes(self._parameters.get(name))

    @cached_property
    def _by_normalized_name(self) -> dict[str, list[str]]:
        """The declared names, by their normalized form, which several may share."""
        names: dict[str, list[str]] = {}
        for name in self._parameters:
            names.setdefault(_normalized_name(name), []).append(name)
        return names


def _normalized_name(name: str) -> str:
    return re.sub(r"[-_.\s]", "", name.removeprefix("functions.")).lower()
