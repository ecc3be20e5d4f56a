"""How one model writes reasoning and calls, its dialect: immutable data that is determined when the
model is loaded, and shared by all requests. (In `front/server`, a dialect is a protocol.)
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

    thought_start, thought_end: the markers around a thought. frame: the text around the whole visible answer. They
    are empty if the model writes none. The other fields are those of ModelDialect and CallFormat.
    """

    call_formats: tuple[CallFormat, ...]  # in which calls are read, the family's own first
    call_markers: frozenset[str]
    call_starts: tuple[str, ...]
    # those of `call_starts` that contain a marker; the others are ordinary text
    marked_call_starts: frozenset[str]
    channel_starts: tuple[str, ...]
    thought_start: str
    thought_end: str
    dropped_markers: tuple[str, ...]
    frame: tuple[str, str]
    message_ends: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDialect:
    """How a model writes its answers. By default, answers are plain text.

    family: a key of FAMILIES; empty if unknown. also_read: further forms in which the model may
    write calls. marker_ids: token ids of the markers that are single tokens of the model, by their
    text; more_markup_ids: the ids of the other tokens in the markup of calls, which readers treat
    as text. dropped_markers: meaningless markers next to visible text, such as <response>. frame:
    ordinary text around the whole visible answer, such as <answer> and </answer>. message_ends:
    markers that end an answer, unless a call or another part of the answer follows. turn_ends:
    markers that end every answer.
    """

    family: str = ""
    calls: CallFormat | None = None
    also_read: tuple[CallFormat, ...] = ()
    reasoning: ReasoningFormat | None = None
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    more_markup_ids: Mapping[str, int] = field(default_factory=dict)
    dropped_markers: tuple[str, ...] = ()
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
            and not self.dropped_markers
            and not self.frame[0]
            and not self.message_ends
        )

    @property
    def markup_ids(self) -> Mapping[str, int]:
        """The ids of all tokens in the markup of thoughts and calls, by their text."""
        return {**self.more_markup_ids, **self.marker_ids}

    @property
    def readable_formats(self) -> tuple[CallFormat, ...]:
        """All forms of calls that the reader accepts, the family's own first."""
        if self.calls is None:
            return ()
        names = FAMILIES[self.family].also_read if self.family in FAMILIES else ()
        return (self.calls, *self.also_read, *(FAMILIES[name].calls for name in names))

    def __post_init__(self) -> None:
        """Derive `markers` and `encoded` from the other fields."""
        markers = Markers(self.marker_ids)
        reasoning = markers.encoded(self.reasoning)
        formats = tuple(markers.encoded(call_format) for call_format in self.readable_formats)
        call_markers = frozenset(
            marker for call_format in formats for marker in call_format.markers
        )
        call_starts = tuple(
            dict.fromkeys(
                call_start for call_format in formats for call_start in call_format.call_starts
            )
        )
        encoded = EncodedDialect(
            call_formats=formats,
            call_markers=call_markers,
            call_starts=call_starts,
            marked_call_starts=frozenset(
                call_start
                for call_start in call_starts
                if any(marker in call_start for marker in call_markers)
            ),
            channel_starts=tuple(
                marker for call_format in formats for marker in call_format.channel_starts
            ),
            # without the white space around the markers, which the reader omits
            thought_start=reasoning.start.strip() if reasoning else "",
            thought_end=reasoning.end.strip() if reasoning else "",
            dropped_markers=(
                *(marker.strip() for marker in markers.encoded(self.dropped_markers)),
                *_bare_start(reasoning, call_starts),
            ),
            frame=self.frame,
            message_ends=tuple(map(markers.encode, self.message_ends)),
        )
        object.__setattr__(self, "markers", markers)
        object.__setattr__(self, "encoded", encoded)


def _bare_start(reasoning: ReasoningFormat | None, call_starts: Collection[str]) -> tuple[str, ...]:
    """The token that begins a longer thought marker. Gemma 4 sometimes writes this token twice, or
    alone, without any meaning.
    """
    start = reasoning.start.strip() if reasoning else ""
    if len(start) > 1 and is_marker(start) and start[0] not in call_starts:
        return (start[0],)
    return ()


PLAIN = ModelDialect()  # answers are plain text
