"""Handwritten frames of notes (`frames/*.txt`): notes and differently worded questions.

A frame is a block of lines: `note:` (wordings of a fact), `ask:` (questions that it answers),
`near:` (questions about the same subject that it does not answer) and `let name: a|b|c` (words for
a slot of this frame). `rules/slots.txt` fills other slots such as `{person}`; `{person2}` is
another person, `{a:thing}` includes the article, and `{act.2}` is the second form of `bought/buy`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from random import Random

from rules import HERE, article, blocks, draw, function, plural, start_upper, texts
from words import digits, invented, is_allowed

_SLOT = re.compile(r"\{(a:)?([a-z_]+?)([0-9]?)(?:\.([0-9]))?\}")
_INVENTED = 0.2
"""Of the words of `let` lines."""
_INVENTED_NOUNS = frozenset(
    "tool shop club event container animal vehicle building instrument food dish fruit drink "
    "material adjective plant".split()
)


@dataclass(frozen=True, eq=False)
class WrittenFrame:
    """A kind of fact."""

    notes: list[str]
    asks: list[str]
    nears: list[str]
    words: dict[str, list[str]]


def _frame(block: dict[str, list[str]]) -> WrittenFrame:
    allowed = {
        key: [text for text in block.get(key, []) if is_allowed(text)]
        for key in ("note", "ask", "near")
    }
    words = {
        key.removeprefix("let "): [
            word.strip() for word in values[-1].split("|") if is_allowed(word.replace("/", " "))
        ]
        for key, values in block.items()
        if key.startswith("let ")
    }
    return WrittenFrame(allowed["note"], allowed["ask"], allowed["near"], words)


@cache
def all_frames() -> list[list[WrittenFrame]]:
    """The frames of each file."""
    files = []
    for path in sorted((HERE / "frames").glob("*.txt")):
        frames = [_frame(block) for block in blocks(path.read_text("utf-8"))]
        files.append([frame for frame in frames if frame.notes and frame.asks and frame.nears])
    return files


def fill(rng: Random, frame: WrittenFrame) -> tuple[str, list[str], list[str]]:
    """A note, its questions, and those that it nearly answers, with all slots filled."""
    while True:
        values: dict[str, str] = {}
        note = _filled(rng, rng.choice(frame.notes), frame, values)
        asks = [_filled(rng, ask, frame, values) for ask in frame.asks]
        nears = [_filled(rng, near, frame, values) for near in frame.nears]
        if is_allowed(" ".join((note, *asks, *nears))):
            return note, asks, nears


def _filled(rng: Random, text: str, frame: WrittenFrame, values: dict[str, str]) -> str:
    """The text with filled slots. values: earlier fillers, to which new ones are added."""

    def value(match: re.Match[str]) -> str:
        has_article, name, number, form = match.groups()
        key = name + number
        if key not in values:
            values[key] = _drawn(rng, name, frame, taken=values)
        chosen = values[key].split("/")[int(form) - 1] if form else values[key]
        return article(chosen) if has_article else chosen

    return start_upper(_SLOT.sub(value, text))


def _drawn(rng: Random, name: str, frame: WrittenFrame, taken: dict[str, str]) -> str:
    """A filler that no other slot has."""
    own = frame.words.get(name)
    for _ in range(20):
        if own is None:
            value = _filler(rng, name)
        elif rng.random() < _INVENTED and all(word.isalpha() and word.islower() for word in own):
            value = invented(rng)
        else:
            value = rng.choice(own)
        if value not in taken.values():
            return value
    return value


def _filler(rng: Random, kind: str) -> str:
    if kind in _INVENTED_NOUNS and rng.random() < 0.25:
        word = invented(rng)
        return plural(word) if kind == "fruit" else word
    return draw(rng, f"slot_{kind}")


@function
def clock_time(rng: Random) -> str:
    """An hour with minutes, or with `am` or `pm`."""
    hour = rng.randint(0, 23)
    minute = rng.choice(("00", "05", "10", "15", "20", "30", "40", "45", "55"))
    half = f"{hour % 12 or 12} {'am' if hour < 12 else 'pm'}"
    return rng.choice((f"{hour}:{minute}", f"{hour:02}:{minute}", half))


@function
def password(rng: Random) -> str:
    """Words and digits."""
    parts = [draw(rng, "noun") for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.6:
        parts.append(digits(rng, 1, 4))
    return rng.choice("-_.-").join(parts)


@function
def document(rng: Random) -> str:
    """The name or the path of a file."""
    name = draw(rng, "slot_name")
    name = f"{name.replace('-', rng.choice('-_'))}.{draw(rng, 'document_ending')}"
    return name if rng.random() < 0.5 else f"{draw(rng, 'top_folder')}/{name}"


def telling_words(text: str) -> frozenset[str]:
    """The stems of words that identify a text's subject."""
    found = re.findall(r"[a-z0-9]+", text.lower())
    return frozenset(word[:5] for word in found if word not in _small_words())


@cache
def _small_words() -> frozenset[str]:
    return frozenset(texts("small_words"))
