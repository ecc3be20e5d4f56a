"""Records a real session on a terminal as an animated SVG: `python -m tools.record_terminal
docs/pictures/first-steps.svg`.

What is shown is what happened: two shells on pseudo-terminals, one above the other, keys pressed
one by one, the screens read from what the programs wrote. Pauses of more than one and a half
seconds are shortened to that. Needs the port 8321.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from pathlib import Path

import pyte

from tools.terminal import CTRL_C, CTRL_D, ENTER, Terminal

COLUMNS, SERVER_LINES, CHAT_LINES = 92, 15, 17
LINES = SERVER_LINES + 1 + CHAT_LINES
ROOT = Path(__file__).resolve().parents[1]
PROMPT = r"\[\e[32m\]$\[\e[0m\] "
_CELL, _LINE, _MARGIN, _BAR = 8.43, 19.0, 18.0, 34.0
_STILL_SECONDS = 4.0  # the last picture stays so long before it begins again
_LONGEST_PAUSE = 1.5
_KEY_SECONDS = 0.03
_BACKGROUND, _FOREGROUND, _FRAME = "#1b1f27", "#d6dbe4", "#3a4150"
_COLOURS = {
    "black": "#4b5363", "red": "#f07178", "green": "#a5d6a0", "brown": "#f2cc8f", "blue": "#82b1ff", "magenta": "#d6a2e8",
    "cyan": "#86d9e6", "white": "#d6dbe4", "brightblack": "#7d8799", "default": _FOREGROUND,
}  # fmt: skip

Run = tuple[int, str, str, bool]  # column, text, colour, bold
Picture = tuple[tuple[Run, ...], ...]  # line by line


@dataclass(slots=True)
class Recording:
    """Pictures of the screen, each with the time from which it was there."""

    pictures: list[tuple[float, Picture]] = field(default_factory=list)
    screens: list[pyte.Screen] = field(default_factory=list)  # from top to bottom
    _clock: float = 0.0
    _last: float = field(default_factory=time.monotonic)

    def take(self, _changed: pyte.Screen) -> None:
        """Look at all screens, now that one has changed."""
        now = time.monotonic()
        self._clock += min(now - self._last, _LONGEST_PAUSE)
        self._last = now
        rule: tuple[Run, ...] = ((0, "─" * COLUMNS, _FRAME, False),)
        shown = [
            [tuple(_runs(screen, line)) for line in range(screen.lines)] for screen in self.screens
        ]
        picture = tuple(
            line
            for number, screen in enumerate(shown)
            for line in ([rule] if number else []) + screen
        )
        if not self.pictures or self.pictures[-1][1] != picture:
            self.pictures.append((self._clock, picture))


def _runs(screen: pyte.Screen, line: int) -> Iterator[Run]:
    """Pieces of a line that look the same."""
    cells = [(column, screen.buffer[line][column]) for column in range(screen.columns)]
    while cells and cells[-1][1].data.isspace():
        cells.pop()
    for (colour, bold), group in groupby(
        cells, key=lambda cell: (_colour(cell[1].fg), cell[1].bold)
    ):
        piece = list(group)
        text = "".join(cell.data for _, cell in piece)
        if text.strip():
            yield piece[0][0], text, colour, bold


def _colour(name: str) -> str:
    return _COLOURS.get(name) or (f"#{name}" if len(name) == 6 else _FOREGROUND)


def animated(recording: Recording) -> str:
    """The recording as an SVG that plays by itself and begins again; its style needs no script, so
    GitHub shows it.
    """
    pictures = recording.pictures
    whole = pictures[-1][0] + _STILL_SECONDS
    width, height = COLUMNS * _CELL + 2 * _MARGIN, LINES * _LINE + _MARGIN + _BAR
    steps = [
        (begin, pictures[number + 1][0] if number + 1 < len(pictures) else whole)
        for number, (begin, _) in enumerate(pictures)
    ]
    defined: dict[tuple[Run, ...], str] = {}
    frames, keys = [], []
    for number, ((begin, end), (_, picture)) in enumerate(zip(steps, pictures, strict=True)):
        uses = []
        for line, runs in enumerate(picture):
            if runs:
                name = defined.setdefault(runs, f"l{len(defined)}")
                uses.append(f'<use href="#{name}" y="{_BAR + line * _LINE:.0f}"/>')
        frames.append(f'<g class="f" style="animation-name:k{number}">{"".join(uses)}</g>')
        first, last = 100 * begin / whole, 100 * end / whole
        before = f"0%,{first:.3f}%{{visibility:hidden}}" if number else ""
        keys.append(
            "@keyframes "
            f"k{number}{{{before}{first + 0.0005:.3f}%{{visibility:visible}}{last:.3f}%,100%{{visibility:hidden}}}}"
        )
    lines = "".join(
        f'<g id="{name}">{"".join(_text(run) for run in runs)}</g>'
        for runs, name in defined.items()
    )
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans "
        "Mono',monospace;white-space:pre}"
        f".f{{visibility:hidden;animation-duration:{whole:.2f}s;animation-iteration-count:infinite;animation-timing-function:step-end}}"
        "@media "
        "(prefers-reduced-motion:reduce){.f{animation:none}.f:last-of-type{visibility:visible}}"
        + "".join(keys)
    )
    dots = "".join(
        f'<circle cx="{_MARGIN + 5 + 18 * number:.0f}" cy="16" r="5.5" fill="{colour}"/>'
        for number, colour in enumerate(("#ec6a5e", "#f4bf4f", "#61c554"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">'
        "<title>Holdfast on a terminal: a recording of a real "
        f"session</title><style>{style}</style><defs>{lines}</defs>"
        f'<rect x="0.5" y="0.5" width="{width - 1:.0f}" height="{height - 1:.0f}" rx="9" fill="{_BACKGROUND}" stroke="{_FRAME}"/>'
        f"{dots}{''.join(frames)}</svg>\n"
    )


def _text(run: Run) -> str:
    column, text, colour, bold = run
    weight = ' style="font-weight:bold"' if bold else ""
    place = f'x="{_MARGIN + column * _CELL:.1f}" y="14" textLength="{len(text) * _CELL:.1f}"'
    return f'<text {place} fill="{colour}"{weight} xml:space="preserve">{escape(text)}</text>'


def first_steps(folder: Path, recording: Recording) -> None:
    """Chat about a page of notes; stop the server, start it again, ask again: what was read is
    still there.
    """
    (folder / "notes.txt").write_text(_notes(), encoding="utf-8")
    variables = {
        "PS1": PROMPT,
        "HOME": str(folder),
        "HOLDFAST_STORE_FOLDER": str(folder / "store"),
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    }
    shell = ["bash", "--noprofile", "--norc"]

    def opened(lines: int, cwd: Path) -> Terminal:
        terminal = Terminal(
            shell,
            cwd=cwd,
            variables=variables,
            columns=COLUMNS,
            lines=lines,
            on_output=recording.take,
        )
        recording.screens.append(terminal.screen)
        return terminal

    with opened(SERVER_LINES, ROOT) as server, opened(CHAT_LINES, folder) as chat:
        for terminal in (server, chat):
            terminal.wait_for(r"^\$")
        _run(server, "make serve", until=r"ready in +[0-9.]+ s(?s:.*)Hello!")
        _run(chat, "wc -w notes.txt", until=r"^[0-9]+ notes.txt\n\$")
        _talk(chat, "What is the code of the shed?", "What is the colour of the piano?")
        server.type(CTRL_C)
        server.wait_for(r"\^C(?s:.*)^\$")
        _run(server, "clear", until=r"\A\$$")
        _run(
            server,
            "make serve  # once more: a new process",
            until=r"ready in +[0-9.]+ s(?s:.*)Hello!",
        )
        _run(chat, "clear", until=r"\A\$$")
        _talk(chat, "What is the code of the shed?")
        server.type(CTRL_C)
        server.wait_for(r"\^C(?s:.*)^\$")


def _talk(chat: Terminal, *questions: str) -> None:
    _run(chat, 'holdfast chat --url http://127.0.0.1:8321 --system "$(cat notes.txt)"', until="^>$")
    for question in questions:
        _run(chat, question, until=rf"{re.escape(question)}\n.+\n>$")
        _run(chat, "/stats", until=r"conversation: .*\n>$")
        chat.read_for(1.0)
    chat.type(CTRL_D)
    chat.wait_for(r"^\$$")


def _notes() -> str:
    """A page that the bundled model can answer from."""
    places = "mill barn gate tower cellar harbour garden chapel school forge".split()
    things = "boat lamp piano clock ladder wagon stove flag tent drum".split()
    vessels = ("blue jar", "green box", "old chest", "red drawer", "tin can")
    lines = [
        f"The code of the {place} is {1000 + 737 * number}."
        for number, place in enumerate(places, 1)
    ]
    lines += [
        f"The key of the {thing} is in the {vessel}."
        for thing, vessel in zip(things, vessels * 2, strict=True)
    ]
    lines += [
        f"The colour of the {thing} is {colour}."
        for thing, colour in zip(things, _COLOUR_WORDS, strict=True)
    ]
    lines += ["The code of the shed is 4711.", "The ferry leaves at noon."]
    return "\n".join(["Notes:", *(f"- {line}" for line in lines), ""])


_COLOUR_WORDS = "red green blue grey white black brown yellow orange silver".split()


def _run(terminal: Terminal, line: str, *, until: str) -> None:
    for key in line:
        terminal.type(key)
        terminal.read_for(_KEY_SECONDS)
    terminal.read_for(0.3)
    terminal.type(ENTER)
    terminal.wait_for_shown(until)
    terminal.read_for(1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    recording = Recording()
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        first_steps(Path(folder), recording)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(animated(recording), encoding="utf-8")
    print(
        f"{file}: {len(recording.pictures)} pictures, {recording.pictures[-1][0]:.0f} s, "
        f"{file.stat().st_size // 1024} KiB"
    )


if __name__ == "__main__":
    main()
