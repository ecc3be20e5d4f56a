"""How one model writes reasoning and calls: what was found of it when it was loaded. Pure data, the same for all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

IdForm: TypeAlias = Literal["random", "alnum9", "function_number", "number", "client"]
"""What a family's call ids look like: `call_` and 24 characters, 9 characters, `functions.NAME:N`, `N`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningFormat:
    """The markers between which a thought stands, as text. White space next to them belongs to the markers."""

    start: str
    end: str


class Call(NamedTuple):
    """A call of a tool, whole."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class CallFormat(Protocol):
    """How a family writes calls: one of the mechanisms of `parsing.formats`, with the family's data."""

    @property
    def id_form(self) -> IdForm:
        """What its call ids look like."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """All its markers, as text; those that are single tokens of the model are matched as tokens only."""
        ...

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them, for templates that leave them out."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDialect:
    """What a model's answers are made of. Without anything: text throughout."""

    family: str = ""  # a name in the table of families; empty: calls are not known
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    marker_ids: Mapping[str, int] = field(default_factory=dict)  # markers, as text, that are single tokens of the model


PLAIN = ModelDialect()
