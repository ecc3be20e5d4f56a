"""Files of an agent, such as settings and small programs, and questions about their lines."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from wide_words import english, marked, wide_phrase, wide_value, wide_word


@dataclass(frozen=True)
class File:
    """A file's lines, and questions about some of them."""

    path: str
    lines: tuple[str, ...]
    asked: dict[str, tuple[str, ...]]
    """Line -> what one may call it."""
    absent: str
    """A thing that no line tells."""


ENDINGS = {
    "settings": "yaml toml ini cfg conf env json5 txt properties".split(),
    "code": "py js ts go rb sh".split(),
    "notes": "txt md".split(),
}


def path_of(rng: Random, kind: str, folder: str | None = None) -> str:
    stem = rng.choice(
        (
            wide_word(rng),
            wide_word(rng),
            f"{wide_word(rng)}_{wide_word(rng)}",
            rng.choice("config settings notes main app server data todo README".split()),
        )
    )
    if folder is None:
        folder = "".join(f"{wide_word(rng)}/" for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 2))))
        if rng.random() < 0.15:
            folder = f"/{rng.choice(('home', 'tmp', 'srv', 'work', wide_word(rng)))}/{folder}"
    return f"{folder}{stem}.{rng.choice(ENDINGS[kind])}"


_KEYS = (
    "port host name user timeout retries path level mode version color size limit key token url "
    "title owner debug theme"
).split()


def _key(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(_KEYS)
    return english(rng) if kind < 0.65 else f"{english(rng)}_{english(rng)}"


def settings(rng: Random, folder: str | None = None, most: int = 10) -> File:
    """Keys and values."""
    mark = rng.choice((": ", " = ", "=", ": "))
    keys = list(dict.fromkeys(_key(rng) for _ in range(rng.randint(2, most))))
    absent = keys.pop() if len(keys) > 1 else wide_word(rng)
    lines: list[str] = []
    asked: dict[str, tuple[str, ...]] = {}
    indent = ""
    for key in keys:
        value = rng.choice(
            (
                wide_value(rng),
                marked(rng),
                marked(rng),
                str(rng.randint(0, 9999)),
                rng.choice(("true", "false")),
                wide_phrase(rng, 3),
            )
        )
        if rng.random() < 0.1:
            indent = rng.choice(("", "", "  ", "    ", "- "))
            lines.append(f"{wide_word(rng)}:")
        elif rng.random() < 0.07:
            lines.append(rng.choice((f"# {wide_phrase(rng, 4)}", "", f"[{wide_word(rng)}]")))
        line = f"{indent}{key}{mark}{value}"
        asked[line] = (key.replace("_", " "), key)
        lines.append(line)
    return File(path_of(rng, "settings", folder), tuple(lines), asked, absent.replace("_", " "))


def source(rng: Random, folder: str | None = None) -> File:
    """Little functions."""
    lines: list[str] = []
    asked: dict[str, tuple[str, ...]] = {}
    names = list(
        dict.fromkeys(
            f"{english(rng)}_{english(rng)}" if rng.random() < 0.5 else wide_word(rng)
            for _ in range(rng.randint(2, 6))
        )
    )
    absent = names.pop() if len(names) > 1 else wide_word(rng)
    if rng.random() < 0.5:
        lines += [*(f"import {wide_word(rng)}" for _ in range(rng.randint(1, 3))), "", ""]
    for name in names:
        line = f"def {name}({', '.join(wide_word(rng) for _ in range(rng.randint(0, 3)))}):"
        asked[line] = (f"definition of {name}", f"function {name}", f"line that defines {name}")
        does = (
            f"return {marked(rng)}",
            f"{wide_word(rng)}.{wide_word(rng)}({marked(rng)})",
            f"print({wide_word(rng)})",
            f"{wide_word(rng)} = {rng.randint(0, 999)}",
        )
        lines += [line, f"    {rng.choice(does)}"]
        lines += [""] * rng.choice((0, 1, 2))
    return File(path_of(rng, "code", folder), tuple(lines), asked, f"function {absent}")


def shown(rng: Random, file: File) -> str:
    """The text as a tool returns it, plain or with line numbers."""
    kind = rng.random()
    if kind < 0.7:
        return "\n".join(file.lines)
    form = rng.choice(("{:>5}\t{}", "{:05d}| {}", "{}: {}", "{:>6}→{}"))
    return "\n".join(form.format(number, line) for number, line in enumerate(file.lines, 1))
