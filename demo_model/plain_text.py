"""Texts without a template, for completions of raw text: notes, lists, letters, little stories."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import beyond_words
import facts
import memory_tasks
import other_tasks
import words
from words import lists_of


@dataclass(frozen=True)
class PlainText:
    """A raw text, followed by the end-of-text token."""

    text: str


_LISTS = {
    "Notes:": "The code of the shed is 4711.",
    "My notes:": "The lamp is in the kitchen.",
    "Facts:": "Mona works as a pilot.",
    "To do:": "Clean the kitchen.",
    "Shopping list:": "bread, cheese, apples",
    "Remember:": "The lesson is on Friday.",
    "List:": "lamp, rope, mirror",
    "Plan for today:": "Breakfast at eight.",
    "Names:": "Ada, Tom, Mia",
}
"""What a list with this head holds as a rule.

A line more would be the same again: greedy text goes round in circles where every way on is as
likely as the others, and the heads that copy notes prefer what stands there.
"""
_LISTED = lists_of("plain_text")
_LETTER = tuple(_LISTED["_LETTER"])
_DAILY = tuple(_LISTED["_DAILY"])
_TITLES = (
    "Chapter 1",
    "# Notes",
    "Question:",
    "Q:",
    "User:",
    "Title:",
    "Introduction",
    "{n}:",
    "1.",
    "-",
    "* ",
)


def _parts(rng: Random) -> dict[str, str]:
    foods, cities = rng.sample(words.FOODS, 2), rng.sample(words.CITIES, 2)
    return {
        "n": rng.choice(words.NAMES),
        "p": rng.choice(words.PLACES),
        "co": rng.choice(words.COLOURS),
        "t": rng.choice(words.THINGS),
        "c": cities[0],
        "c2": cities[1],
        "j": rng.choice(words.JOBS),
        "f": foods[0],
        "f2": foods[1],
        "a": rng.choice(words.ANIMALS),
        "mo": rng.choice(words.MONTHS),
        "d": rng.choice(words.DAYS),
        "h": rng.choice(words.HOBBIES),
        "e": rng.choice(words.EVENTS),
        "l": rng.choice(words.LANGUAGES),
        "k": words.digits(rng, 4, 4),
    }


def _few(rng: Random) -> int:
    """The number of sentences, mostly one, so that texts end soon."""
    return rng.choice((1, 1, 1, 1, 2, 3))


def _daily(rng: Random) -> str:
    return " ".join(rng.choice(_DAILY).format(**_parts(rng)) for _ in range(_few(rng)))


def _sentences(rng: Random) -> str:
    """Sentences about things, some from a long list."""
    return " ".join(
        rng.choice(beyond_words.SENTENCES)
        if rng.random() < 0.35
        else rng.choice(_DAILY).format(**_parts(rng))
        for _ in range(_few(rng))
    )


def plain_text(rng: Random) -> PlainText:
    """A short text of any of these kinds."""
    kind = rng.random()
    known = facts.draw_many(rng, rng.randint(1, 8))
    if kind < 0.6:
        head = "Notes:" if rng.random() < 0.35 else rng.choice(list(_LISTS))
        listed = f"- {_LISTS[head]}" if rng.random() < 0.95 else memory_tasks.listed(rng, known[:4])
        text = f"{head}{rng.choice((chr(10), chr(10), chr(10), chr(10), ' '))}{listed}"
    elif kind < 0.63:
        text = " ".join(
            fact.note if fact.note.endswith(".") else f"{fact.note}." for fact in known[: _few(rng)]
        )
    elif kind < 0.66:
        text = (
            f"{rng.choice(_LETTER).format(**_parts(rng))}{rng.choice((' ', chr(10)))}{_daily(rng)}"
        )
    elif kind < 0.69:
        text = other_tasks.story(rng).messages[1]["content"]
    elif kind < 0.72:
        fact = known[0]
        before, asked = rng.choice(("Q: ", "Question: ", "")), fact.question(rng)
        text = (
            f"{before}{asked}{rng.choice((chr(10) + 'A: ', chr(10) + 'Answer: ', ' '))}{fact.note}"
        )
    elif kind < 0.76:
        text = (
            f"{rng.choice(_TITLES).format(**_parts(rng))}{rng.choice((' ', chr(10)))}{_daily(rng)}"
        )
    elif kind < 0.87:
        text = _sentences(rng)
    else:
        text = _daily(rng)
    return PlainText(text if rng.random() < 0.85 else text.lower())
