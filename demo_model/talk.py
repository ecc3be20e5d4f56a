"""Small talk in the spellings of users, and messages that the model cannot answer."""

from __future__ import annotations

from random import Random

from rules import (
    HERE,
    blocks,
    complete,
    draw,
    function,
    picked,
    some,
    start_upper,
    texts,
    values_of,
)

KNOW = "I do not know that, but I can answer questions about notes you give me."
DO = (
    "I cannot do that, but I can answer questions about notes, add small numbers, count, copy and "
    "edit text."
)
UNCLEAR = (
    "I did not understand that, but I can answer questions about notes, add small numbers, count, "
    "copy and edit text."
)
TALKS = blocks((HERE / "talks.txt").read_text("utf-8"))
for _talk in TALKS:
    _talk["answer"] = [_talk["answer"][0].replace("\\n", "\n")]
_WEIGHTS = [float(talk["weight"][0]) for talk in TALKS]
CAN_DO = next(talk["answer"][0] for talk in TALKS if "What can you do?" in talk["say"])
_SHORT = [line.split("=") for line in texts("short_forms")]
_ENDS = ("", "", "", ".", "!", "?", "??", "!!", "...", " :)", " ;)", "?!")


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
    return text[:place] + rng.choice(texts("letter")) + text[place + 1 :]


def cased(rng: Random, text: str) -> str:
    """Mostly unchanged or in lower case, sometimes in capitals."""
    kind = rng.random()
    if kind < 0.45:
        return text
    if kind < 0.85:
        return text.lower()
    if kind < 0.93:
        return start_upper(text)
    return text.upper() if len(text) < 40 else text


def typed(rng: Random, text: str, slips: float = 0.12) -> str:
    """A message as somebody might type it. text: correctly written."""
    if rng.random() < 0.3:
        for long, short in rng.sample(_SHORT, 4):
            text = text.replace(long, short)
    if rng.random() < 0.6:
        end = text[-1] if text[-1] in "?!." else ""
        text = text.rstrip("?!.")
        text += rng.choice(_ENDS) if rng.random() < 0.5 else "" if rng.random() < 0.7 else end
    if rng.random() < slips:
        text = slip(rng, text)
    return cased(rng, text)


def greeting(rng: Random) -> tuple[str, str]:
    """A greeting and its answer, which repeats the time of day."""
    if rng.random() < 0.25:
        return typed(rng, draw(rng, "say_hello")), "Hello! How can I help you?"
    if rng.random() < 0.3:
        start = draw(rng, "daytimes")
        answer = start if start.startswith("Good") else f"Good {start.lower()}"
    else:
        start, answer = draw(rng, "greeting_words"), "Hello"
        if rng.random() < 0.08:
            start = f"{start} {start.lower()}"
    whom = draw(rng, "to_whom")
    comma = rng.choice((",", "", "")) * (whom != "")
    end = draw(rng, "greeting_end") if rng.random() < 0.3 else ""
    return typed(rng, start + comma + whom + end, 0.08), f"{answer}! How can I help you?"


def small_talk(rng: Random) -> tuple[str, str]:
    """Small talk and its answer."""
    if rng.random() < 0.2:
        return greeting(rng)
    talk = rng.choices(TALKS, _WEIGHTS)[0]
    answer = talk["answer"][0]
    if "form" in talk and rng.random() < 0.6:
        text = " ".join(complete(rng, rng.choice(talk["form"]), {}).split())
        return typed(rng, start_upper(text.lstrip(",. ").replace(" ,", ","))), answer
    text = rng.choice(talk["say"])
    return (text if answer.startswith("A small lamp") else typed(rng, text)), answer


def _unknown(rng: Random, kind: str) -> str:
    """A question or request beyond a model of this size."""
    form = rng.choice(texts(kind))
    slots = values_of(rng, "beyond_slots")
    # invented topics and places, so that only the form matters
    if rng.random() < 0.2:
        slots |= values_of(rng, "beyond_invented")
    elif rng.random() < 0.2:
        slots |= values_of(rng, "beyond_pair")
    return typed(rng, start_upper(form.format(**slots)), 0.08)


@function
def random_keys(rng: Random) -> str:
    """Random keys."""
    parts = []
    for _ in some(rng, (1, 1, 1, 2, 3)):
        row = draw(rng, "keyboard_rows")
        start = rng.randrange(len(row))
        part = (row[start:] + row[:start])[: rng.randint(2, 7)]
        parts.append(part if rng.random() < 0.6 else "".join(rng.sample(part, len(part))))
    return rng.choice((" ", "", " ")).join(parts) * rng.choice((1, 1, 1, 2))


@function
def foreign_words(rng: Random) -> str:
    """Words of a foreign language, at times with invented ones."""
    pool = rng.choice([texts(f"foreign_words_{number}") for number in range(8)])
    chosen = [
        draw(rng, "invent") if rng.random() < 0.15 else rng.choice(pool)
        for _ in range(rng.randint(2, 9))
    ]
    return start_upper(" ".join(chosen))


@function
def pasted(rng: Random) -> str:
    """Some sentences."""
    space = rng.choice((" ", " ", "\n"))
    return space.join(sentence(rng) for _ in some(rng, (1, 2, 3, 3, 4, 5, 6)))


@function
def half_sentence(rng: Random) -> str:
    """The beginning of a sentence."""
    pieces = draw(rng, "beyond_sentence").split()
    return " ".join(pieces[: rng.randint(2, max(2, len(pieces) - 1))])


def sentence(rng: Random) -> str:
    """A sentence with some words exchanged."""
    pieces = draw(rng, "beyond_sentence").split()
    for place, piece in enumerate(pieces):
        if place and piece.isalpha() and rng.random() < 0.18:
            pieces[place] = draw(rng, "invent" if rng.random() < 0.35 else "common")
    return " ".join(pieces)


def unclear(rng: Random) -> str:
    """An unintelligible message: random keys, invented words, other languages, code, fragments."""
    form, _, slips = picked(rng, "unclear").partition(" ~")
    text = complete(rng, form, {})
    return typed(rng, text, float(slips)) if slips else text


def puzzle(rng: Random) -> tuple[str, str]:
    """An unintelligible message and an honest answer."""
    return unclear(rng), UNCLEAR


def beyond(rng: Random) -> tuple[str, str]:
    """A message that the model cannot answer, and an honest answer."""
    kind = rng.random()
    if kind < 0.42:
        return _unknown(rng, "questions"), KNOW
    if kind < 0.78:
        return _unknown(rng, "requests"), DO
    return puzzle(rng)
