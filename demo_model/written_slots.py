"""Fillers of slots: names, times, amounts, codes, things. Some of their words are invented."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import open_words
import wide_words
import words

_LISTS = dict(
    line.split(" = ")
    for line in Path(__file__).with_name("slots.txt").read_text().splitlines()
    if not line.startswith("#")
)
_HOURS = _LISTS.pop("hour").split("|")
_WEEKDAYS = words.DAYS
_UNITS_OF_TIME = "minutes|hours|days|weeks|months|years".split("|")
_TOP_FOLDERS = (
    "src docs notes config scripts data tests infra reports backup shared var/log etc".split()
)
_FILE_ENDINGS = "md txt yaml json csv py toml pdf sql conf ts log xlsx".split()
_INVENTED_NOUNS = frozenset(
    "tool shop club event container animal vehicle building instrument food dish fruit drink "
    "material adjective plant".split()
)


def _from_list(kind: str, rng: Random) -> str:
    if kind in _INVENTED_NOUNS and rng.random() < 0.25:
        noun = open_words.invented(rng)
        return open_words.plural(noun) if kind == "fruit" else noun
    return rng.choice(_LISTS[kind].split("|"))


def _hour(rng: Random) -> str:
    if rng.random() < 0.4:
        return rng.choice(_HOURS)
    hour = rng.randint(0, 23)
    minute = rng.choice(("00", "05", "10", "15", "20", "30", "40", "45", "55"))
    return rng.choice(
        (
            f"{hour}:{minute}",
            f"{hour:02}:{minute}",
            f"{hour % 12 or 12} {'am' if hour < 12 else 'pm'}",
        )
    )


def _date(rng: Random) -> str:
    day, month = rng.randint(1, 31), rng.choice(words.MONTHS)
    forms = [f"{day} {month}", f"{month} {day}", f"{day} {month} {rng.randint(2019, 2032)}"]
    forms.append(f"{rng.randint(2019, 2032)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}")
    return rng.choice(forms)


def _when(rng: Random) -> str:
    day = rng.choice(_WEEKDAYS)
    return rng.choice(
        (
            f"on {day}",
            f"on {day} at {_hour(rng)}",
            f"at {_hour(rng)}",
            f"on {_date(rng)}",
            f"in {rng.choice(words.MONTHS)}",
            f"next {day}",
            f"on {day} {rng.choice(('morning', 'afternoon', 'evening'))}",
            rng.choice(
                (
                    "tomorrow",
                    "tonight",
                    "next week",
                    "in the evening",
                    "after lunch",
                    "before sunrise",
                    "over the weekend",
                    "at the end of the month",
                )
            ),
        )
    )


def _duration(rng: Random) -> str:
    number = (
        rng.choice(open_words.SMALL_NUMBERS[:12]) if rng.random() < 0.5 else str(rng.randint(2, 90))
    )
    return f"{number} {rng.choice(_UNITS_OF_TIME)}"


def _money(rng: Random) -> str:
    whole = rng.choice((rng.randint(2, 99), rng.randint(100, 999), rng.randint(1000, 98000)))
    if rng.random() < 0.2:
        return rng.choice(
            (f"${whole}.{rng.randint(10, 99)}", f"{whole}.{rng.randint(10, 99)} euros")
        )
    grouped = f"{whole:,}" if rng.random() < 0.6 else str(whole)
    return rng.choice(
        (
            f"{grouped} euros",
            f"${grouped}",
            f"{grouped} dollars",
            f"{grouped} pounds",
            f"{grouped} EUR",
            f"{grouped} francs",
        )
    )


def _measured(units: str) -> Callable[[Random], str]:
    names = units.split()

    def draw(rng: Random) -> str:
        number = (
            str(rng.randint(2, 900))
            if rng.random() < 0.8
            else f"{rng.randint(1, 40)}.{rng.randint(1, 9)}"
        )
        return f"{number} {rng.choice(names)}"

    return draw


def _code(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.35:
        return words.digits(rng, 3, 6)
    if kind < 0.6:
        return wide_words.code(rng)
    letters = "".join(rng.choice("ABCDEFGHKLMNPRSTXZ") for _ in range(rng.randint(1, 3)))
    return rng.choice(
        (
            f"{letters}-{words.digits(rng, 2, 5)}",
            f"{rng.randint(1, 9)}-{letters}-{words.digits(rng, 2, 2)}",
            letters + words.digits(rng, 2, 4),
        )
    )


def _password(rng: Random) -> str:
    parts = [open_words.noun(rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    if rng.random() < 0.6:
        parts.append(words.digits(rng, 1, 4))
    return rng.choice("-_.-").join(parts)


def _version(rng: Random) -> str:
    return ".".join(str(rng.randint(0, 24)) for _ in range(rng.choice((2, 3, 3))))


def _name(rng: Random) -> str:
    """A lower-case name, such as those of hosts, branches and files."""
    return rng.choice(
        (
            open_words.noun(rng),
            open_words.noun(rng),
            f"{open_words.noun(rng)}-{open_words.noun(rng)}",
        )
    )


def _host(rng: Random) -> str:
    number = str(rng.randint(1, 30))
    ending = rng.choice((".internal", ".local", ".example.com", "", ".lan", ".example.net"))
    if rng.random() < 0.25:
        return ".".join(["10", *(str(rng.randint(0, 254)) for _ in range(3))])
    return f"{_name(rng)}{rng.choice(('-' + number, number, ''))}{ending}"


def _url(rng: Random) -> str:
    return f"https://{_name(rng)}.example.{rng.choice(('com', 'org', 'net'))}{rng.choice(('', '/' + open_words.noun(rng)))}"


def _email(rng: Random) -> str:
    return f"{rng.choice((open_words.noun(rng), open_words.person(rng).split()[-1].lower()))}@{_name(rng)}.example"


def _phone(rng: Random) -> str:
    digits = words.digits
    return rng.choice(
        (
            f"{digits(rng, 3, 3)} {digits(rng, 4, 4)}",
            f"0{digits(rng, 2, 3)}-{digits(rng, 5, 7)}",
            f"555-{digits(rng, 4, 4)}",
            f"+{digits(rng, 2, 2)} {digits(rng, 3, 3)} {digits(rng, 3, 3)}",
        )
    )


def _file(rng: Random) -> str:
    name = f"{_name(rng).replace('-', rng.choice('-_'))}.{rng.choice(_FILE_ENDINGS)}"
    return name if rng.random() < 0.5 else f"{rng.choice(_TOP_FOLDERS)}/{name}"


def _title(rng: Random) -> str:
    noun = open_words.noun(rng).capitalize()
    other = open_words.noun(rng).capitalize()
    return rng.choice(
        (
            f"The {noun} {other}",
            f"{noun} and {other}",
            f"The Last {noun}",
            f"A {noun} in {open_words.city(rng)}",
            f"The {other}'s {noun}",
        )
    )


def _company(rng: Random) -> str:
    name = (
        open_words.invented(rng).capitalize()
        if rng.random() < 0.6
        else rng.choice(_LISTS["surname"].split("|"))
    )
    return rng.choice(
        (
            name,
            f"{name} Ltd",
            f"{name} & Sons",
            f"{name} Logistics",
            f"{name} Foods",
            f"{name} Systems",
            f"{name} GmbH",
            f"{name} Bank",
            f"{name} Insurance",
        )
    )


def _few(rng: Random) -> str:
    return (
        rng.choice(open_words.SMALL_NUMBERS[:11]) if rng.random() < 0.5 else str(rng.randint(2, 12))
    )


def _thing(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.45:
        return rng.choice(wide_words.NOUNS)
    return (
        open_words.compound(rng)
        if kind < 0.75
        else f"{rng.choice(open_words.COLOURS)} {open_words.noun(rng)}"
    )


_DRAWN: dict[str, Callable[[Random], str]] = {
    "person": open_words.person,
    "city": open_words.city,
    "day": lambda rng: rng.choice(words.DAYS),
    "date": _date,
    "month": lambda rng: rng.choice(words.MONTHS),
    "year": lambda rng: str(rng.randint(1780, 2035)),
    "hour": _hour,
    "when": _when,
    "duration": _duration,
    "number": lambda rng: words.digits(rng, 2, 5).lstrip("0") or "17",
    "few": _few,
    "ordinal": lambda rng: rng.choice(
        "first second third fourth fifth sixth seventh eighth ninth tenth twelfth".split()
    ),
    "money": _money,
    "percent": lambda rng: rng.choice(
        (
            f"{rng.randint(1, 99)} percent",
            f"{rng.randint(1, 99)}%",
            f"{rng.randint(1, 20)}.{rng.randint(1, 9)}%",
        )
    ),
    "weight": _measured("kilos kg grams tons pounds g"),
    "length": _measured("metres cm km miles feet inches mm centimetres"),
    "code": _code,
    "password": _password,
    "version": _version,
    "port": lambda rng: str(
        rng.choice((rng.randint(80, 999), rng.randint(1024, 9999), rng.randint(10000, 65000)))
    ),
    "host": _host,
    "url": _url,
    "email": _email,
    "phone": _phone,
    "file": _file,
    "path": lambda rng: (
        f"/{rng.choice(_TOP_FOLDERS)}/{_name(rng)}{rng.choice(('', '/' + open_words.noun(rng)))}"
    ),
    "branch": lambda rng: rng.choice(
        (
            _name(rng),
            f"release-{rng.randint(1, 9)}.{rng.randint(0, 9)}",
            f"feature/{_name(rng)}",
            f"{open_words.noun(rng)}-fix",
        )
    ),
    "thing": _thing,
    "colour": lambda rng: rng.choice(open_words.COLOURS),
    "book": _title,
    "song": _title,
    "company": _company,
    "product": lambda rng: (
        f"{open_words.invented(rng).capitalize()}{rng.choice(('', '', ' ' + str(rng.randint(2, 900)), ' Pro', ' Mini'))}"
    ),
    "project": lambda rng: (
        open_words.invented(rng).capitalize()
        if rng.random() < 0.5
        else open_words.noun(rng).capitalize()
    ),
    "word": open_words.invented,
}


def fill(kind: str, rng: Random) -> str:
    """A filler of this kind."""
    draw = _DRAWN.get(kind)
    return draw(rng) if draw is not None else _from_list(kind, rng)
