"""Words: which are allowed, made-up ones, verbs and their forms, subjects of notes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from rules import draw, function, plural, start_upper, texts

BUNDLED = Path(__file__).resolve().parents[1] / "src" / "holdfast" / "models" / "bundled"
HELD_OUT = frozenset(texts("held_out"))
"""Words of tools that are not part of the training: it shows whether the model copies any name."""
_HELD_OUT_ROOTS = tuple(word for word in sorted(HELD_OUT) if len(word) > 5)


def is_allowed(text: str) -> bool:
    """Whether the text contains no held-out word, even joined to others."""
    flat = "".join(letter for letter in text.lower() if letter.isalpha())
    return not any(word in flat for word in _HELD_OUT_ROOTS) and not HELD_OUT & set(_parts(text))


def _parts(text: str) -> list[str]:
    """The words of a text in lower case; camelCase is split."""
    spaced = "".join(
        f" {letter}" if letter.isupper() else letter if letter.isalpha() else " " for letter in text
    )
    plain = "".join(letter if letter.isalpha() else " " for letter in text)
    return [*spaced.lower().split(), *plain.lower().split()]


@function
def digits(rng: Random, low: int = 1, high: int = 6) -> str:
    """A number of `low` to `high` digits that does not start with zero."""
    length = rng.randint(low, high)
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


@function
def wide_word(rng: Random) -> str:
    """A lower-case word: English, two joined halves, syllables or letters."""
    while not is_allowed(word := draw(rng, "any_word")):
        pass
    return word


@function
def blend(rng: Random) -> str:
    """The beginning of one word and the end of another."""
    first, second = rng.choice(texts("english")), rng.choice(texts("english"))
    start = first[: rng.randint(2, max(2, len(first) - 1))]
    return start + second[-rng.randint(2, max(2, len(second) - 1)) :]


@function
def wide_phrase(rng: Random, most: int = 5) -> str:
    """One to `most` words."""
    return " ".join(draw(rng, "wide_part") for _ in range(rng.randint(1, most)))


@cache
def _pieces() -> list[str]:
    """Tokens of the vocabulary that are short runs of letters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(BUNDLED / "holdfast-demo" / "tokenizer.json"))
    pieces = {token.lstrip("Ġ").lower() for token in tokenizer.get_vocab()}
    return sorted(
        piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) <= 6
    )


@function
def piece(rng: Random) -> str:
    """A short token."""
    return rng.choice(_pieces())


@function
def invented(rng: Random) -> str:
    """An invented word: tokens, syllables, or two joined words."""
    while True:
        word = draw(rng, "any_invented")
        if 2 < len(word) < 12 and word.isalpha():
            return word


@function
def repetitive(rng: Random) -> str:
    """An address, a version or repeating digits, which are hard to copy."""
    few = ["0", digits(rng, 1, rng.choice((1, 1, 2, 3))), digits(rng, 1, 3)]
    kind = rng.random()
    if kind < 0.3:
        return rng.choice("..:-/ ").join(rng.choice(few) for _ in range(rng.randint(3, 6)))
    if kind < 0.7:
        first = rng.choice(("10", "127", "172", "192", *few))
        return ".".join([first, *(rng.choice(few) for _ in range(3))])
    return "".join(rng.choice(few) for _ in range(rng.randint(3, 7)))


class Verb:
    """The forms of a verb."""

    def __init__(self, base: str, past: str | None = None, participle: str | None = None) -> None:
        self.base = base
        self.third = {"have": "has", "do": "does", "go": "goes"}.get(base) or plural(base)
        self.past = past or _regular_past(base)
        self.participle = participle or self.past


def _regular_past(base: str) -> str:
    if base.endswith("e"):
        return base + "d"
    if re.search(r"[^aeiou]y$", base):
        return base[:-1] + "ied"
    if re.fullmatch(r"[^aeiou]*[aeiou][bdgmnprt]", base):
        return base + base[-1] + "ed"
    return base + "ed"


_VERBS = [Verb(*forms.split("/")) for forms in texts("irregular_verbs")]
_VERBS += [Verb(base) for base in sorted(set(texts("regular_verbs")))]
_BY_BASE = {verb.base: verb for verb in _VERBS}
_WIDE_VERBS = [Verb(base) for base in texts("verbs") if base not in _BY_BASE]


def verb_of(base: str) -> Verb:
    """The verb with this base form."""
    return _BY_BASE.get(base) or Verb(base)


def draw_verb(rng: Random, fitting: str = "") -> Verb:
    """A fitting verb, any English verb, or an invented one, sometimes irregular."""
    kind = rng.random()
    if fitting and kind < 0.4:
        return verb_of(rng.choice(fitting.split()))
    if kind < 0.75:
        return rng.choice(_VERBS if kind < 0.62 else _WIDE_VERBS)
    base = invented(rng)
    return Verb(base, invented(rng)[:3] + base[-3:]) if rng.random() < 0.25 else Verb(base)


@dataclass(frozen=True)
class Entity:
    """The subject of a note. many: in the plural."""

    text: str
    many: bool = False
    human: bool = False

    # forms for the beginning of a sentence, of verbs, and of the possessive
    at_start = property(lambda self: start_upper(self.text))
    does = property(lambda self: "do" if self.many else "does")
    is_ = property(lambda self: "are" if self.many else "is")
    was = property(lambda self: "were" if self.many else "was")
    own = property(lambda self: self.text + ("'" if self.many else "'s"))

    def present(self, verb: Verb) -> str:
        """The verb's present form for this subject."""
        return verb.base if self.many else verb.third


def human(rng: Random) -> Entity:
    """A person, by name or by a relationship."""
    return Entity(draw(rng, "human"), human=True)


def entity(rng: Random) -> Entity:
    """A person or a thing."""
    if rng.random() < 0.3:
        return human(rng)
    text = draw(rng, "thing_subject")
    return Entity(text.removeprefix("many: "), many=text.startswith("many: "))


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
        known = texts("all_names")
        return rng.choice(known) if rng.random() < 0.5 else (start + invented(rng))[:9]
    return start + invented(rng)[:4] if rng.random() < 0.3 else draw(rng, "noun")


Adverbial = tuple[str, list[str]]
"""A time or place, and the words that ask for it."""


def time_of(rng: Random) -> Adverbial:
    """A time and its question words."""
    text, _, asking = draw(rng, "time").partition(" :: ")
    often = ["How often"] if asking == "When|When" and _is_repeated(text) else []
    return text, [*asking.split("|"), *often]


def _is_repeated(time: str) -> bool:
    is_event = time.split()[0] in ("before", "after", "during", "until")
    return not is_event and re.search(r"\b(every|a)\b", time) is not None


def place_of(rng: Random) -> Adverbial:
    """A place and its question words."""
    text, _, asking = draw(rng, "place").partition(" :: ")
    return text, asking.split("|")
