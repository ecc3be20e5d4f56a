"""Text that comes in pieces, read by a generator that yields whenever it needs more of it: grammars
read as plain code. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeAlias, TypeVar

Result = TypeVar("Result")
Waiting: TypeAlias = Generator[None, None, Result]
"""Steps of a reader: it yields when nothing more is certain without more text, and returns what it
has read.
"""


def advanced(steps: Waiting[Result]) -> Result | None:
    """Let a reader go on. What it has read, or None while it waits for more text."""
    try:
        next(steps)
    except StopIteration as done:
        read: Result = done.value
        return read
    return None


class Incoming:
    """What has come of a text and is not read yet. `place` is where the reader stands in `text`."""

    def __init__(self, plain: Callable[[str], str] = str) -> None:
        """plain: gives the literal text of what came, in which markers may be characters of their
        own.
        """
        self.plain = plain
        self.text = ""
        self.place = 0
        self.reached = 0  # the furthest place in `text` up to which something was looked for
        self.ended = False  # no more text will come
        # characters, markers written out: all of them, and those that were read and dropped
        self.came = self.passed = 0

    def add(self, text: str) -> None:
        """More text has come."""
        self.text += text
        self.came += len(self.plain(text))

    def drop_read(self) -> str:
        """Forget what was read, and return it."""
        self.reached -= self.place
        read, self.text, self.place = self.text[: self.place], self.text[self.place :], 0
        self.passed += len(self.plain(read))
        return read

    @property
    def position(self) -> int:
        """How many characters, markers written out, stand before the place that is read next."""
        return self.passed + len(self.plain(self.text[: self.place]))

    @property
    def rest(self) -> str:
        """What was not read."""
        return self.text[self.place :]

    def standing(self, marks: Sequence[str], place: int | None = None) -> Waiting[str]:
        """Which of the marks stands at the place (the reader's own unless given), the longest;
        empty when none does.
        """
        at = self.place if place is None else place
        while True:
            found = max(
                (mark for mark in marks if self.text.startswith(mark, at)), key=len, default=""
            )
            come = len(self.text) - at
            if self.ended or not any(
                len(mark) > max(come, len(found)) and mark.startswith(self.text[at:])
                for mark in marks
            ):
                return found
            yield

    def taken(self, *marks: str) -> Waiting[str]:
        """Read one of the marks if it stands here; which, or empty."""
        found = yield from self.standing(marks)
        self.place += len(found)
        return found

    def behind_space(self, place: int, *, spaces: Sequence[str] = ()) -> Waiting[int]:
        """The first place from there on that is no white space; the text's end when it has ended
        with some.

        spaces: what counts as white space beside the characters that are, such as `\\n` written as
        two.
        """
        while True:
            while place < len(self.text) and self.text[place].isspace():
                place += 1
            self.reached = max(self.reached, place)
            if place == len(self.text):
                if self.ended:
                    return place
                yield
            elif spaces and (found := (yield from self.standing(spaces, place))):
                place += len(found)
            else:
                return place

    def skip_space(self, *, spaces: Sequence[str] = ()) -> Waiting[None]:
        """Read white space."""
        self.place = yield from self.behind_space(self.place, spaces=spaces)

    def find(
        self, marks: Sequence[str], start: int, *, limit: int | None = None
    ) -> Waiting[tuple[int, str]]:
        """Place and text of the first mark from `start` on, of two at a place the longer one.

        Without any: the text's end, or where `limit` characters are passed, and no mark.
        """
        longest, _ = _shape(tuple(marks))
        since = start
        while True:
            found = self._nearest(marks, since)
            self.reached = max(self.reached, found if found >= 0 else len(self.text))
            if found >= 0 and (limit is None or found <= start + limit):
                mark = yield from self.standing(marks, found)
                return found, mark
            if limit is not None and (found >= 0 or len(self.text) - start > limit + longest):
                return start + limit, ""
            if self.ended:
                return len(self.text), ""
            since = max(start, len(self.text) - longest + 1)
            yield

    def _nearest(self, marks: Sequence[str], start: int) -> int:
        """The place of the first mark; -1 for none.

        What was found already bounds the search for the others.
        """
        nearest = -1
        for mark in reversed(marks):  # where some are single characters, these stand last
            end = len(self.text) if nearest < 0 else nearest - 1 + len(mark)
            at = self.text.find(mark, start, end)
            nearest = at if at >= 0 else nearest
        return nearest

    def certain(self, marks: Sequence[str]) -> int:
        """Up to where no mark stands or may be about to stand, of what was not read."""
        text, place = self.text, self.place
        end = len(text)
        nearest = min([at for mark in marks if (at := text.find(mark, place)) >= 0], default=end)
        if not self.ended:
            longest, firsts = _shape(tuple(marks))
            for at in range(max(place, end - longest + 1), nearest):
                if text[at] in firsts and any(mark.startswith(text[at:]) for mark in marks):
                    return at
        return nearest


@lru_cache(maxsize=256)
def _shape(marks: tuple[str, ...]) -> tuple[int, str]:
    """The length of the longest mark, and the characters that one may begin with."""
    return max(map(len, marks)), "".join({mark[0] for mark in marks})
