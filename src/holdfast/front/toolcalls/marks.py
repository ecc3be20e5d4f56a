"""The markers in a family's markup. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_MARK: Final = re.compile(r"[\udc00-\udfff]|<[^<>\s]+>|\[/?[A-Z_]+\]")


def marks_in(*markup: str) -> Sequence[str]:
    """The markers that stand in these strings, each once: `<...>`, `[WORD]` and encoded ones."""
    return tuple(dict.fromkeys(mark for text in markup for mark in _MARK.findall(text)))
