"""How people type: case, punctuation, abbreviations, typing errors."""

from __future__ import annotations

from random import Random

_SHORT = (
    (" you ", " u "),
    (" are ", " r "),
    ("please", "pls"),
    ("what is", "whats"),
    ("what is", "what's"),
    ("What is", "What's"),
    ("because", "cuz"),
    ("your", "ur"),
    (" to ", " 2 "),
    ("going to", "gonna"),
    ("I am", "I'm"),
    ("do not", "don't"),
    ("how is", "hows"),
    ("who is", "whos"),
)
_ENDS = ("", "", "", ".", "!", "?", "??", "!!", "...", " :)", " ;)", "?!")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def slip(rng: Random, text: str) -> str:
    """Drop, double, swap or replace one letter."""
    places = [place for place, letter in enumerate(text) if letter.isalpha()]
    if len(places) < 4:
        return text
    place = rng.choice(places[1:])
    kind = rng.randrange(4)
    if kind == 0:
        return text[:place] + text[place + 1 :]
    if kind == 1:
        return text[: place + 1] + text[place] + text[place + 1 :]
    if kind == 2 and place + 1 < len(text):
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    return text[:place] + rng.choice(_LETTERS) + text[place + 1 :]


def cased(rng: Random, text: str) -> str:
    """Mostly unchanged or in lower case, sometimes in capitals."""
    kind = rng.random()
    if kind < 0.45:
        return text
    if kind < 0.85:
        return text.lower()
    if kind < 0.93:
        return text[:1].upper() + text[1:]
    return text.upper() if len(text) < 40 else text


def typed(rng: Random, text: str, slips: float = 0.12) -> str:
    """A message as somebody might type it. text: correctly written."""
    if rng.random() < 0.3:
        for long, short in rng.sample(_SHORT, 4):
            text = text.replace(long, short)
    if rng.random() < 0.6:
        end = text[-1] if text[-1] in "?!." else ""
        text = text.rstrip("?!.") + (
            rng.choice(_ENDS) if rng.random() < 0.5 else "" if rng.random() < 0.7 else end
        )
    if rng.random() < slips:
        text = slip(rng, text)
    return cased(rng, text)
