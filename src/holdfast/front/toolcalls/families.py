"""How the families of models write calls: a family is a line in one of two tables, a mechanism a
file beside this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.json_families import JSON_FAMILIES
from holdfast.front.toolcalls.markup_families import MARKUP_FAMILIES

FAMILIES: Final[Mapping[str, CallFormat]] = {**JSON_FAMILIES, **MARKUP_FAMILIES}
"""By the family's name."""

READ_TOO: Final[Mapping[str, tuple[str, ...]]] = {
    "hermes": ("qwen3_coder",),
    "mistral_v3": ("mistral_v13",),
    "mistral_v11": ("mistral_v3",),
    "mistral_v13": ("mistral_v3",),
}
"""Families whose calls are read where a family's own are expected: models of one line mix them up.
"""
