"""Handwritten frames of notes (`frames/*.txt`): notes and differently worded questions.

A frame is a block of lines: `note:` (wordings of a fact), `ask:` (questions that it answers),
`near:` (questions about the same subject that it does not answer) and `let name = a|b|c` (words for
a slot of this frame). `written_slots` fills other slots such as `{person}`; `{person2}` is another
person, `{a:thing}` includes the article, and `{act.2}` is the second form of `bought/buy`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random

import open_words
import wide_words
import written_slots

FOLDER = Path(__file__).with_name("frames")
_LINE = re.compile(r"(note|ask|near): (.+)")
_LET = re.compile(r"let (\w+) = (.+)")
_SLOT = re.compile(r"\{(a:)?([a-z_]+?)([0-9]?)(?:\.([0-9]))?\}")
_INVENTED = 0.2
"""Of the words of `let` lines."""


@dataclass(frozen=True, eq=False)
class WrittenFrame:
    """A kind of fact."""

    notes: list[str] = field(default_factory=list)
    asks: list[str] = field(default_factory=list)
    nears: list[str] = field(default_factory=list)
    words: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Filled:
    """A frame with all slots filled."""

    note: str
    asks: list[str]
    nears: list[str]


def read(text: str) -> list[WrittenFrame]:
    """The frames of a file."""
    frames = []
    for block in re.split(r"\n\s*\n", text):
        frame = WrittenFrame()
        kinds = {"note": frame.notes, "ask": frame.asks, "near": frame.nears}
        for line in block.splitlines():
            if match := _LINE.fullmatch(line.strip()):
                if wide_words.is_allowed(match[2]):
                    kinds[match[1]].append(match[2])
            elif match := _LET.fullmatch(line.strip()):
                options = [word.strip() for word in match[2].split("|")]
                frame.words[match[1]] = [
                    word for word in options if wide_words.is_allowed(word.replace("/", " "))
                ]
            elif line.strip() and not line.startswith("#"):
                raise ValueError(
                    f"this line of a frame is none of note, ask, near and let: {line!r}"
                )
        if frame.notes and frame.asks and frame.nears:
            frames.append(frame)
    return frames


@cache
def all_frames() -> list[list[WrittenFrame]]:
    """The frames of each file."""
    return [read(path.read_text()) for path in sorted(FOLDER.glob("*.txt"))]


def fill(rng: Random, frame: WrittenFrame) -> Filled:
    """Fill the slots of the frame."""
    while True:
        values: dict[str, str] = {}
        note = _filled(rng, rng.choice(frame.notes), frame, values)
        asks = [_filled(rng, ask, frame, values) for ask in frame.asks]
        nears = [_filled(rng, near, frame, values) for near in frame.nears]
        if wide_words.is_allowed(" ".join((note, *asks, *nears))):
            return Filled(note, asks, nears)


def _filled(rng: Random, text: str, frame: WrittenFrame, values: dict[str, str]) -> str:
    """The text with filled slots. values: earlier fillers, to which new ones are added."""

    def value(match: re.Match[str]) -> str:
        article, name, number, form = match.groups()
        key = name + number
        if key not in values:
            values[key] = _drawn(rng, name, frame, taken=values)
        forms = values[key].split("/")
        chosen = forms[int(form) - 1] if form else values[key]
        return open_words.article(chosen) if article else chosen

    return open_words.start_upper(_SLOT.sub(value, text))


def _drawn(rng: Random, name: str, frame: WrittenFrame, taken: dict[str, str]) -> str:
    """A filler that no other slot has."""
    own = frame.words.get(name)
    for _ in range(20):
        if own is None:
            value = written_slots.fill(name, rng)
        elif rng.random() < _INVENTED and all(word.isalpha() and word.islower() for word in own):
            value = open_words.invented(rng)
        else:
            value = rng.choice(own)
        if value not in taken.values():
            return value
    return value


_COMMON = frozenset(
    """
    a an the is are was were be been do does did has have had will would can could should
    shall may might must of to in on at by for from with and or if i me my mine we us our
    you your he him his she her it its they them their this that these those what when
    where who whom whose why which how much many long often far old tell know remind
    remember please there not no any some get got again so as about up out off into than s
    t d ll re ve m whats wheres whos let need
    """.split()
)


def telling_words(text: str) -> frozenset[str]:
    """The stems of words that identify a text's subject."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return frozenset(word[:5] for word in found if word not in _COMMON)
