"""How one model writes reasoning and calls: what was found of it when it was loaded.

Pure data, the same for all requests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

# what rooms above need of it stands here
from holdfast.front.toolcalls.call_format import Call as Call
from holdfast.front.toolcalls.call_format import CallFormat as CallFormat
from holdfast.front.toolcalls.call_format import ChannelFormat
from holdfast.front.toolcalls.call_format import IdForm as IdForm
from holdfast.front.toolcalls.families import FAMILIES
from holdfast.front.toolcalls.markers import Markers, is_marker


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The markers between which a thought stands, as text.

    White space next to them belongs to the markers.
    """

    start: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDialect:
    """What an answer is read by: the markers that are tokens are one character each (`Markers`)."""

    forms: tuple[CallFormat, ...]  # of calls: the family's own first
    call_marks: frozenset[str]
    openers: tuple[str, ...]
    marked_openers: frozenset[str]  # those that hold a marker; the others are ordinary text
    channel_openers: tuple[str, ...]  # those of channels
    start: str  # of a thought; empty: it has no marker
    end: str
    dropped: tuple[str, ...]
    frame: tuple[str, str]  # around the visible answer; empty: there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDialect:
    """What a model's answers are made of. Without anything: text throughout."""

    family: str = ""  # a name in the table of families; empty: calls are not known
    calls: CallFormat | None = None
    read_too: tuple[CallFormat, ...] = ()  # other forms in which it may write calls
    reasoning: ReasoningFormat | None = None
    # markers, as text, that are single tokens of the model
    marker_ids: Mapping[str, int] = field(default_factory=dict)
    # stand around visible text and say nothing, such as <response> and </response>
    dropped_marks: tuple[str, ...] = ()
    # stands in ordinary text around the whole visible answer, such as <answer> and </answer>
    frame: tuple[str, str] = ("", "")
    markers: Markers = field(init=False, repr=False, compare=False)
    encoded: EncodedDialect = field(init=False, repr=False, compare=False)

    @property
    def is_plain(self) -> bool:
        """Whether answers are text throughout."""
        return (
            self.calls is None
            and self.reasoning is None
            and not self.dropped_marks
            and not self.frame[0]
        )

    def __post_init__(self) -> None:
        markers = Markers(self.marker_ids)
        reasoning = markers.encoded(self.reasoning)
        names = FAMILIES[self.family].read_too if self.family in FAMILIES else ()
        too = (FAMILIES[name].calls for name in names)
        known = () if self.calls is None else (self.calls, *self.read_too, *too)
        forms = tuple(markers.encoded(form) for form in known)
        marks = frozenset(mark for form in forms for mark in form.marks)
        openers = tuple(dict.fromkeys(opener for form in forms for opener in form.openers))
        # asked once for all: a protocol is slow to ask
        channels = (form for form in forms if isinstance(form, ChannelFormat))
        encoded = EncodedDialect(
            forms=forms,
            call_marks=marks,
            openers=openers,
            marked_openers=frozenset(
                opener for opener in openers if any(mark in opener for mark in marks)
            ),
            channel_openers=tuple(mark for form in channels for mark in form.channel_openers),
            start=reasoning.start.strip() if reasoning else "",
            end=reasoning.end.strip() if reasoning else "",
            dropped=(
                *(mark.strip() for mark in markers.encoded(self.dropped_marks)),
                *_bare_start(reasoning, openers),
            ),
            frame=self.frame,
        )
        object.__setattr__(self, "markers", markers)
        object.__setattr__(self, "encoded", encoded)


def _bare_start(reasoning: ReasoningFormat | None, openers: Collection[str]) -> tuple[str, ...]:
    """The token with which a longer marker of thoughts begins: Gemma 4 sometimes writes it twice,
    or alone, and means nothing.
    """
    start = reasoning.start.strip() if reasoning else ""
    if len(start) > 1 and is_marker(start) and start[0] not in openers:
        return (start[0],)
    return ()


PLAIN = ModelDialect()
