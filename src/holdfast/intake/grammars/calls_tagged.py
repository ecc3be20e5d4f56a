"""Grammars of calls whose arguments stand raw between tags: tagged parameters, and pairs of key and value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from holdfast.intake.grammars.lark import GAP, Rules, escaped
from holdfast.intake.grammars.members import members
from holdfast.intake.grammars.raw_values import RawValues
from holdfast.intake.grammars.tools import CallableTool, CallRules
from holdfast.parsing.formats.key_value_tags import KeyValueTags
from holdfast.parsing.formats.tagged_parameters import TaggedParameters

_FREE_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
