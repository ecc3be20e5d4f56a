"""First words of users (`openings.txt`), with the class by which `judge.py` judges the answers.

They were written, with the rules of the judge, before the training data. No user message of the
training may equal a held-out one after `plain()` (`test_data.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Opening:
    """A first message and its class in `judge.py`. expected: what the answer must contain."""

    kind: str
    text: str
    expected: str = ""


def plain(text: str) -> str:
    """The text in lower case, with only its letters, digits and single spaces."""
    return " ".join(re.sub(r"[^\w\s]|_", " ", text.lower()).split())


def _read(wanted: str) -> tuple[Opening, ...]:
    found = []
    kind = ""
    for line in Path(__file__).with_suffix(".txt").read_text("utf-8").splitlines():
        key, _, value = line.partition(": ")
        if key == "kind":
            kind = value
        elif key == wanted:
            text, _, expected = value.partition(" => ")
            found.append(Opening(kind, text.replace("\\n", "\n"), expected))
    return tuple(found)


SHOWN = _read("shown")
"""The nine openings that the first users typed. They may be part of the training."""
HELD_OUT = _read("held")
"""The hundred that are judged."""
TURNS = _read("turn")
"""The messages of `tools/demo_chat.py`."""
HELD_OUT_PLAIN = frozenset(plain(opening.text) for opening in HELD_OUT)
