"""How the families of models write calls: a family is a line here, a mechanism a file beside this one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.parsing.formats.call_format import CallFormat
from holdfast.parsing.formats.json_calls import JsonCalls

FAMILIES: Final[Mapping[str, CallFormat]] = {
    "hermes": JsonCalls(wrapper=("<tool_call>\n", "\n</tool_call>")),
}
"""By the family's name."""
