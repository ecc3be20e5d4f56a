"""First words and small talk in the spellings of users, with answers."""

from __future__ import annotations

from random import Random

from spelling import typed
from talk_forms import FORMS, expand
from talks import TALKS
from words import lists_of

_TO_WHOM = (
    "",
    "",
    "",
    "",
    " there",
    " you",
    " friend",
    " everyone",
    " Holdfast",
    " all",
    " bot",
    " mate",
    " again",
    " little one",
    " model",
)
_LISTED = lists_of("first_words")
_WHOM = _LISTED["_WHOM"]
_GREETINGS = _LISTED["_GREETINGS"]
_DAYTIMES = (
    ("Good morning", 3),
    ("Good afternoon", 2),
    ("Good evening", 2),
    ("Good day", 1),
    ("Morning", 1),
    ("Evening", 1),
)
_MORE_GREETING = (
    "",
    "",
    "",
    "",
    "",
    ", how can you help me",
    ", nice to meet you",
    ", I am new here",
    ", it's me",
    ", let us begin",
    " and welcome",
)
_SAY_HELLO = tuple(_LISTED["_SAY_HELLO"])

_WEIGHTS = [talk.weight for talk in TALKS]


def greeting(rng: Random) -> tuple[str, str]:
    """A greeting and its answer, which repeats the time of day."""
    if rng.random() < 0.25:
        return typed(rng, rng.choice(_SAY_HELLO)), "Hello! How can I help you?"
    if rng.random() < 0.3:
        start = rng.choices([text for text, _ in _DAYTIMES], [weight for _, weight in _DAYTIMES])[0]
        answer = start if start.startswith("Good") else f"Good {start.lower()}"
    else:
        start, answer = rng.choice(_GREETINGS), "Hello"
        if rng.random() < 0.08:
            start = f"{start} {start.lower()}"
    whom = f" {rng.choice(_WHOM)}" if rng.random() < 0.25 else rng.choice(_TO_WHOM)
    said = (
        start
        + rng.choice((",", "", "")) * (whom != "")
        + whom
        + (rng.choice(_MORE_GREETING) if rng.random() < 0.3 else "")
    )
    return typed(rng, said, 0.08), f"{answer}! How can I help you?"


def small_talk(rng: Random) -> tuple[str, str]:
    """Small talk and its answer."""
    if rng.random() < 0.2:
        return greeting(rng)
    talk = rng.choices(TALKS, _WEIGHTS)[0]
    if talk.answer in FORMS and rng.random() < 0.6:
        return typed(rng, expand(rng, rng.choice(FORMS[talk.answer]))), talk.answer
    text = rng.choice(talk.said)
    return (text if talk.answer.startswith("A small lamp") else typed(rng, text)), talk.answer
