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
from holdfast.front.toolcalls.call_format import AnswerDeltas, CallIds, Thought
from holdfast.front.toolcalls.declared import DeclaredTools
from holdfast.front.toolcalls.dialect import ModelDialect
from holdfast.front.toolcalls.incoming import Incoming, Parser, is_marker, resume

_SPACES = " \t\r\n"
# as the last character: of an empty text, or of a text whose white space may belong to a marker
_EMPTY_OR_SPACE = ("", *_SPACES)
# once this many characters were parsed as calls without success, the rest of the answer is text
_MOST_FAILED_CHARACTERS = 200_000
_LOOKAHEAD_CHARACTERS = 1024  # that are parsed ahead at a time
_MOST_HELD_BACK_SPACES = (
    64  # longer white space before a marker is treated as text and is not held back
)


class AnswerReader:
    """Reads one answer in its model's dialect, the syntax of thoughts and calls (`ModelDialect`).

    However the text is divided among calls of `push`, the deltas are the same, once adjacent texts
    of one kind and adjacent arguments are joined; none of them is empty. Text that is neither
    a complete call nor a marker becomes visible text, so that it is not lost. Markers that are
    single tokens arrive as one character each (`Markers`).

    Some models write a frame, such as <answer> and </answer>, around the whole visible answer, and
    some write text and thoughts in channels, between markers of their own.

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
        self._deltas = AnswerDeltas(tools or DeclaredTools(), reads_calls=reads_calls, ids=ids)
        self._dialect = dialect.encoded
        encoded = self._dialect
        self._call_starts = encoded.call_starts if reads_calls else encoded.channel_starts
        self._call_starts_in_thought = tuple(
            marker for marker in self._call_starts if marker in encoded.marked_call_starts
        )
        self._markers_in_text = _not_empty(
            encoded.thought_start,
            encoded.thought_end,
            *encoded.dropped_markers,
            *encoded.frame,
            *encoded.message_ends,
            *self._call_starts,
        )
        self._markers_in_thought = _not_empty(
            encoded.thought_end, encoded.thought_start, *self._call_starts_in_thought
        )
        self._text_markers_re = _markers_re(self._markers_in_text)
        self._thought_markers_re = _markers_re(self._markers_in_thought)
        self._in_thought = in_reasoning and bool(self._dialect.thought_end)
        self._thoughts: list[Thought] = []
        self._thought_start = 0
        self._thought_has_text = False  # text of the open thought was emitted
        # which white space is omitted before the next text: none, blank lines, or all
        self._omitted_spaces: Literal["", "lines", "all"] = "lines" if self._in_thought else ""
        # the last newline of that white space was already omitted; more white space is indentation
        self._in_indentation = False
        self._in_long_space = False  # in the middle of white space that was too long to hold back
        self._is_line_blank = True  # the current line contains only white space so far
        self._last_character = ""  # the last character that was emitted; empty before the first
        self._in_call = False  # currently reading a call, or text that may be one
        self._is_flushing = False  # `flush` was called: no more text follows
        self._was_cut_off = False  # `flush` was told that the answer reached its length limit
        self._has_text = False  # visible text was emitted
        self._in_frame = False  # the answer began with the opening of its frame (`EncodedDialect`)
        self._failed_characters = 0  # characters that were parsed as calls without success
        # the value of `_failed_characters` when the open thought began
        self._failed_before_thought = 0
        self._parser = self._read()
        next(self._parser)

    @property
    def settled_characters(self) -> int:
        """Length of the part of the answer that later text cannot change.

        Markers that arrived as one character count with their full length.
        """
        return self._source.dropped_characters

    @property
    def thoughts(self) -> Sequence[Thought]:
        """The positions of thoughts; an open thought ends at `settled_characters`."""
        if not self._in_thought:
            return self._thoughts
        return (*self._thoughts, Thought(self._thought_start, self._source.dropped_characters))

    @property
    def held_back_characters(self) -> int:
        """Number of characters that are held back until more text arrives."""
        return len(self._source.text)

    def push(self, text: str) -> Sequence[OutputDelta]:
        """Add text. Returns the deltas that are certain now."""
        if self.ended_at is not None:
            return ()
        marker_pattern = self._thought_markers_re if self._in_thought else self._text_markers_re
        if (
            not (self._source.text or self._in_call or self._omitted_spaces)
            and text[-1:] not in _EMPTY_OR_SPACE
            and not marker_pattern.search(text)
        ):
            return (self._plain_delta(text),)
        if text:
            self._source.add(text)
            next(self._parser, None)
        return self._take_deltas()

    def flush(self, *, was_cut_off: bool = False) -> Sequence[OutputDelta]:
        """Return the deltas that were held back. Call this when no more text follows.

        was_cut_off: whether the answer reached its length limit; if so, an open call stays open.
        """
        source = self._source
        self._is_flushing = True
        if self._in_thought and self._in_call:
            # `_ends_with_calls` may wait for this, to end the thought before a channel of text
            next(self._parser, None)
        source.has_ended = True
        self._was_cut_off = was_cut_off
        if was_cut_off and self._dialect.channel_starts:
            self._deltas.mark_cut_off()
        if not (was_cut_off and self._in_call) or self._in_thought or self._dialect.channel_starts:
            next(self._parser, None)
        elif not self._deltas.is_open:
            self._parser.close()
            if not self._is_rest_of_markup(source.text.strip(_SPACES)):
                self._emit(len(source.text))
        source.place = len(source.text)
        source.drop_read()
        return self._take_deltas()

    def _take_deltas(self) -> Sequence[OutputDelta]:
        """Return the deltas that are ready. Records thoughts that were read from channels."""
        deltas = self._deltas.take_ready()
        if self._dialect.channel_starts:
            for part in deltas:
                if isinstance(part, TextDelta) and part.kind == "reasoning":
                    self._add_thought_in_channel(part.start, part.start + len(part.text))
        return deltas

    def _add_thought_in_channel(self, start: int, end: int) -> None:
        """Record a piece of a thought; a piece that continues the last thought extends it."""
        if self._thoughts and self._thoughts[-1].end >= start:
            start = self._thoughts.pop().start
        self._thoughts.append(Thought(start, end))

    def _is_rest_of_markup(self, text: str) -> bool:
        """Whether the unread text at a cut-off is not to be shown: it is empty, or it follows
        complete calls and begins one of their markers.
        """
        if not text:
            return True
        is_beginning = any(marker.startswith(text) for marker in self._dialect.call_markers)
        return self._deltas.any_call_ended and is_beginning

    def _read(self) -> Parser[None]:
        """Read the whole answer. Yields when it needs more text; returns when the answer ends.

        Each round emits the text that cannot be part of a marker, then handles the marker after it.
        """
        source = self._source
        yield
        while True:
            markers = self._markers_in_thought if self._in_thought else self._markers_in_text
            certain_end = source.safe_end(markers) if markers else len(source.text)
            place = self._emit_up_to(certain_end)
            if place == len(source.text):
                if source.has_ended:
                    if not self._omitted_spaces:
                        self._emit(place)
                    return
                yield
            elif marker := (yield from source.match_at(markers, place)):
                yield from self._handle_marker(marker, place)
                if self.ended_at is not None:
                    return

    def _handle_marker(self, marker: str, place: int) -> Parser[None]:
        """Handle a marker. place: its position in the text that was not read yet, where only white
        space precedes it.
        """
        begins_line = is_marker(marker) or self._is_line_blank or "\n" in self._source.text[:place]
        if self._in_thought:
            yield from self._handle_marker_in_thought(marker, place, begins_line=begins_line)
        else:
            yield from self._handle_marker_in_text(marker, place, begins_line=begins_line)

    def _handle_marker_in_text(self, marker: str, place: int, *, begins_line: bool) -> Parser[None]:
        """Handle a marker outside a thought.

        place: as in `_handle_marker`. begins_line: whether the marker starts a line, or is a token,
        which may be anywhere.
        """
        dialect = self._dialect
        after = place + len(marker)
        if marker == dialect.thought_start and begins_line:
            self._thought_start = self._source.dropped_characters + place
            self._in_thought = True
            self._thought_has_text = False
            self._failed_before_thought = self._failed_characters
            self._omit_markup(after)
        elif marker == dialect.thought_end and (is_marker(marker) or not self._is_quoted(place)):
            self._omit_stray_marker(marker, place)  # no thought is open
        elif marker in dialect.message_ends:
            yield from self._handle_message_end(place, after)
        elif marker in dialect.dropped_markers or (
            marker == dialect.frame[0] and not self._has_text
        ):
            self._in_frame = self._in_frame or marker == dialect.frame[0]
            self._omit_markup(after)
        elif marker == dialect.frame[1] and self._in_frame and (yield from self._ends_frame(after)):
            self._omit_markup(after)
        elif marker in self._call_starts and (begins_line or marker in dialect.marked_call_starts):
            yield from self._read_calls_at_marker(marker, place)
        else:
            self._emit(after)

    def _handle_marker_in_thought(
        self, marker: str, place: int, *, begins_line: bool
    ) -> Parser[None]:
        """Handle a marker inside a thought. begins_line: as in `_handle_marker_in_text`."""
        dialect = self._dialect
        after = place + len(marker)
        if marker == dialect.thought_end:
            self._omit_markup(after)
            self._thoughts.append(Thought(self._thought_start, self._source.dropped_characters))
            self._in_thought = False
            # this count depends on how the text of the thought was split: restore the earlier value
            self._failed_characters = self._failed_before_thought
        elif marker == dialect.thought_start and not self._thought_has_text:
            self._omit_markup(after)  # the prompt opened the thought, and the model opens it again
        elif marker in self._call_starts and begins_line:
            yield from self._read_calls_in_thought(marker, place)
        else:
            self._emit(after)

    def _handle_message_end(self, place: int, after: int) -> Parser[None]:
        """End the answer before the marker, unless calls follow.

        place, after: the positions before and after the marker.
        """
        following = yield from self._source.after_space(after)
        if (yield from self._source.match_at(self._call_starts, following)):
            self._omit_markup(after)
            return
        if self._omitted_spaces:
            self._omit_markup(place)
        else:
            self._emit(place)
        self.ended_at = self._source.dropped_characters

    def _ends_frame(self, place: int) -> Parser[bool]:
        """Whether the frame's closing marker before `place` ends the frame: only white space or
        calls follow.

        If other text follows, the answer only mentions the marker.
        """
        place = yield from self._source.after_space(place)
        at_end = place == len(self._source.text)
        return at_end or bool((yield from self._source.match_at(self._call_starts, place)))

    def _is_quoted(self, place: int) -> bool:
        """Whether the text at this position is preceded by a quotation mark."""
        return (self._source.text[:place] or self._last_character)[-1:] in ("`", '"', "'")

    def _read_calls_at_marker(self, marker: str, place: int) -> Parser[None]:
        """Read the calls that begin at a marker. If there are none, the marker becomes text."""
        source = self._source
        deltas = self._deltas
        source.place = place
        self._in_call = True
        is_call = yield from self._parse_calls(source, deltas)
        self._in_call = False
        if deltas.is_open:
            deltas.end_call("unclosed_call")
        if is_call:
            self._omit_markup(source.place, spaces="all")
        else:
            self._failed_characters += source.searched_to - place
            self._emit(place + len(marker))

    def _read_calls_in_thought(self, marker: str, place: int) -> Parser[None]:
        """Read calls in a thought, or text that only quotes or considers one. They count as calls
        only if nothing follows them in the answer.

        The text is held back until the thought ends or continues differently; then it is reasoning.
        To decide, a copy of the text is parsed ahead, and its deltas are thrown away.
        """
        source = self._source
        thought_end = self._dialect.thought_end
        ahead = Incoming(source.plain)
        lookahead = self._ends_with_calls(ahead)
        copied_to = place  # `ahead`, the copy, has received the text up to here
        is_call: bool | None = None
        self._in_call = True
        while is_call is None:
            if source.text.find(thought_end, max(place, copied_to - len(thought_end) + 1)) >= 0:
                is_call = False
                continue
            next_text = source.text[copied_to : copied_to + _LOOKAHEAD_CHARACTERS]
            copied_to += len(next_text)
            ahead.add(next_text)
            ahead.has_ended = source.has_ended and copied_to == len(source.text)
            is_call = resume(lookahead)
            if is_call is None and copied_to == len(source.text):
                yield
        self._in_call = False
        if is_call:
            self._thoughts.append(Thought(self._thought_start, source.dropped_characters + place))
            self._in_thought = False
            self._omit_markup(place)
            yield from self._read_calls_at_marker(marker, 0)
        else:
            self._failed_characters += ahead.dropped_characters + ahead.searched_to
            self._emit(place + len(marker))

    def _ends_with_calls(self, ahead: Incoming) -> Parser[bool]:
        """Whether valid calls are at this position and end an answer that was not cut off.

        A channel of visible text also ends a thought, but only if no end marker of the thought
        follows; so this waits until the answer is over.
        """
        any_call_ended = False
        while True:
            marker = yield from ahead.match_at(self._call_starts)
            trial = AnswerDeltas(self._deltas.tools, reads_calls=self._deltas.reads_calls)
            calls_position = ahead.position
            if not marker or not (yield from self._parse_calls(ahead, trial)):
                return False
            if not _is_valid(trial, marked=is_marker(marker)):
                return False
            text_delta = next((part for part in trial.ready if isinstance(part, TextDelta)), None)
            if text_delta is not None:
                # text that starts at `calls_position` is the marker itself, which opened nothing
                is_channel = not any_call_ended and text_delta.start > calls_position
                while is_channel and not self._is_flushing:
                    yield
                return is_channel
            any_call_ended = any_call_ended or trial.any_call_ended
            yield from ahead.skip_space()
            ahead.drop_read()
            if not ahead.text:
                return not self._was_cut_off

    def _parse_calls(self, source: Incoming, deltas: AnswerDeltas) -> Parser[bool]:
        """Parse the calls at this position in the first of the model's call formats that matches.

        Returns False if there are none.
        """
        place = source.searched_to = source.place
        is_call = False
        for form in self._dialect.call_formats:
            if self._failed_characters > _MOST_FAILED_CHARACTERS and not form.channel_starts:
                continue
            if not is_call and (yield from source.match_at(form.call_starts, place)):
                source.place = place
                is_call = yield from form.read(source, deltas)
        return is_call

    def _emit_up_to(self, end: int) -> int:
        """Emit the text before `end`, without trailing white space, which may belong to a marker.

        Returns the length of the white space that was not emitted.
        """
        text = self._source.text[:end]
        if self._omitted_spaces:
            text = text[self._omit_spaces(text) :]
            if text.isspace():
                return len(text)  # the indentation of the first line
        body = text.rstrip(_SPACES)
        if body:
            self._in_long_space = False
        if self._in_long_space or len(text) - len(body) > _MOST_HELD_BACK_SPACES:
            self._in_long_space = True
            body = text
        self._emit(len(body))
        return len(text) - len(body)

    def _omit_spaces(self, text: str) -> int:
        """Omit the leading white space of the text, as `_omitted_spaces` says. Returns the length.

        In mode "lines", the indentation after its last newline is not omitted.
        """
        spaces = len(text) - len(text.lstrip(_SPACES))
        newline = text.rfind("\n", 0, spaces) + 1
        self._in_indentation = self._in_indentation or (
            newline > 0 and self._omitted_spaces == "lines"
        )
        self._source.place = newline if self._in_indentation else spaces
        return len(self._source.drop_read())

    def _emit(self, length: int) -> None:
        """Emit this number of characters, as text or reasoning."""
        source = self._source
        kind: TextKind = "reasoning" if self._in_thought else "text"
        text = source.plain(source.text[:length])
        if text:
            self._deltas.emit_text(kind, text, start=source.dropped_characters)
            self._record_emitted(text)
        source.place = length
        source.drop_read()

    def _record_emitted(self, text: str) -> None:
        """Update what is known about the current line, thought and white space after text."""
        self._thought_has_text = self._in_thought
        self._has_text = self._has_text or not self._in_thought
        *above, line = text.rsplit("\n", 1)
        self._is_line_blank = (bool(above) or self._is_line_blank) and not line.strip(_SPACES)
        self._omitted_spaces = ""
        self._last_character = text[-1]

    def _plain_delta(self, text: str) -> TextDelta:
        """Return the text as a delta immediately.

        Only for text that contains no beginning of a marker, ends without white space, and
        arrives while no text is held back.
        """
        source = self._source
        start = source.dropped_characters
        source.dropped_characters += len(text)
        self._in_long_space = False
        self._record_emitted(text)
        kind: TextKind = "reasoning" if self._in_thought else "text"
        return TextDelta(text=text, kind=kind, start=start)

    def _omit_stray_marker(self, marker: str, place: int) -> None:
        """Omit a meaningless marker. White space around it stays if it separates two words."""
        if self._last_character and not self._omitted_spaces:
            self._emit(place)
            self._source.place = len(marker)
            self._source.drop_read()
        else:
            self._omit_markup(place + len(marker))

    def _omit_markup(self, length: int, *, spaces: Literal["lines", "all"] = "lines") -> None:
        """Omit this number of characters of markup, and the white space after them."""
        self._source.place = length
        self._source.drop_read()
        self._omitted_spaces = spaces
        self._in_indentation = False
        self._is_line_blank = True
        self._in_long_space = False


class PlainReader:
    """Reads an answer that is always visible text, and holds nothing back."""

    thoughts: Sequence[Thought] = ()
    ended_at: int | None = None  # only the model knows when it has ended

    def __init__(self) -> None:
        self.settled_characters = 0

    def push(self, text: str) -> Sequence[OutputDelta]:
        """Return the text as one delta."""
        start = self.settled_characters
        self.settled_characters += len(text)
        return (TextDelta(text=text, start=start),) if text else ()

    def flush(self, *, was_cut_off: bool = False) -> Sequence[OutputDelta]:
        """Return nothing, because no text is held back."""
        return ()


class TextSeparators:
    """Finds the separators needed when the texts of one answer are joined to one string."""

    def __init__(self) -> None:
        self._last_character = ""  # the last character of visible text
        self._is_interrupted = False  # a part that is not visible text followed

    def separator(self, part: OutputDelta) -> str:
        """Return the separator to insert before `part`, the next part of the answer."""
        if not isinstance(part, TextDelta) or part.kind != "text":
            self._is_interrupted = True
            return ""
        inserted = separator(self._last_character, part.text) if self._is_interrupted else ""
        self._last_character = part.text[-1:] or self._last_character
        self._is_interrupted = False
        return inserted


def _markers_re(markers: Sequence[str]) -> re.Pattern[str]:
    """A pattern that matches the first character of each marker, and markers that are one token."""
    return re.compile("[\udc00-\udfff" + "".join(re.escape(marker[0]) for marker in markers) + "]")


def _not_empty(*markers: str) -> tuple[str, ...]:
    return tuple(marker for marker in markers if marker)


def _is_valid(trial: AnswerDeltas, *, marked: bool) -> bool:
    """Whether all calls among the deltas of a trial are complete and name declared tools.

    marked: whether the calls have a marker; calls without one must also have all required
        arguments.
    """
    arguments: list[str] = []
    for part in trial.ready:
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
            and not _is_complete_call(trial.tools, name, "".join(arguments), part.repairs)
        ):
            return False
    return not trial.is_open


def _is_complete_call(
    tools: DeclaredTools, name: str, arguments: str, repairs: Sequence[str]
) -> bool:
    """Whether the arguments are JSON, have all required keys, and needed no closing repair."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    if any(repair.startswith("unclosed") for repair in repairs):
        return False
    return tools.required(name) <= set(values)
