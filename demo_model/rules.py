"""Draws texts by the rules in `rules/*.txt`.

A section `[name]` lists texts, one per line; one of them is drawn. `5* text` counts five times, and
a text with spaces at its ends or with line breaks is written as a JSON string. `[name: words]`
lists single words, `[name: letters]` single letters, and `[name: joined]` the names of other
sections, whose texts it joins. In `[name: bounds]`, every text begins with a bound: the first text
is taken whose bound is above a random number. In `[name: shares]`, the numbers are shares. In
`[name: all first]`, all texts are completed before one is drawn.

In a text, `{noun}` is a text of the section `noun`, a value that the caller or a line
`noun := text` at the head of the section gives, or the result of a function; `{digits 2 4}` is a
function with numbers; `{on/off}` is one of the two; `{1-12}` is a whole number, `{1-12:02}` a
formatted one; `{noun*1-3~, }` is one to three nouns with commas, and `{noun*1|1|2}` mostly one.
`{noun.upper}` changes the text; `{noun.drop}` draws a noun for nothing, so that the random numbers
stay those of the training. Braces themselves are doubled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

HERE = Path(__file__).parent
_SLOT = re.compile(r"\{\{|\}\}|\{([^{}]+)\}")
_RANGE = re.compile(r"(\d+)-(\d+)(?::(\w+))?")
_BODY = re.compile(r"(.*?)((?:\.(?:upper|lower|capitalize|plural|start|a|last|grouped|drop))*)")
_TIMES = re.compile(r"(\w+)\*([\d|-]+)(?:~(.*))?", re.DOTALL)

FUNCTIONS: dict[str, Callable[..., str]] = {}
"""What a slot can call, by name: functions of a random number generator and of numbers."""


def function(made: Callable[..., str]) -> Callable[..., str]:
    """Make a function available to texts."""
    FUNCTIONS[made.__name__] = made
    return made


@dataclass
class Section:
    """A section of a file. bounds: empty if all texts are equally likely."""

    texts: list[str] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    completes_all: bool = False


def plural(word: str) -> str:
    """The plural of a noun, which is also the third person of a verb."""
    if re.search(r"(s|x|z|ch|sh)$", word):
        return word + "es"
    return word[:-1] + "ies" if re.search(r"[^aeiou]y$", word) else word + "s"


def article(phrase: str) -> str:
    """The phrase after `a` or `an`."""
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def start_upper(text: str) -> str:
    """The text with a capital first letter."""
    return text[:1].upper() + text[1:]


_CHANGES: dict[str, Callable[[str], str]] = {
    "upper": str.upper,
    "lower": str.lower,
    "capitalize": str.capitalize,
    "plural": plural,
    "start": start_upper,
    "a": article,
    "last": lambda text: text.split()[-1],
    "grouped": lambda text: f"{int(text):,}",
    "drop": lambda text: "",
}


def _unquoted(text: str) -> str:
    return json.loads(text) if len(text) > 1 and text[0] == text[-1] == '"' else text


def _section(kind: str, lines: list[str], known: dict[str, Section]) -> Section:
    made = Section(completes_all=kind == "all first")
    while lines and (match := re.fullmatch(r"(\w+) := (.*)", lines[0])):
        made.values[match[1]] = _unquoted(match[2])
        lines = lines[1:]
    if kind in ("words", "joined"):
        made.texts = " ".join(lines).split()
        if kind == "joined":
            made.texts = [text for name in made.texts for text in known[name].texts]
    elif kind == "letters":
        made.texts = list(lines[0])
    elif kind in ("bounds", "shares"):
        rows = [line.partition(" ") for line in lines]
        setattr(made, kind, [float(number) for number, _, _ in rows])
        made.texts = [_unquoted(text) for _, _, text in rows]
    else:
        for line in lines:
            match = re.fullmatch(r"(\d+)\* (.*)", line)
            made.texts += [_unquoted(match[2])] * int(match[1]) if match else [_unquoted(line)]
    return made


@cache
def sections() -> dict[str, Section]:
    """The sections of all files, by name."""
    found: dict[str, Section] = {}
    for path in sorted((HERE / "rules").glob("*.txt"), key=lambda path: path.stem != "words"):
        lines = [line for line in path.read_text("utf-8").splitlines() if line[:1] not in ("", "#")]
        heads = [place for place, line in enumerate(lines) if re.fullmatch(r"\[\w+(: .+)?\]", line)]
        for head, end in zip(heads, [*heads[1:], len(lines)], strict=True):
            name, _, kind = lines[head][1:-1].partition(": ")
            assert name not in found, name
            found[name] = _section(kind, lines[head + 1 : end], found)
    return found


def texts(name: str) -> list[str]:
    """The texts of a section, with their slots."""
    return sections()[name].texts


def draw(rng: Random, name: str, /, **values: Any) -> str:
    """A text of a section. values: what the texts may name, besides sections and functions."""
    section = sections()[name]
    values |= values_of(rng, name, values)
    if section.completes_all:
        return rng.choice([complete(rng, text, values) for text in section.texts])
    return complete(rng, picked(rng, name), values)


def picked(rng: Random, name: str) -> str:
    """A text of a section with its slots."""
    return row_of(rng, name, lambda text: True)


def row_of(rng: Random, name: str, fits: Callable[[str], bool]) -> str:
    """A text of a section; if it does not fit, the next one with a bound. If there is no such
    section, the name itself.
    """
    section = sections().get(name)
    if section is None:
        return name
    if section.shares:
        return rng.choices(section.texts, section.shares)[0]
    if not section.bounds:
        return rng.choice(section.texts) if len(section.texts) > 1 else section.texts[0]
    share = rng.random()
    pairs = zip(section.bounds, section.texts, strict=True)
    return next(text for bound, text in pairs if share < bound and fits(text))


def values_of(rng: Random, name: str, given: dict[str, Any] | None = None) -> dict[str, Any]:
    """The values at the head of a section."""
    values = dict(given or {})
    for key, text in sections()[name].values.items():
        values[key] = complete(rng, text, values)
    return values


def complete(rng: Random, text: str, values: dict[str, Any]) -> str:
    """The text with its slots filled, from left to right."""

    def filler(match: re.Match[str]) -> str:
        return _filler(rng, match[1], values) if match[1] else match[0][0]

    return _SLOT.sub(filler, text)


def _filler(rng: Random, slot: str, values: dict[str, Any]) -> str:
    if match := _RANGE.fullmatch(slot):
        return format(rng.randint(int(match[1]), int(match[2])), match[3] or "")
    if match := _TIMES.fullmatch(slot):
        low, dash, high = match[2].partition("-")
        count = rng.randint(int(low), int(high)) if dash else int(rng.choice(low.split("|")))
        return (match[3] or "").join(_filler(rng, match[1], values) for _ in range(count))
    body, changes = _BODY.fullmatch(slot).groups()  # type: ignore[union-attr]
    if "/" in body:
        text = rng.choice(body.split("/"))
        text = str(values.get(text, text))
    else:
        name, *arguments = body.split()
        if name in values:
            text = str(values[name])
        elif name in FUNCTIONS:
            text = FUNCTIONS[name](rng, *map(int, arguments))
        else:
            text = draw(rng, name, **values)
    for change in changes.split(".")[1:]:
        text = _CHANGES[change](text)
    return text


def some(rng: Random, counts: Sequence[int]) -> range:
    """A loop that runs as often as one of the numbers says."""
    return range(rng.choice(counts))


def blocks(text: str) -> list[dict[str, list[str]]]:
    """The blocks of a file, separated by empty lines: the values of each key. `#` is a comment."""
    found: list[dict[str, list[str]]] = []
    for block in re.split(r"\n\s*\n", text):
        values: dict[str, list[str]] = {}
        for line in block.splitlines():
            if line.strip() and not line.startswith("#"):
                key, colon, value = line.strip().partition(": ")
                if not colon:
                    raise ValueError(f"no `key: value`: {line!r}")
                values.setdefault(key, []).append(value)
        if values:
            found.append(values)
    return found
