"""Unusual words for tools and files, so that every token of the vocabulary must be copied.

`words.invent` uses a hundred syllables. A model trained on it alone never writes most tokens and
cannot copy them: it chose the right tool but misspelled its name.
"""

from __future__ import annotations

from random import Random

import words
from words import lists_of

_LISTED = lists_of("wide_words")
VERBS = _LISTED["VERBS"]

NOUNS = _LISTED["NOUNS"]

OTHERS = _LISTED["OTHERS"]

HELD_OUT = frozenset(
    "water waters watered watering plant plants exchange exchanges currency currencies launch "
    "launches rocket rockets "
    "planet planets crew crews ficus monstera cactus euro euros yen krona peso pesos mars venus saturn".split()
)
"""Words of the tools that `questions.strange_tools` asks about: nothing in the new conversations
holds one.
"""

_ONSETS = _LISTED["_ONSETS"]
_NUCLEI = (
    "a aa ae ai au aw ay e ea ee ei eu ew ey i ia ie io o oa oe oi oo ou ow oy u ua ue ui y".split()
)
_CODAS = _LISTED["_CODAS"]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_SMALL = _LISTED["_SMALL"]
_OLD = [
    *words.NAMES, *words.CITIES, *words.COLOURS, *words.THINGS, *words.JOBS, *words.PLACES, *words.FOODS, *words.ANIMALS,
    *words.HOBBIES, *words.MONTHS, *words.DAYS, *words.LANGUAGES, *words.EVENTS, *words.ATTRIBUTES, *words.STEMS,
]  # fmt: skip
_ENGLISH = [*VERBS, *NOUNS, *OTHERS]
_COPIED = [*_ENGLISH, *_ENGLISH, *_SMALL, *_OLD]


def is_allowed(text: str) -> bool:
    """Whether the text contains no held-out word, even joined to others."""
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    return not any(word in flat for word in _HELD_OUT_ROOTS) and not HELD_OUT & set(_parts(text))


_HELD_OUT_ROOTS = tuple(word for word in sorted(HELD_OUT) if len(word) > 5)


def _parts(text: str) -> list[str]:
    """The words of a text in lower case; camelCase is split."""
    spaced = "".join(
        f" {letter}" if letter.isupper() else letter if letter.isalpha() else " " for letter in text
    )
    plain = "".join(letter if letter.isalpha() else " " for letter in text)
    return [*spaced.lower().split(), *plain.lower().split()]


def _syllables(rng: Random) -> str:
    word = rng.choice(_ONSETS) + rng.choice(_NUCLEI)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        word += rng.choice(_ONSETS) + rng.choice(_NUCLEI)
    return word + (rng.choice(_CODAS) if rng.random() < 0.75 else "")


def _blend(rng: Random) -> str:
    """The beginning of one word and the end of another."""
    first, second = rng.choice(_ENGLISH), rng.choice(_ENGLISH)
    return (
        first[: rng.randint(2, max(2, len(first) - 1))]
        + second[-rng.randint(2, max(2, len(second) - 1)) :]
    )


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.5:
        return rng.choice(_ENGLISH)
    if kind < 0.7:
        return _blend(rng)
    if kind < 0.87:
        return _syllables(rng)
    if kind < 0.96:
        return words.invent(rng)
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 7)))


def wide_word(rng: Random) -> str:
    """A lower-case word: English, two joined halves, syllables or letters."""
    while True:
        if is_allowed(word := _any_word(rng)):
            return word


def english(rng: Random) -> str:
    """An English word."""
    return rng.choice(_ENGLISH)


def noun(rng: Random) -> str:
    """An English noun, or sometimes any word."""
    return rng.choice(NOUNS) if rng.random() < 0.6 else wide_word(rng)


def verb(rng: Random) -> str:
    """An English verb, or sometimes any word."""
    return rng.choice(VERBS) if rng.random() < 0.7 else wide_word(rng)


def code(rng: Random) -> str:
    """A password, key, hash or similar text."""
    kind = rng.randrange(7)
    if kind == 0:
        return (
            "".join(rng.choice(_LETTERS.upper()) for _ in range(rng.randint(1, 4)))
            + "-"
            + words.digits(rng, 2, 5)
        )
    if kind == 1:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(6, 10)))
    if kind == 2:
        return f"{wide_word(rng)}{words.digits(rng, 1, 4)}"
    if kind == 3:
        return f"{wide_word(rng)}-{wide_word(rng)}"
    if kind == 4:
        return "".join(
            rng.choice(_LETTERS + _LETTERS.upper() + "0123456789") for _ in range(rng.randint(4, 9))
        )
    if kind == 5:
        return f"v{rng.randint(0, 20)}.{rng.randint(0, 30)}.{rng.randint(0, 9)}"
    return f"{wide_word(rng)}_{wide_word(rng)}".upper()


_MARKED = (
    """"{a}" ; "{a}" ; "{a} {b}" ; '{a}' ; >={n} ; >={n},<{p} ; =={n}.1 ; ~{n} ; 10.0.{n}.1 ; 127.0.0.1:{p} ; ["{a}", "{b}"] ; """
    "[{a}, {b}] ; {a}://{b}/{a} ; https://{a}.{b}.io:{p} ; ${{{up}}} ; {{{a}: {b}}} ; ({a}, {b}) ; "
    "{a}[{p}] ; <{a}> ; {a}@{b} ; "
    "#{k} ; {a}/*.{b} ; {a} + {b} ; !{a} ; {a}% ; -{a} ; --{a}={b} ; {a}.{b}() ; f'{a} {{{b}}}' ; "
    "{a} -> {b} ; {a} | {b} ; "
    "{a} = {{}} ; \\{a} ; {a}?{b}=1&x={n} ; ^{a}$ ; ~/{a}"
)
"""Values with the marks that settings and programs are full of."""


def marked(rng: Random) -> str:
    """Words between the punctuation of settings and programs."""
    word, other = wide_word(rng), wide_word(rng)
    number = f"{rng.randint(0, 99)}.{rng.randint(0, 30)}"
    many = _MARKED.format(
        a=word, b=other, n=number, p=rng.randint(80, 9999), up=word.upper(), k=code(rng)
    )
    return rng.choice(many.split(" ; "))


def wide_value(rng: Random) -> str:
    """A word, name, number or code without spaces."""
    kind = rng.random()
    if kind < 0.12:
        return rng.choice(_COPIED)
    if kind < 0.45:
        return wide_word(rng)
    if kind < 0.65:
        return wide_word(rng).capitalize()
    if kind < 0.72:
        return wide_word(rng).upper()
    if kind < 0.8:
        return words.digits(rng)
    return code(rng) if kind < 0.95 else words.token_like(rng)


def wide_phrase(rng: Random, most: int = 5) -> str:
    """One to `most` words."""
    return " ".join(
        wide_word(rng) if rng.random() < 0.8 else wide_value(rng)
        for _ in range(rng.randint(1, most))
    )
