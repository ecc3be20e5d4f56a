"""Texts without a template, for completions of raw text: notes, lists, letters, little stories."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import beyond_words
import facts
import memory_tasks
import other_tasks
import words
from words import listed


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
_LETTER = (
    "Dear {n},",
    "Hello {n},",
    "Hi {n},",
    "Good morning {n},",
    "Hello",
    "Hi there",
    "Hey {n}",
    "To {n}:",
    "Dear friend,",
    "Hello world",
    "Dear team,",
)
_DAILY = listed(
    """
Today {n} went to the {p} and found a {co} {t}.|The {t} in the {p} is {co}.|My name is {n} and I live in {c}.
|I am a {j} from {c}.|I like {f} and {f2}.|We met {n} in {c} last {d}.|The {a} sat in the {p} and looked at the {t}.
|There was a {co} {t} in the {p}.|It was a cold morning in {mo}.|In the evening they made some {f}.
|Yesterday I saw a {a} in the {p}.|On {d} the {j} comes to {c}.|The best thing about {c} is the {f}.
|Once upon a time there was a {j} called {n}.|Once there was a small {a} in {c}.|She gave the {t} to {n}.
|He put the {t} into the {p}.|They looked for the {t} in the {p}.|What a nice {t}, said {n}.|This is the {t} of {n}.
|If you see {n}, say hello.|When {n} came home, the {t} was gone.|You can find the {t} in the {p}.|A {co} {t} stood in the {p}.
|The {j} and the {a} are friends.|It is a good day for {h}.|Every {d} {n} goes {h}.|Our {e} is on {d}.
|Please bring the {t} to the {p}.|An old {j} lives in the {p}.|I think that {n} has the {t}.|At last {n} found the {t}.
|First we go to {c}, then to {c2}.|One day {n} walked to {c} with a {co} {t}.|In {c} there is a {j} who likes {f}.
|As soon as the {e} was over, {n} went home.|My favourite food is {f}.|My {a} is called {n}.|His {t} is {co}.|Her {a} likes {f}.
|Their {e} was in {mo}.|No one knew where the {t} was.|All of us like {f}.|Some people like {f}, others like {f2}.
|But {n} did not see the {a}.|And so they went to {c}.|For lunch we had {f}.|From {c} to {c2} it is a long way.
|With a {co} {t} in the hand {n} came in.|After the {e} {n} was tired.|Before the {e} we ate some {f}.
|To get to {c}, take the train.|By the way, the {t} is {co}.|So {n} took the {t} and left.|Now the {t} is in the {p}.
|Here is the {t} of {n}.|Many people in {c} speak {l}.|Most days {n} works in the {p}.|Do you know where the {t} is?
|Is the {t} in the {p}?|Where is {n}? Nobody knows.|Why is the {t} {co}? It is old.|How are you, {n}? I am well.
|Can you see the {a}? It is in the {p}.|Let us go to the {p}.|Good food is {f} with {f2}.|The weather in {c} is fine today.
|The code of {n} is {k}.|The code of the {p} is {k}.|The answer is {k}.|The name of the {a} is {n}.|The first {e} is on {d}.
|The only {t} in the {p} is {co}.|The most important thing is the {t}.|The sun shines over {c}.|The capital of the north is {c}.
"""
)
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
