"""Reads an answer in one pass: reasoning, visible text and calls, by the dialect of its model.

Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Literal

from holdfast.front.toolcalls.call_format import (
    AnswerPart,
    CallArguments,
    CallBegun,
    CallEnded,
    CallParts,
    Segment,
    Thought,
)
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.incoming import Incoming, Waiting, advanced, is_marker
from holdfast.wire.output import TextKind

_SPACES = " \t\r\n"
_END_OR_SPACE = ("", *_SPACES)
# characters of an answer that were read as calls and are none; then all that follows is text
_MOST_IN_VAIN = 200_000
_PIECE = 1024  # characters that are looked at ahead at once
_MOST_SPACES = 64  # more of them before a marker are text: they are not held back


class AnswerReader:
    """The `SegmentFormat` of a model whose dialect is known. One for each sequence.

    White space next to a marker belongs to it: before one, and around calls, all of it; at a
    thought's beginning and behind its end what stands before the first line of text.
    """

    def __init__(
        self,
        dialect: ModelDialect,
        *,
        tools: DeclaredTools | None = None,
        reads_calls: bool = True,
        in_reasoning: bool = False,
    ) -> None:
        """in_reasoning: the prompt has opened a thought. reads_calls: off, and what would be a call
        is text.
        """
        self._source = Incoming(dialect.markers.restore)
        self._parts = CallParts(tools or DeclaredTools(), reads_calls=reads_calls)
        self._marks = dialect.encoded
        self._openers = self._marks.openers if reads_calls else self._marks.channel_openers
        self._openers_in_thought = tuple(
            mark for mark in self._openers if mark in self._marks.marked_openers
        )
        marks = self._marks
        self._marks_in_text = _given(
            marks.start, marks.end, *marks.dropped, *marks.frame, *self._openers
        )
        self._marks_in_thought = _given(marks.end, marks.start, *self._openers_in_thought)
        self._first_in_text, self._first_in_thought = (
            _first(self._marks_in_text),
            _first(self._marks_in_thought),
        )
        self._thinking = in_reasoning and bool(self._marks.end)
        self._thoughts: list[Thought] = []
        self._thought_start = 0
        self._thought_text = False  # the open thought has text
        # white space that is left out now
        self._skips: Literal["", "lines", "all"] = "lines" if self._thinking else ""
        # the newlines of this white space are left out, and what follows them is not
        self._indents = False
        # white space has been given because it was too much, and more of it follows
        self._long_space = False
        self._blank_line = True  # nothing but white space stands in the line before
        self._last = ""  # the last character that was given
        self._reading = False  # a call, or what may be one
        self._is_cut = False  # the answer was ended by its length
        self._any_text = False  # visible text has been given
        self._in_frame = False  # the answer began with the marks that enclose it
        self._in_vain = 0  # characters that were read for calls where none are
        self._in_vain_before = 0  # the same, before the thought began
        self._steps = self._read()
        next(self._steps)

    @property
    def certain(self) -> int:
        """Characters from the answer's beginning, markers written out, about which all is certain."""
        return self._source.passed

    @property
    def thoughts(self) -> Sequence[Thought]:
        """Where the answer's reasoning stands; an open thought ends where certainty does."""
        if not self._thinking:
            return self._thoughts
        return (*self._thoughts, Thought(self._thought_start, self._source.passed))

    @property
    def waiting(self) -> int:
        """Characters that came and are kept, because more has to come before they are done with."""
        return len(self._source.text)

    def push(self, text: str) -> Sequence[AnswerPart]:
        """Add text; returns the parts that are certain now."""
        first = self._first_in_thought if self._thinking else self._first_in_text
        if (
            not (self._source.text or self._reading or self._skips)
            and text[-1:] not in _END_OR_SPACE
            and not first.search(text)
        ):
            return (self._given_at_once(text),)
        if text:
            self._source.add(text)
            next(self._steps, None)
        return self._taken()

    def flush(self, *, cut: bool = False) -> Sequence[AnswerPart]:
        """What was held back, when no text follows. cut: by the answer's length; a call that is
        open stays as it is.
        """
        source = self._source
        source.ended, self._is_cut = True, cut
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

    def _taken(self) -> Sequence[AnswerPart]:
        parts = self._parts.taken()
        if self._marks.channel_openers:
            for part in parts:
                if isinstance(part, Segment) and part.kind == "reasoning":
                    self._spoken_thought(part.start, part.start + len(part.text))
        return parts

    def _spoken_thought(self, start: int, end: int) -> None:
        """A part of a thought that stands in a channel."""
        if self._thoughts and self._thoughts[-1].end >= start:
            start = self._thoughts.pop().start
        self._thoughts.append(Thought(start, end))

    def _is_markup(self, text: str) -> bool:
        """Whether nothing but the beginning of a marker is left of calls that are complete."""
        return not text or (
            self._parts.any_ended and any(mark.startswith(text) for mark in self._marks.call_marks)
        )

    # one pass

    def _read(self) -> Waiting[None]:
        """Yields whenever nothing more is certain; ends when the text has."""
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

    def _at_mark(self, mark: str, space: int) -> Waiting[None]:
        """Do what the mark that stands behind so much white space says."""
        begins_line = is_marker(mark) or self._blank_line or "\n" in self._source.text[:space]
        if self._thinking:
            yield from self._at_mark_in_thought(mark, space, begins_line=begins_line)
        else:
            yield from self._at_mark_in_text(mark, space, begins_line=begins_line)

    def _at_mark_in_text(self, mark: str, space: int, *, begins_line: bool) -> Waiting[None]:
        """begins_line: so does the mark, or it is a token, which counts as well anywhere."""
        marks, behind = self._marks, space + len(mark)
        if mark == marks.start and begins_line:
            self._thought_start, self._thinking, self._thought_text = (
                self._source.passed + space,
                True,
                False,
            )
            self._in_vain_before = self._in_vain
            self._drop(behind)
        elif mark == marks.end and (is_marker(mark) or not self._is_quoted(space)):
            self._leave_out(mark, space)  # nothing was opened
        elif mark in marks.dropped or (mark == marks.frame[0] and not self._any_text):
            self._in_frame = self._in_frame or mark == marks.frame[0]
            self._drop(behind)
        elif mark == marks.frame[1] and self._in_frame and (yield from self._ends_frame(behind)):
            self._drop(behind)
        elif mark in self._openers and (begins_line or mark in marks.marked_openers):
            yield from self._read_call(mark, space)
        else:
            self._give(behind)

    def _at_mark_in_thought(self, mark: str, space: int, *, begins_line: bool) -> Waiting[None]:
        marks, behind = self._marks, space + len(mark)
        if mark == marks.end:
            self._drop(behind)
            self._thoughts.append(Thought(self._thought_start, self._source.passed))
            self._thinking = False
            # how much was tried in the thought depends on the pieces that it came in
            self._in_vain = self._in_vain_before
        elif mark == marks.start and not self._thought_text:
            self._drop(behind)  # the prompt has opened the thought, and the model once more
        elif mark in self._openers and begins_line:
            yield from self._read_call_in_thought(mark, space)
        else:
            self._give(behind)

    def _ends_frame(self, place: int) -> Waiting[bool]:
        """Whether no more text follows: nothing but white space, or calls.

        The answer may speak of its own marks.
        """
        place = yield from self._source.after_space(place)
        at_end = place == len(self._source.text)
        return at_end or bool((yield from self._source.standing(self._openers, place)))

    def _is_quoted(self, place: int) -> bool:
        """Whether what stands here is told rather than meant."""
        return (self._source.text[:place] or self._last)[-1:] in ("`", '"', "'")

    def _read_call(self, mark: str, space: int) -> Waiting[None]:
        source, parts = self._source, self._parts
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
        """A thought may quote a call or weigh one.

        A call is made only if nothing follows it in the whole answer.

        What the thought says is held back meanwhile: until it ends, or goes on with something else,
        and then it was reasoning.
        """
        source, end = self._source, self._marks.end
        ahead = Incoming(source.plain)
        steps = self._ends_with_calls(ahead)
        seen = space  # up to here, the text has been passed on to `ahead`
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
        """Whether the answer ends with the calls that stand here, all of them valid, and was not
        cut.

        A channel of visible text ends a thought as well, whatever follows.
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
            said = next((part for part in trial.done if isinstance(part, Segment)), None)
            if said is not None:
                return not is_called and said.start > begin  # else it is the mark itself
            is_called = is_called or trial.any_ended
            yield from ahead.skip_space()
            ahead.drop_read()
            if not ahead.text:
                return not self._is_cut

    def _read_any_form(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls in the first of the forms in which some stand here. False: there are none."""
        place = source.reached = source.place
        is_call = False
        for form in self._marks.forms:
            if self._in_vain > _MOST_IN_VAIN and not form.channel_openers:
                continue
            if not is_call and (yield from source.standing(form.openers, place)):
                source.place = place
                is_call = yield from form.read(source, parts)
        return is_call

    # what is given

    def _give_up_to(self, end: int) -> int:
        """Give what stands before this place, but for white space that may belong to a marker; how
        much of it is left.
        """
        text = self._source.text[:end]
        if self._skips:
            text = text[self._skip_spaces(text) :]
            if text.isspace():
                return len(text)  # how far the first line is indented
        body = text.rstrip(_SPACES)
        if body:
            self._long_space = False
        if self._long_space or len(text) - len(body) > _MOST_SPACES:
            self._long_space = True
            body = text
        self._give(len(body))
        return len(text) - len(body)

    def _skip_spaces(self, text: str) -> int:
        """Leave out the white space with which the text begins, up to its last newline; how much of
        it.
        """
        spaces = len(text) - len(text.lstrip(_SPACES))
        newline = text.rfind("\n", 0, spaces) + 1
        self._indents = self._indents or (newline > 0 and self._skips == "lines")
        self._source.place = newline if self._indents else spaces
        return len(self._source.drop_read())

    def _give(self, length: int) -> None:
        """Give so many characters, as what they are here."""
        source = self._source
        kind: TextKind = "reasoning" if self._thinking else "text"
        text = source.plain(source.text[:length])
        if text:
            self._parts.say(kind, text, start=source.passed)
            self._note(text)
        source.place = length
        source.drop_read()

    def _note(self, text: str) -> None:
        """Text is given: what follows does not begin a thought any more, and may not begin a line."""
        self._thought_text = self._thinking
        self._any_text = self._any_text or not self._thinking
        *above, line = text.rsplit("\n", 1)
        self._blank_line = (bool(above) or self._blank_line) and not line.strip(_SPACES)
        self._skips, self._last = "", text[-1]

    def _given_at_once(self, text: str) -> Segment:
        """The short way for text in which no marker can begin, which ends without white space, and
        before which nothing waits.
        """
        source = self._source
        start = source.passed
        source.passed += len(text)
        self._long_space = False
        self._note(text)
        return Segment("reasoning" if self._thinking else "text", text, start)

    def _leave_out(self, mark: str, space: int) -> None:
        """Leave out a marker that says nothing. White space around it stays if it parts two words."""
        if self._last and not self._skips:
            self._give(space)
            self._source.place = len(mark)
            self._source.drop_read()
        else:
            self._drop(space + len(mark))

    def _drop(self, length: int, *, spaces: Literal["lines", "all"] = "lines") -> None:
        """Leave out so many characters of markup, and the white space behind them."""
        self._source.place = length
        self._source.drop_read()
        self._skips, self._indents, self._blank_line, self._long_space = spaces, False, True, False


def _first(marks: Sequence[str]) -> re.Pattern[str]:
    """What a marker begins with, and every marker that is a token."""
    return re.compile("[\udc00-\udfff" + "".join(re.escape(mark[0]) for mark in marks) + "]")


def _given(*marks: str) -> tuple[str, ...]:
    return tuple(mark for mark in marks if mark)


def _is_valid(trial: CallParts, *, marked: bool) -> bool:
    """Whether all calls are of declared tools and, unless marked, have all arguments that are
    required.
    """
    arguments: list[str] = []
    for part in trial.done:
        if isinstance(part, CallBegun):
            name, arguments = part.name, []
            if not trial.tools.declares(name):
                return False
        elif isinstance(part, CallArguments):
            arguments.append(part.text)
        elif (
            isinstance(part, CallEnded)
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
    return not any(repair.startswith("unclosed") for repair in repairs) and tools.required(
        name
    ) <= set(given)
