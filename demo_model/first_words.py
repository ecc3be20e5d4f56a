"""First words and small talk in the spellings of users, with answers."""

from __future__ import annotations

from random import Random

from spelling import typed
from talk_forms import FORMS, expand
from talks import TALKS
from words import listed

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
_WHOM = (
    "guys folks sir madam people boss captain doctor stranger neighbour world chum buddy pal dear "
    "sweetie robot machine program "
    "server assistant teacher team dude man bro sister "
    "brother fellow lady master genius colleague darling chief ladies Ada Tom Nora "
    "Max champ amigo tiger sunshine human comrade cowboy pilot Mister Miss"
).split()
_GREETINGS = (
    "Hello Hello Hello Hi Hi Hi Hey Hey Hiya Howdy Greetings Yo Heya Hallo Hullo Hellooo Hiii "
    "Heyyy Hoi Aloha Ahoy Salutations "
    "Sup Helo Hii Ello Welcome Hola Wassup"
).split()
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
_SAY_HELLO = listed(
    """
Say hello.|Say hi.|Say hello to me.|Please say hello.|Can you say hello?|Just say hi.|Greet me.|Say hello!|Could you say hi?
|Say hi to everyone.|Say hello world.|Say something.|Say hey.|Say something nice.|Say a word to me.|Nice to meet you.
|Pleased to meet you.|It is nice to meet you.|I just got here.|Let's chat.|Let us talk.|Can we talk?|Start.|Let's get started.
|I want to talk to you.|Shall we begin?|Talk to me.
"""
)

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
