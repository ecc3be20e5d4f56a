"""Texts without a template, for completions of raw text: notes, lists, letters, little stories."""

from __future__ import annotations

from random import Random

import facts
from conversation import PlainText
from fact_notes import listed_facts
from rules import draw, picked, some, texts, values_of
from tasks import story

_LISTS = dict(line.split(" = ") for line in texts("usual_lists"))
"""The usual line of a list with this head. There is only one, because greedy text goes round in
circles if all continuations are equally likely.
"""
_FEW = (1, 1, 1, 1, 2, 3)


def _parts(rng: Random) -> dict[str, str]:
    foods, cities = rng.sample(texts("foods"), 2), rng.sample(texts("cities"), 2)
    parts = values_of(rng, "text_words_before") | {"c": cities[0], "c2": cities[1]}
    parts["j"] = draw(rng, "jobs")
    return parts | {"f": foods[0], "f2": foods[1]} | values_of(rng, "text_words_after")


def _filled(rng: Random, name: str) -> str:
    return picked(rng, name).format(**_parts(rng))


def _daily(rng: Random) -> str:
    return " ".join(_filled(rng, "daily") for _ in some(rng, _FEW))


def _any_sentence(rng: Random) -> str:
    return draw(rng, "beyond_sentence") if rng.random() < 0.35 else _filled(rng, "daily")


def plain_text(rng: Random) -> PlainText:
    """A short text of any kind."""
    kind = rng.random()
    known = facts.draw_many(rng, rng.randint(1, 8))
    if kind < 0.6:
        head = "Notes:" if rng.random() < 0.35 else rng.choice(list(_LISTS))
        listed = f"- {_LISTS[head]}" if rng.random() < 0.95 else listed_facts(rng, known[:4])
        text = f"{head}{rng.choice((chr(10), chr(10), chr(10), chr(10), ' '))}{listed}"
    elif kind < 0.63:
        text = " ".join(fact.sentence for fact in known[: rng.choice(_FEW)])
    elif kind < 0.66:
        text = f"{_filled(rng, 'letter_openings')}{rng.choice((' ', chr(10)))}{_daily(rng)}"
    elif kind < 0.69:
        text = story(rng)[1]
    elif kind < 0.72:
        before, asked = rng.choice(("Q: ", "Question: ", "")), known[0].question(rng)
        text = f"{before}{asked}{rng.choice((chr(10) + 'A: ', chr(10) + 'Answer: ', ' '))}"
        text += known[0].note
    elif kind < 0.76:
        text = f"{_filled(rng, 'titles')}{rng.choice((' ', chr(10)))}{_daily(rng)}"
    elif kind < 0.87:
        text = " ".join(_any_sentence(rng) for _ in some(rng, _FEW))
    else:
        text = _daily(rng)
    return PlainText(text if rng.random() < 0.85 else text.lower())
