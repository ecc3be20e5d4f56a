"""Messages that the model cannot answer, from a large grammar, with honest answers."""

from __future__ import annotations

from random import Random

import beyond_words as b
import words
from beyond_forms import QUESTIONS, REQUESTS, SLOTS
from spelling import typed
from words import lists_of

KNOW = "I do not know that, but I can answer questions about notes you give me."
DO = (
    "I cannot do that, but I can answer questions about notes, add small numbers, count, copy and "
    "edit text."
)
UNCLEAR = (
    "I did not understand that, but I can answer questions about notes, add small numbers, count, "
    "copy and edit text."
)

_LISTED = lists_of("beyond")
_KEYS = tuple(_LISTED["_KEYS"])
_HALVES = tuple(_LISTED["_HALVES"])


def _maths(rng: Random) -> str:
    first, second = rng.randint(2, 999), rng.randint(2, 99)
    return rng.choice(
        (
            f"{first} * {second}",
            f"{first} times {second}",
            f"{first} / {second}",
            f"{first} - {second}",
            f"{first} minus {second}",
            f"the square root of {first}",
            f"{second}% of {first}",
            f"x + {second} = {first}",
            f"{second}^2",
            f"{first} divided by {second}",
        )
    )


def _fill(rng: Random, form: str) -> str:
    slots = {name: rng.choice(items) for name, items in SLOTS.items()}
    slots["maths"], slots["year"] = _maths(rng), str(rng.randint(1400, 2030))
    slots["hour"] = rng.choice(
        (
            f"{rng.randint(1, 12)} {rng.choice(('am', 'pm'))}",
            f"{rng.randint(5, 23)}:{rng.choice(('00', '15', '30'))}",
            f"{rng.randint(2, 90)} minutes",
        )
    )
    slots["word"] = (
        words.invent(rng, rng.random() < 0.3) if rng.random() < 0.5 else words.common_word(rng)
    )
    slots["name"] = words.invent(rng, True) if rng.random() < 0.3 else rng.choice(words.NAMES)
    # invented topics and places, so that only the form matters
    if rng.random() < 0.2:
        slots["topic"] = " ".join(words.invent(rng) for _ in range(rng.randint(1, 2)))
        slots["place"], slots["person"] = (
            words.invent(rng, True),
            f"{words.invent(rng, True)} {words.invent(rng, True)}",
        )
    elif rng.random() < 0.2:
        slots["topic"] = f"{rng.choice(b.ADJECTIVES)} {words.common_word(rng)}s"
    text = form.format(**slots)
    return text[0].upper() + text[1:]


def _keys(rng: Random) -> str:
    """Random keys."""
    parts = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        row = rng.choice(_KEYS)
        start = rng.randrange(len(row))
        part = (row[start:] + row[:start])[: rng.randint(2, 7)]
        parts.append(part if rng.random() < 0.6 else "".join(rng.sample(part, len(part))))
    return rng.choice((" ", "", " ")).join(parts) * rng.choice((1, 1, 1, 2))


def unclear(rng: Random) -> str:
    """An unintelligible message: random keys, invented words, other languages, code, fragments,
    pasted texts.
    """
    kind = rng.random()
    if kind < 0.14:
        return _keys(rng)
    if kind < 0.26:
        return typed(
            rng,
            " ".join(
                words.invent(rng, rng.random() < 0.2) for _ in range(rng.choice((1, 1, 2, 2, 3, 5)))
            ),
        )
    if kind < 0.42:
        return typed(rng, rng.choice(b.FOREIGN), 0.05)
    if kind < 0.6:
        pool = rng.choice(b.FOREIGN_WORDS)
        text = " ".join(
            words.invent(rng) if rng.random() < 0.15 else rng.choice(pool)
            for _ in range(rng.randint(2, 9))
        )
        return typed(rng, text[0].upper() + text[1:] + rng.choice(("", "?", ".", " ?", "!")), 0.05)
    if kind < 0.72:
        return "\n".join(rng.choice(b.CODE) for _ in range(rng.choice((1, 1, 1, 2, 3, 6))))
    if kind < 0.86:
        return rng.choice((" ", " ", "\n")).join(
            sentence(rng) for _ in range(rng.choice((1, 2, 3, 3, 4, 5, 6)))
        )
    if kind < 0.92:
        chosen = rng.choice(b.SENTENCES).split()
        return typed(rng, " ".join(chosen[: rng.randint(2, max(2, len(chosen) - 1))]))
    return typed(rng, rng.choice(_HALVES), 0.0)


def sentence(rng: Random) -> str:
    """A sentence with some words exchanged."""
    pieces = rng.choice(b.SENTENCES).split()
    for place, piece in enumerate(pieces):
        if place and piece.isalpha() and rng.random() < 0.18:
            pieces[place] = words.invent(rng) if rng.random() < 0.35 else words.common_word(rng)
    return " ".join(pieces)


def beyond(rng: Random) -> tuple[str, str]:
    """A message and an honest answer."""
    kind = rng.random()
    if kind < 0.42:
        return typed(rng, _fill(rng, rng.choice(QUESTIONS)), 0.08), KNOW
    if kind < 0.78:
        return typed(rng, _fill(rng, rng.choice(REQUESTS)), 0.08), DO
    return unclear(rng), UNCLEAR
