"""Parses an answer in one pass into reasoning, visible text and tool calls, in the model's syntax.

Markers enclose thoughts and open calls. The white space around a marker is not part of the text.
Text that looks like a call may only mention one, so the reader holds text back until it is certain
what the text is. The code in this file is free of side effects.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from holdfast.front.output import (
    OutputDelta,
    TextDelta,
    TextKind,
    ToolArgumentsDelta,
    ToolCallFinished,
    ToolCallStarted,
    separator,
)
from holdfast.front.toolcalls.call_format import CallIds, CallParts, Thought
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.incoming import Incoming, Waiting, advanced, is_marker

_SPACES = " \t\r\n"
_END_OR_SPACE = ("", *_SPACES)
# once this many characters were parsed as calls without success, the rest of the answer is text
_MOST_IN_VAIN = 200_000
_PIECE = 1024  # characters of lookahead at a time
_MOST_SPACES = 64  # longer white space before a marker is treated as text and is not held back


class AnswerReader:
    """Reads one answer in the syntax ("dialect") of its model.

    However the text is divided among calls of `push`, the deltas are the same, once adjacent texts
    of one kind and adjacent arguments are joined; none of them is empty. Text that is neither
    a complete call nor a marker becomes visible text, so that it is not lost. Markers that are
    single tokens arrive as one character each (`Markers`).

    White space next to a marker is part of the marker: all white space before a marker and around
    calls; after the beginning or the end of a thought, the blank lines before the first text.
    """

    def __init__(
        self,
        dialect: ModelDialect,
        *,
        tools: DeclaredTools | None = None,
        reads_calls: bool = True,
        in_reasoning: bool = False,
        ids: CallIds | None = None,
    ) -> None:
        """reads_calls: if false, calls are treated as text.

        ids: assigns the ids of the calls; None: they have the ids that the model wrote, or none.

        in_reasoning: whether the prompt has already opened a thought.
        """
        # where the answer has ended, although the model may continue; None: it has not
        self.ended_at: int | None = None
        self._source = Incoming(dialect.markers.restore)
        self._parts = CallParts(tools or DeclaredTools(), reads_calls=reads_calls, ids=ids)
        self._marks = dialect.encoded
        self._openers = self._marks.openers if reads_calls else self._marks.channel_openers
        self._openers_in_thought = tuple(
            mark for mark in self._openers if mark in self._marks.marked_openers
        )
        marks = self._marks
        self._marks_in_text = _not_empty(
            marks.start,
            marks.end,
            *marks.dropped,
            *marks.frame,
            *marks.message_ends,
            *self._openers,
        )
        self._marks_in_thought = _not_empty(marks.end, marks.start, *self._openers_in_thought)
        self._first_in_text = _first(self._marks_in_text)
        self._first_in_thought = _first(self._marks_in_thought)
        self._thinking = in_reasoning and bool(self._marks.end)
        self._thoughts: list[Thought] = []
        self._thought_start = 0
        self._thought_text = False  # the open thought has text
        # which white space is currently omitted
        self._skips: Literal["", "lines", "all"] = "lines" if self._thinking else ""
        # the newlines of this white space were omitted already; the rest is an indentation
        self._indents = False
        self._long_space = False  # in the middle of white space that was too long to hold back
        self._blank_line = True  # the current line contains only white space so far
        self._last = ""  # the last character that was emitted
        self._reading = False  # currently reading a call, or text that may be one
        self._is_over = False  # no more text follows
        self._is_cut = False  # the answer reached its length limit
        self._any_text = False  # visible text was emitted
        self._in_frame = False  # the answer began with the marks of a frame
        self._in_vain = 0  # characters that were parsed as calls without success
        self._in_vain_before = 0  # the value of `_in_vain` before the open thought
        self._steps = self._read()
        next(self._steps)

    @property
    def certain(self) -> int:
        """Length of the part of the answer that later text cannot change.

        Markers that arrived as one character count with their full length.
        """
        return self._source.passed

    @property
    def thoughts(self) -> Sequence[Thought]:
        """The positions of thoughts; an open thought ends at `certain`."""
        if not self._thinking:
            return self._thoughts
        return (*self._thoughts, Thought(self._thought_start, self._source.passed))

    @property
    def waiting(self) -> int:
        """Number of characters that are held back until more text arrives."""
        return len(self._source.text)

    def push(self, text: str) -> Sequence[OutputDelta]:
        """Add text. Returns the deltas that are certain now."""
        if self.ended_at is not None:
            return ()
        first = self._first_in_thought if self._thinking else self._first_in_text
        if (
            not (self._source.text or self._reading or self._skips)
            and text[-1:] not in _END_OR_SPACE
            and not first.search(text)
        ):
            return (self._shortcut(text),)
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self._taken()

    def flush(self, *, cut: bool = False) -> Sequence[OutputDelta]:
        """Return the deltas that were held back. Call this when no more text follows.

        cut: whether the answer reached its length limit; if so, an open call stays open.
        """
        source = self._source
        self._is_over = True
        if self._thinking and self._reading:
            next(self._steps, None)  # a thought that a channel ends: what follows it is not cut yet
        source.ended = True
        self._is_cut = cut
        if cut and self._marks.channel_openers:
            self._parts.cut()
        if not (cut and self._reading) or self._thinking or self._marks.channel_openers:
            next(self._steps, None)
        elif not self._parts.is_open:
            self._steps.close()
            if not self._is_markup(source.text.strip(_SPACES)):
                self._give(len(source.text))
        source.place = len(source.text)
        source.drop_read()
        return self._taken()

    def _taken(self) -> Sequence[OutputDelta]:
        parts = self._parts.taken()
        if self._marks.channel_openers:
            for part in parts:
                if isinstance(part, TextDelta) and part.kind == "reasoning":
                    self._add_thought_in_channel(part.start, part.start + len(part.text))
        return parts

    def _add_thought_in_channel(self, start: int, end: int) -> None:
        if self._thoughts and self._thoughts[-1].end >= start:
            start = self._thoughts.pop().start
        self._thoughts.append(Thought(start, end))

    def _is_markup(self, text: str) -> bool:
        """Whether the text after complete calls is empty or the beginning of a marker."""
        if not text:
            return True
        is_beginning = any(mark.startswith(text) for mark in self._marks.call_marks)
        return self._parts.any_ended and is_beginning

    def _read(self) -> Waiting[None]:
        """Read the whole answer. Yields when it needs more text; returns when the answer ends."""
        source = self._source
        yield
        while True:
            marks = self._marks_in_thought if self._thinking else self._marks_in_text
            certain = source.certain(marks) if marks else len(source.text)
            space = self._give_up_to(certain)
            if space == len(source.text):
                if source.ended:
                    if not self._skips:
                        self._give(space)
                    return
                yield
            elif mark := (yield from source.standing(marks, space)):
                yield from self._at_mark(mark, space)
                if self.ended_at is not None:
                    return

    def _at_mark(self, mark: str, space: int) -> Waiting[None]:
        """Handle a mark. space: the length of the white space before it."""
        begins_line = is_marker(mark) or self._blank_line or "\n" in self._source.text[:space]
        if self._thinking:
            yield from self._at_mark_in_thought(mark, space, begins_line=begins_line)
        else:
            yield from self._at_mark_in_text(mark, space, begins_line=begins_line)

    def _at_mark_in_text(self, mark: str, space: int, *, begins_line: bool) -> Waiting[None]:
        """Handle a mark outside a thought.

        begins_line: whether the mark is at the start of a line, or is a token and may be anywhere.
        """
        marks = self._marks
        after = space + len(mark)
        if mark == marks.start and begins_line:
            self._thought_start = self._source.passed + space
            self._thinking = True
            self._thought_text = False
            self._in_vain_before = self._in_vain
            self._drop(after)
        elif mark == marks.end and (is_marker(mark) or not self._is_quoted(space)):
            self._omit(mark, space)  # no thought is open
        elif mark in marks.message_ends:
            yield from self._at_message_end(space, after)
        elif mark in marks.dropped or (mark == marks.frame[0] and not self._any_text):
            self._in_frame = self._in_frame or mark == marks.frame[0]
            self._drop(after)
        elif mark == marks.frame[1] and self._in_frame and (yield from self._ends_frame(after)):
            self._drop(after)
        elif mark in self._openers and (begins_line or mark in marks.marked_openers):
            yield from self._read_call(mark, space)
        else:
            self._give(after)

    def _at_mark_in_thought(self, mark: str, space: int, *, begins_line: bool) -> Waiting[None]:
        marks = self._marks
        after = space + len(mark)
        if mark == marks.end:
            self._drop(after)
            self._thoughts.append(Thought(self._thought_start, self._source.passed))
            self._thinking = False
            # this count depends on how the text of the thought was split: restore the earlier value
            self._in_vain = self._in_vain_before
        elif mark == marks.start and not self._thought_text:
            self._drop(after)  # the prompt opened the thought, and the model opens it again
        elif mark in self._openers and begins_line:
            yield from self._read_call_in_thought(mark, space)
        else:
            self._give(after)

    def _at_message_end(self, space: int, after: int) -> Waiting[None]:
        """End the answer before the marker, unless calls follow.

        space, after: the positions before and after the marker.
        """
        place = yield from self._source.after_space(after)
        if (yield from self._source.standing(self._openers, place)):
            self._drop(after)
            return
        if self._skips:
            self._drop(space)
        else:
            self._give(space)
        self.ended_at = self._source.passed

    def _ends_frame(self, place: int) -> Waiting[bool]:
        """Whether the mark ends the frame: nothing follows it but white space or calls.

        If other text follows, the answer only mentions the mark.
        """
        place = yield from self._source.after_space(place)
        at_end = place == len(self._source.text)
        return at_end or bool((yield from self._source.standing(self._openers, place)))

    def _is_quoted(self, place: int) -> bool:
        """Whether the text at this position is preceded by a quotation mark."""
        return (self._source.text[:place] or self._last)[-1:] in ("`", '"', "'")

    def _read_call(self, mark: str, space: int) -> Waiting[None]:
        source = self._source
        parts = self._parts
        source.place = space
        self._reading = True
        is_call = yield from self._read_any_form(source, parts)
        self._reading = False
        if parts.is_open:
            parts.end("unclosed_call")
        if is_call:
            self._drop(source.place, spaces="all")
        else:
            self._in_vain += source.reached - space
            self._give(space + len(mark))

    def _read_call_in_thought(self, mark: str, space: int) -> Waiting[None]:
        """Read a call in a thought, or text that only quotes or considers one. It counts as a call
        only if nothing follows it in the answer.

        The text is held back until the thought ends or continues differently; then it is reasoning.
        """
        source = self._source
        end = self._marks.end
        ahead = Incoming(source.plain)
        steps = self._ends_with_calls(ahead)
        seen = space  # `ahead` has received the text up to here
        is_call: bool | None = None
        self._reading = True
        while is_call is None:
            if source.text.find(end, max(space, seen - len(end) + 1)) >= 0:
                is_call = False
                continue
            piece = source.text[seen : seen + _PIECE]
            seen += len(piece)
            ahead.add(piece)
            ahead.ended = source.ended and seen == len(source.text)
            is_call = advanced(steps)
            if is_call is None and seen == len(source.text):
                yield
        self._reading = False
        if is_call:
            self._thoughts.append(Thought(self._thought_start, source.passed + space))
            self._thinking = False
            self._drop(space)
            yield from self._read_call(mark, 0)
        else:
            self._in_vain += ahead.passed + ahead.reached
            self._give(space + len(mark))

    def _ends_with_calls(self, ahead: Incoming) -> Waiting[bool]:
        """Whether the calls at this position are valid and end an answer that was not cut off.

        A channel of visible text also ends a thought, but only if no marker does: since one may
        still follow, this waits until the answer is over.
        """
        is_called = False
        while True:
            mark = yield from ahead.standing(self._openers)
            trial = CallParts(self._parts.tools, reads_calls=self._parts.reads_calls)
            begin = ahead.position
            if not mark or not (yield from self._read_any_form(ahead, trial)):
                return False
            if not _is_valid(trial, marked=is_marker(mark)):
                return False
            said = next((part for part in trial.done if isinstance(part, TextDelta)), None)
            if said is not None:
                # a text that starts at `begin` is the mark itself, as text
                is_channel = not is_called and said.start > begin
                while is_channel and not self._is_over:
                    yield
                return is_channel
            is_called = is_called or trial.any_ended
            yield from ahead.skip_space()
            ahead.drop_read()
            if not ahead.text:
                return not self._is_cut

    def _read_any_form(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Parse the calls at this position in the first call format that matches.

        Returns False if there are none.
        """
        place = source.reached = source.place
        is_call = False
        for form in self._marks.forms:
            if self._in_vain > _MOST_IN_VAIN and not form.channel_openers:
                continue
            if not is_call and (yield from source.standing(form.openers, place)):
                source.place = place
                is_call = yield from form.read(source, parts)
        return is_call

    def _give_up_to(self, end: int) -> int:
        """Emit the text before `end`, without trailing white space, which may belong to a marker.

        Returns the length of the white space that was not emitted.
        """
        text = self._source.text[:end]
        if self._skips:
            text = text[self._skip_spaces(text) :]
            if text.isspace():
                return len(text)  # the indentation of the first line
        body = text.rstrip(_SPACES)
        if body:
            self._long_space = False
        if self._long_space or len(text) - len(body) > _MOST_SPACES:
            self._long_space = True
            body = text
        self._give(len(body))
        return len(text) - len(body)

    def _skip_spaces(self, text: str) -> int:
        """Omit the leading white space of the text, up to its last newline. Returns its length."""
        spaces = len(text) - len(text.lstrip(_SPACES))
        newline = text.rfind("\n", 0, spaces) + 1
        self._indents = self._indents or (newline > 0 and self._skips == "lines")
        self._source.place = newline if self._indents else spaces
        return len(self._source.drop_read())

    def _give(self, length: int) -> None:
        """Emit this number of characters, as text or reasoning."""
        source = self._source
        kind: TextKind = "reasoning" if self._thinking else "text"
        text = source.plain(source.text[:length])
        if text:
            self._parts.say(kind, text, start=source.passed)
            self._note(text)
        source.place = length
        source.drop_read()

    def _note(self, text: str) -> None:
        """Update the state after text was emitted."""
        self._thought_text = self._thinking
        self._any_text = self._any_text or not self._thinking
        *above, line = text.rsplit("\n", 1)
        self._blank_line = (bool(above) or self._blank_line) and not line.strip(_SPACES)
        self._skips = ""
        self._last = text[-1]

    def _shortcut(self, text: str) -> TextDelta:
        """Return the text as a delta immediately.

        Only for text that contains no beginning of a marker, ends without white space, and
        arrives while no text is held back.
        """
        source = self._source
        start = source.passed
        source.passed += len(text)
        self._long_space = False
        self._note(text)
        kind: TextKind = "reasoning" if self._thinking else "text"
        return TextDelta(text=text, kind=kind, start=start)

    def _omit(self, mark: str, space: int) -> None:
        """Omit a meaningless marker. White space around it stays if it separates two words."""
        if self._last and not self._skips:
            self._give(space)
            self._source.place = len(mark)
            self._source.drop_read()
        else:
            self._drop(space + len(mark))

    def _drop(self, length: int, *, spaces: Literal["lines", "all"] = "lines") -> None:
        """Omit this number of characters of markup, and the white space after them."""
        self._source.place = length
        self._source.drop_read()
        self._skips = spaces
        self._indents = False
        self._blank_line = True
        self._long_space = False


class PlainReader:
    """Reads an answer that is always visible text, and holds nothing back."""

    thoughts: Sequence[Thought] = ()
    ended_at: int | None = None  # only the model knows when it has ended

    def __init__(self) -> None:
        self.certain = 0

    def push(self, text: str) -> Sequence[OutputDelta]:
        """Return the text as one delta."""
        start = self.certain
        self.certain += len(text)
        return (TextDelta(text=text, start=start),) if text else ()

    def flush(self, *, cut: bool = False) -> Sequence[OutputDelta]:
        """Return nothing, because no text is held back."""
        return ()


class TextJoints:
    """Finds the separators needed when the texts of one answer are joined to one string."""

    def __init__(self) -> None:
        self._last = ""  # the last character of visible text
        self._parted = False  # a part that is not visible text followed

    def separator(self, part: OutputDelta) -> str:
        """Return the separator to insert before `part`, the next part of the answer."""
        if not isinstance(part, TextDelta) or part.kind != "text":
            self._parted = True
            return ""
        found = separator(self._last, part.text) if self._parted else ""
        self._last = part.text[-1:] or self._last
        self._parted = False
        return found


def _first(marks: Sequence[str]) -> re.Pattern[str]:
    """A pattern that matches the first character of each marker, and markers that are one token."""
    return re.compile("[\udc00-\udfff" + "".join(re.escape(mark[0]) for mark in marks) + "]")


def _not_empty(*marks: str) -> tuple[str, ...]:
    return tuple(mark for mark in marks if mark)


def _is_valid(trial: CallParts, *, marked: bool) -> bool:
    """Whether all calls are complete and name declared tools.

    marked: whether the calls have a marker; calls without one must also have all required
        arguments.
    """
    arguments: list[str] = []
    for part in trial.done:
        if isinstance(part, ToolCallStarted):
            name = part.name
            arguments = []
            if not trial.tools.declares(name):
                return False
        elif isinstance(part, ToolArgumentsDelta):
            arguments.append(part.text)
        elif (
            isinstance(part, ToolCallFinished)
            and not marked
            and not _is_complete(trial.tools, name, "".join(arguments), part.repairs)
        ):
            return False
    return not trial.is_open


def _is_complete(tools: DeclaredTools, name: str, arguments: str, repairs: Sequence[str]) -> bool:
    try:
        given = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    if any(repair.startswith("unclosed") for repair in repairs):
        return False
    return tools.required(name) <= set(given)
