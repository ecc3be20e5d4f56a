"""Word lists and invented words."""

from __future__ import annotations

from pathlib import Path
from random import Random


def lists_of(module: str) -> dict[str, list[str]]:
    """The lists in `lists/MODULE.txt`, by name: one item per line below `[NAME]`."""
    lists: dict[str, list[str]] = {}
    text = Path(__file__).with_name("lists").joinpath(f"{module}.txt").read_text(encoding="utf-8")
    for section in text.removeprefix("[").split("\n["):
        name, *items = section.strip().splitlines()
        lists[name.removesuffix("]")] = items
    return lists


_LISTED = lists_of("words")
NAMES = _LISTED["NAMES"]
CITIES = _LISTED["CITIES"]
COLOURS = "red blue green black white silver golden purple orange yellow grey brown pink".split()
THINGS = _LISTED["THINGS"]
JOBS = _LISTED["JOBS"]
PLACES = "kitchen attic garage cellar garden library office hallway balcony studio bedroom workshop basement".split()
FOODS = "soup bread rice beans cheese plums olives noodles pancakes carrots pizza apples pasta cake fish".split()
ANIMALS = "cat dog parrot horse rabbit turtle hamster goat".split()
HOBBIES = "chess tennis sailing painting hiking dancing cooking fishing swimming reading".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
LANGUAGES = "English French Spanish German Arabic Hindi Japanese Polish Italian Turkish".split()
EVENTS = "meeting lunch concert party exam lesson match workshop dinner review call visit".split()
ATTRIBUTES = _LISTED["ATTRIBUTES"]
STEMS = _LISTED["STEMS"]

_ONSETS = "b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh sk st t th tr v w z".split()
_VOWELS = "a e i o u ai ea oo".split()
_CODAS = ["", "", "", "n", "r", "s", "l", "m", "x", "nd", "rt"]


def listed(text: str) -> tuple[str, ...]:
    """The items of a text separated by `|`. Line breaks do not count."""
    return tuple(text.replace("\n", "").strip().split("|"))


def invent(rng: Random, capital: bool = False) -> str:
    """An invented word of two or three syllables, which must be copied piece by piece."""
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 2)))
    word += rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
    return word.capitalize() if capital else word


def common_word(rng: Random) -> str:
    """A lower-case word from the lists."""
    return rng.choice(_COMMON)


def digits(rng: Random, low: int = 1, high: int = 6) -> str:
    """A number of `low` to `high` digits that does not start with zero."""
    length = rng.randint(low, high)
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


def token_like(rng: Random) -> str:
    """A password, file name or identifier."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"{invent(rng)}-{digits(rng, 2, 4)}"
    if kind == 1:
        return f"{common_word(rng)}.{rng.choice(['txt', 'py', 'md', 'json', 'csv', 'log'])}"
    if kind == 2:
        return f"{common_word(rng)}_{common_word(rng)}"
    return f"{invent(rng, True)}{digits(rng, 1, 3)}"


def anything(rng: Random) -> str:
    """A value of any kind."""
    kind = rng.randrange(6)
    if kind == 0:
        return digits(rng)
    if kind == 1:
        return invent(rng, rng.random() < 0.5)
    if kind == 2:
        return token_like(rng)
    if kind == 3:
        return f"{common_word(rng)} {common_word(rng)}"
    return rng.choice((NAMES, CITIES, _COMMON)[rng.randrange(3)])


_COMMON = [
    *COLOURS,
    *THINGS,
    *JOBS,
    *PLACES,
    *FOODS,
    *ANIMALS,
    *HOBBIES,
    *EVENTS,
    *ATTRIBUTES,
    *STEMS,
]
