"""Which format the models of a family write in: a format is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from holdfast.parsing.formats.plain import PlainFormat
from holdfast.parsing.segments import SegmentFormat

FORMATS: Final[Mapping[str, Callable[[], SegmentFormat]]] = {}
"""By `model_type` of config.json; models that are not here write plain text."""


def segment_format(family: str) -> SegmentFormat:
    """A fresh format for one sequence of a model of that family. Empty: no model's own, the text is taken as it is."""
    return FORMATS.get(family, PlainFormat)()
