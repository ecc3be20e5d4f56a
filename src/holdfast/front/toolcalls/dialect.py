"""How one model writes reasoning and calls: immutable data that is determined when the model is
loaded, and shared by all requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from holdfast.front.toolcalls.call_format import CallFormat
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.front.toolcalls.incoming import Markers, is_marker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The markers around a thought, as text. White space next to the markers belongs to them."""

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDialect:
    """A dialect prepared for a reader: each marker that is a token is one character (`Markers`).

    start, end: the markers around a thought. frame: the text around the whole visible answer. They
    are empty if the model writes none.
    """

    forms: tuple[CallFormat, ...]  # possible forms of calls, the family's own form first
    call_marks: frozenset[str]
    openers: tuple[str, ...]
    marked_openers: frozenset[str]  # openers that contain a marker; others are ordinary text
    channel_openers: tuple[str, ...]
    start: str
    end: str
    dropped: tuple[str, ...]
    frame: tuple[str, str]
    message_ends: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDialect:
    """How a model writes its answers. By default, answers are plain text.

    family: a key of FAMILIES; empty if unknown. read_too: further forms in which the model may
    write calls. marker_ids: token ids of the markers that are single tokens of the model, by their
    text; more_markup_ids: the ids of the other tokens in the markup of calls, which readers treat
    as text. dropped_marks: meaningless markers next to visible text, such as <response>. frame:
    ordinary text around the whole visible answer, such as <answer> and </answer>. message_ends:
    markers that end an answer, unless a call or another part of the answer follows. turn_ends:
    markers that end every answer.
    """

    family: str = ""
    calls: CallFormat | None = None
    read_too: tuple[CallFormat, ...] = ()
    reasoning: ReasoningFormat | None = None
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    more_markup_ids: Mapping[str, int] = field(default_factory=dict)
    dropped_marks: tuple[str, ...] = ()
    frame: tuple[str, str] = ("", "")
    message_ends: tuple[str, ...] = ()
    turn_ends: tuple[str, ...] = ()
    markers: Markers = field(init=False, repr=False, compare=False)
    encoded: EncodedDialect = field(init=False, repr=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether answers are always plain text."""
        return (
            self.calls is None
            and self.reasoning is None
            and not self.dropped_marks
            and not self.frame[0]
            and not self.message_ends
        )

    @property
    def markup_ids(self) -> Mapping[str, int]:
        """The ids of all tokens in the markup of thoughts and calls, by their text."""
        return {**self.more_markup_ids, **self.marker_ids}

    @property
    def read_forms(self) -> tuple[CallFormat, ...]:
        """All forms of calls that the reader accepts, the family's own first."""
        if self.calls is None:
            return ()
        names = FAMILIES[self.family].read_too if self.family in FAMILIES else ()
        return (self.calls, *self.read_too, *(FAMILIES[name].calls for name in names))

    def __post_init__(self) -> None:
        markers = Markers(self.marker_ids)
        reasoning = markers.encoded(self.reasoning)
        forms = tuple(markers.encoded(form) for form in self.read_forms)
        marks = frozenset(mark for form in forms for mark in form.marks)
        openers = tuple(dict.fromkeys(opener for form in forms for opener in form.openers))
        encoded = EncodedDialect(
            forms=forms,
            call_marks=marks,
            openers=openers,
            marked_openers=frozenset(
                opener for opener in openers if any(mark in opener for mark in marks)
            ),
            channel_openers=tuple(mark for form in forms for mark in form.channel_openers),
            start=reasoning.start.strip() if reasoning else "",
            end=reasoning.end.strip() if reasoning else "",
            dropped=(
                *(mark.strip() for mark in markers.encoded(self.dropped_marks)),
                *_bare_start(reasoning, openers),
            ),
            frame=self.frame,
            message_ends=tuple(map(markers.encode, self.message_ends)),
        )
        object.__setattr__(self, "markers", markers)
        object.__setattr__(self, "encoded", encoded)


def _bare_start(reasoning: ReasoningFormat | None, openers: Collection[str]) -> tuple[str, ...]:
    """The token that begins a longer thought marker. Gemma 4 sometimes writes this token twice, or
    alone, without any meaning.
    """
    start = reasoning.start.strip() if reasoning else ""
    if len(start) > 1 and is_marker(start) and start[0] not in openers:
        return (start[0],)
    return ()


PLAIN = ModelDialect()
