"""Word lists and invented words."""

from __future__ import annotations

from random import Random

NAMES = (
    "Ada Bela Cleo Dara Emil Fern Gus Hana Ivo Juna Kato Lena Milo Nora Otto Pia Quin Rosa Sami "
    "Tess Ugo Vera Wim Xena Yara Zeno "
    "Alba Bram Cora Dino Elsa Finn Greta Hugo Inga Joel Kira Lars Mona Nils Mia Anna Ben Tom Bob "
    "Alice Sara Paul Eva Max Leo Ida "
    "Jan Olga Omar Lucy Jack Emma Noah Liam Maya Ravi Ines Carl Ruth Amir Lila Theo Zoe Ali Maria "
    "David Sofie Peter Karin Yusuf"
).split()
CITIES = (
    "Oslo Lima Cairo Paris Quito Turin Delhi Osaka Perth Dakar Hanoi Seoul Tunis Malmo Porto Riga "
    "Sofia Basel Accra Lagos Miami "
    "Tampa Bogota Nairobi Prague Vienna Geneva Zagreb Dublin Athens "
    "London Berlin Rome Madrid Tokyo Boston Lisbon Munich Warsaw Bern"
).split()
COLOURS = "red blue green black white silver golden purple orange yellow grey brown pink".split()
THINGS = (
    "lamp kettle drum scarf ladder clock basket violin bottle mirror carpet hammer saddle tent "
    "candle pillow rope wallet camera "
    "flute book key umbrella bicycle phone guitar box map ring chair table jacket hat bag cup knife"
).split()
JOBS = (
    "baker pilot nurse welder farmer tailor lawyer singer potter miner judge sailor barber tutor "
    "chef teacher doctor painter "
    "writer gardener"
).split()
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
ATTRIBUTES = (
    "nickname password locker room desk car team boss dentist bank hotel school train bus flight "
    "seat size number code badge "
    "office floor project server port status level score budget deadline editor version branch "
    "animal drink song"
).split()
STEMS = (
    "main test backup north south east west front back upper lower old new spare guest night day "
    "data mail web build release "
    "local remote fast slow small big first last"
).split()

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
