"""Words for generated notes: people, things, verbs, times, places and values. Half of them are
invented.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

import wide_words
import words
from words import lists_of

_TOKENIZER = (
    Path(__file__).resolve().parents[1] / "src/holdfast/models/bundled/holdfast-demo/tokenizer.json"
)
_LISTED = lists_of("open_words")
_IRREGULAR = _LISTED["_IRREGULAR"]
_REGULAR = _LISTED["_REGULAR"]
PLACED = (
    "hang lie stand stay live work sleep sit park grow wait stop end start begin belong go land "
    "meet rest hide nest play run pass fit"
).split()
TIMED = (
    "leave open close start end begin arrive depart stop run happen come return expire land "
    "finish meet rehearse reopen ring shut retire eat sleep sail bloom melt restart renew"
).split()
_MORE_NAMES = _LISTED["_MORE_NAMES"]
NAMES = [*words.NAMES, *_MORE_NAMES]
_TITLES = "Dr. Professor Mr Mrs Ms Aunt Uncle Captain Sister Judge Coach".split()
_KIN = _LISTED["_KIN"]
COLOURS = (*words.COLOURS, "beige", "turquoise", "violet", "crimson", "maroon")
SMALL_NUMBERS = (
    "two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty "
    "sixty eighty ninety"
).split()
_HOURS = SMALL_NUMBERS[:11]
_ORDINALS = "first second third fourth fifth sixth top ground".split()
UNITS = _LISTED["UNITS"]
_PREPOSITIONS = _LISTED["_PREPOSITIONS"]


class Verb:
    """The forms of a verb."""

    def __init__(self, base: str, past: str | None = None, participle: str | None = None) -> None:
        self.base = base
        self.third = {"have": "has", "do": "does", "go": "goes"}.get(base) or plural(base)
        self.past = past or _regular_past(base)
        self.participle = participle or self.past


def plural(word: str) -> str:
    """The plural of a noun, which is also the third person of a verb."""
    if re.search(r"(s|x|z|ch|sh)$", word):
        return word + "es"
    if re.search(r"[^aeiou]y$", word):
        return word[:-1] + "ies"
    return word + "s"


def _regular_past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ied"
    if re.fullmatch(r"[^aeiou]*[aeiou][bdgmnprt]", base):
        return base + base[-1] + "ed"
    return base + "ed"


_VERBS = [Verb(*forms.split("/")) for forms in _IRREGULAR]
_VERBS += [Verb(base) for base in sorted(set(_REGULAR))]
_BY_BASE = {verb.base: verb for verb in _VERBS}
_WIDE_VERBS = [Verb(base) for base in wide_words.VERBS if base not in _BY_BASE]


def verb_of(base: str) -> Verb:
    """The verb with this base form."""
    return _BY_BASE.get(base) or Verb(base)


def draw_verb(rng: Random, fitting: list[str] | None = None) -> Verb:
    """A fitting verb, any English verb, or an invented one, sometimes irregular."""
    kind = rng.random()
    if fitting and kind < 0.4:
        return verb_of(rng.choice(fitting))
    if kind < 0.62:
        return rng.choice(_VERBS)
    if kind < 0.75:
        return rng.choice(_WIDE_VERBS)
    base = invented(rng)
    if rng.random() < 0.25:
        return Verb(base, invented(rng)[:3] + base[-3:])
    return Verb(base)


@cache
def _pieces() -> list[str]:
    """Tokens of the vocabulary that are short runs of letters."""
    from tokenizers import Tokenizer

    vocabulary = Tokenizer.from_file(str(_TOKENIZER)).get_vocab()
    pieces = {token.lstrip("Ġ").lower() for token in vocabulary}
    return sorted(
        piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) <= 6
    )


def invented(rng: Random) -> str:
    """An invented word: tokens, syllables, or two joined words."""
    while True:
        kind = rng.random()
        if kind < 0.5:
            word = "".join(rng.choice(_pieces()) for _ in range(rng.choice((1, 2, 2, 3))))
        elif kind < 0.8:
            word = wide_words.wide_word(rng)
        else:
            word = words.invent(rng)
        if 2 < len(word) < 12 and word.isalpha():
            return word


def noun(rng: Random) -> str:
    """A noun; half of them are invented."""
    kind = rng.random()
    if kind < 0.42:
        return rng.choice(wide_words.NOUNS)
    if kind < 0.52:
        return words.common_word(rng)
    return invented(rng)


def adjective(rng: Random) -> str:
    """An adjective or an invented word."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(COLOURS)
    if kind < 0.5:
        return rng.choice(words.STEMS)
    if kind < 0.8:
        return rng.choice(wide_words.OTHERS[:300])
    return invented(rng)


def article(phrase: str) -> str:
    """The phrase after `a` or `an`."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def start_upper(text: str) -> str:
    """The text with a capital first letter."""
    return text[0].upper() + text[1:]


def person(rng: Random) -> str:
    """A name, at times with a title or a second name."""
    first = rng.choice(NAMES) if rng.random() < 0.55 else invented(rng).capitalize()
    kind = rng.random()
    if kind < 0.08:
        return f"{rng.choice(_TITLES)} {first}"
    if kind < 0.13:
        return f"{first} {invented(rng).capitalize()}"
    return first


def city(rng: Random) -> str:
    """A place name."""
    return rng.choice(words.CITIES) if rng.random() < 0.4 else invented(rng).capitalize()


def compound(rng: Random) -> str:
    """A noun, sometimes with an adjective or a second noun."""
    head = noun(rng)
    kind = rng.random()
    if kind < 0.2:
        return f"{adjective(rng)} {head}"
    if kind < 0.42:
        return f"{noun(rng)} {head}"
    if kind < 0.47:
        other = rng.choice((person(rng), f"the {noun(rng)}", city(rng)))
        return f"{head} {rng.choice(('of', 'for', 'to', 'in'))} {other}"
    return head


@dataclass(frozen=True)
class Entity:
    """The subject of a fact."""

    text: str
    many: bool = False
    human: bool = False

    @property
    def at_start(self) -> str:
        """The text at the beginning of a sentence."""
        return start_upper(self.text)

    @property
    def does(self) -> str:
        """`do` or `does`."""
        return "do" if self.many else "does"

    @property
    def is_(self) -> str:
        """`is` or `are`."""
        return "are" if self.many else "is"

    @property
    def was(self) -> str:
        """`was` or `were`."""
        return "were" if self.many else "was"

    @property
    def own(self) -> str:
        """The text in the possessive."""
        return self.text + ("'" if self.many else "'s")

    def present(self, verb: Verb) -> str:
        """The verb's present form for this subject."""
        return verb.base if self.many else verb.third


def human(rng: Random) -> Entity:
    """A person, by name or by a relationship."""
    if rng.random() < 0.8:
        return Entity(person(rng), human=True)
    whose = rng.choice(("my", "our", "my", "our", "his", "her", "their"))
    return Entity(f"{whose} {rng.choice(_KIN)}", human=True)


def entity(rng: Random) -> Entity:
    """A person or a thing."""
    return human(rng) if rng.random() < 0.3 else _thing_entity(rng)


def _thing_entity(rng: Random) -> Entity:
    kind = rng.random()
    if kind < 0.58:
        return Entity(f"the {compound(rng)}")
    if kind < 0.66:
        whose = rng.choice(("my", "our", "our", "my", "your"))
        return Entity(f"{whose} {rng.choice(_KIN) if rng.random() < 0.5 else compound(rng)}")
    if kind < 0.74:
        return Entity(f"{person(rng)}'s {compound(rng)}")
    if kind < 0.82:
        name = noun(rng)
        name = name.capitalize() if rng.random() < 0.5 else name
        number = words.digits(rng, 1, 3) if rng.random() < 0.67 else rng.choice("ABCDEFGHKXZ")
        return Entity(f"{name} {number}")
    if kind < 0.87:
        return Entity(f"the {plural(compound(rng))}", many=True)
    if kind < 0.93:
        return Entity(plural(noun(rng)), many=True)
    if kind < 0.96:
        return Entity(noun(rng))
    return Entity(invented(rng).capitalize())


def sibling(rng: Random, subject: Entity) -> Entity:
    """A subject with nearly the same name: another number, ending or word."""
    parts = subject.text.split()
    place = len(parts) - 1
    if len(parts) > 2 and rng.random() < 0.4:
        place = rng.randrange(1, len(parts))
    parts[place] = _near_word(rng, parts[place])
    if subject.many and place == len(parts) - 1 and not parts[place].endswith("s"):
        parts[place] += "s"
    return Entity(" ".join(parts), subject.many, subject.human)


def _near_word(rng: Random, word: str) -> str:
    if word.isdigit():
        return str(max(1, int(word) + rng.choice((-1, 1, 2, 10))))
    if len(word) == 1:
        return rng.choice("ABCDEFGH")
    start = word[: rng.randint(1, max(1, len(word) - 2))]
    if word[0].isupper():
        return rng.choice(NAMES) if rng.random() < 0.5 else (start + invented(rng))[:9]
    if rng.random() < 0.3:
        return start + invented(rng)[:4]
    return noun(rng)


def number(rng: Random) -> str:
    """A number in words or digits."""
    return rng.choice(SMALL_NUMBERS) if rng.random() < 0.45 else words.digits(rng, 1, 4)


def _repetitive(rng: Random) -> str:
    """An address, a version or repeating digits, which are hard to copy."""
    few = ["0", words.digits(rng, 1, rng.choice((1, 1, 2, 3))), words.digits(rng, 1, 3)]
    kind = rng.random()
    if kind < 0.3:
        return rng.choice("..:-/ ").join(rng.choice(few) for _ in range(rng.randint(3, 6)))
    if kind < 0.7:
        first = rng.choice(("10", "127", "172", "192", *few))
        return ".".join([first, *(rng.choice(few) for _ in range(3))])
    return "".join(rng.choice(few) for _ in range(rng.randint(3, 7)))


def value(rng: Random) -> str:
    """A predicate after `is`: a code, digits, words, a name."""
    if rng.random() < 0.15:
        return _repetitive(rng)
    kind = rng.random()
    if kind < 0.25:
        return wide_words.code(rng)
    if kind < 0.4:
        return words.digits(rng, 2, 7)
    if kind < 0.55:
        return wide_words.wide_value(rng)
    if kind < 0.7:
        return "-".join(_part_of_code(rng) for _ in range(rng.randint(2, 3)))
    if kind < 0.76:
        return f"{words.digits(rng, 3, 3)} {words.digits(rng, 4, 4)}"
    return compound(rng) if kind < 0.9 else person(rng)


def _part_of_code(rng: Random) -> str:
    return noun(rng) if rng.random() < 0.6 else words.digits(rng, 1, 3)


def thing(rng: Random) -> str:
    """An object of a verb."""
    kind = rng.random()
    if kind < 0.3:
        return f"the {compound(rng)}"
    if kind < 0.55:
        return article(compound(rng))
    if kind < 0.7:
        return plural(noun(rng))
    if kind < 0.8:
        return invented(rng).capitalize()
    return compound(rng)


def numbered(rng: Random) -> str:
    """A thing with a number."""
    return f"{noun(rng)} {words.digits(rng, 1, 4)}"


Adverbial = tuple[str, tuple[str, ...]]
"""A time or place, and the words that ask for it."""


def time_of(rng: Random) -> Adverbial:
    """A time and its question words."""
    kind = rng.random()
    if kind < 0.22:
        return f"at {_clock(rng)}", ("When", "When", "At what time", "What time")
    if kind < 0.42:
        return _weekday(rng), ("When", "When", "On which day", "What day", "On what day")
    if kind < 0.58:
        return _date(rng), ("When", "When", "On which date")
    month = rng.choice(words.MONTHS)
    if kind < 0.68:
        return f"in {month}", ("When", "When", "In which month")
    if kind < 0.82:
        return f"in {rng.randint(1200, 2040)}", ("When", "When", "In which year", "In what year")
    if kind < 0.9:
        event = rng.choice(words.EVENTS) if rng.random() < 0.5 else f"the {noun(rng)}"
        return f"{rng.choice(('before', 'after', 'during', 'until'))} {event}", ("When", "When")
    time = _vague_time(rng)
    often = ("How often",) if re.search(r"\b(every|a)\b", time) else ()
    return time, ("When", "When", *often)


def _clock(rng: Random) -> str:
    return rng.choice(
        (
            rng.choice(_HOURS),
            f"{rng.randint(1, 23)}:{rng.choice(('00', '15', '20', '30', '45'))}",
            f"{rng.randint(1, 12)}{rng.choice(('am', 'pm', ' am', ' pm'))}",
            rng.choice(("noon", "midnight", "dawn", "sunset", "lunchtime")),
            f"half past {rng.choice(_HOURS)}",
            f"quarter to {rng.choice(_HOURS)}",
        )
    )


def _weekday(rng: Random) -> str:
    day = rng.choice(words.DAYS)
    return rng.choice(
        (
            f"on {day}",
            f"on {day}s",
            f"every {day}",
            f"every second {day}",
            f"on {day} {rng.choice(('morning', 'evening', 'afternoon'))}",
            f"next {day}",
            f"every {day} at {rng.choice(_HOURS)}",
        )
    )


def _date(rng: Random) -> str:
    month, day = rng.choice(words.MONTHS), rng.randint(1, 31)
    ordinal = rng.choice(_ORDINALS[:6])
    return rng.choice((f"on {day} {month}", f"on {month} {day}", f"on the {ordinal} of {month}"))


def _vague_time(rng: Random) -> str:
    hour = rng.choice(_HOURS)
    return rng.choice(
        (
            *("in spring", "in summer", "in autumn", "in winter", "tomorrow", "tonight"),
            *("every night", "every morning", "twice a week", "once a month", "at night"),
            *("in the evening", "every hour"),
            f"from {hour} to {rng.choice(_HOURS)}",
            f"in {hour} {rng.choice(('days', 'weeks', 'hours'))}",
        )
    )


def place_of(rng: Random) -> Adverbial:
    """A place and its question words."""
    kind = rng.random()
    if kind < 0.66:
        return f"{rng.choice(_PREPOSITIONS)} the {compound(rng)}", ("Where",)
    if kind < 0.84:
        near = rng.choice(("in", "in", "near", "outside"))
        return f"{near} {city(rng)}", ("Where", "Where", "In which city")
    spots = ("platform", "gate", "floor", "room", "dock", "shelf", "row", "table", noun(rng))
    spot, preposition = rng.choice(spots), rng.choice(("at", "on", "from", "in"))
    asking = ("Where", f"{rng.choice((preposition, 'at')).capitalize()} which {spot}", "Where")
    if rng.random() < 0.3:
        return f"on the {rng.choice(_ORDINALS)} {spot}", asking
    label = rng.choice((number(rng), words.digits(rng, 1, 2), rng.choice("ABCD") + "1"))
    return f"{preposition} {spot} {label}", asking
