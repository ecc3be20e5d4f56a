"""What a family's way to write calls has to offer: the protocol of the mechanisms in this room.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from holdfast.front.toolcalls.call_parts import CallParts
from holdfast.front.toolcalls.incoming import Incoming, Waiting

IdForm: TypeAlias = Literal["random", "alnum9", "function_number", "number", "client"]
"""What a family's call ids look like: `call_` and 24 characters, 9 characters, `functions.NAME:N`,
`N`.
"""


class Call(NamedTuple):
    """A call of a tool, whole."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


class CallFormat(Protocol):
    """How a family writes calls: a frozen dataclass, one of the mechanisms of this room with the
    family's data.

    Its strings hold markers as text. For one model they are encoded (`Markers.encoded`): markers
    that are single tokens of the model are one character each, in the data as in what is read, so a
    mechanism matches strings and minds nothing else.
    """

    @property
    def id_form(self) -> IdForm:
        """What its call ids look like."""
        ...

    @property
    def marks(self) -> Sequence[str]:
        """All its markers, as text; those that are single tokens of the model are matched as tokens
        only.
        """
        ...

    @property
    def openers(self) -> Sequence[str]:
        """What calls may begin with.

        One that is none of the marks is ordinary text, and opens only at a line's beginning.
        """
        ...

    def write(self, calls: Sequence[Call]) -> str:
        """The calls as the model would write them, for templates that leave them out."""
        ...

    def read(self, source: Incoming, parts: CallParts) -> Waiting[bool]:
        """Read calls from an opener on, at which `source` stands, up to behind the markup.

        False: no call stands here, and nothing was put out; then the opener is text, and reading
        goes on behind it. A call's text may be dropped (`drop_read`) once it is begun, not before.
        One that is begun is ended.
        """
        ...


@runtime_checkable
class ChannelFormat(CallFormat, Protocol):
    """A family that writes its text and its reasoning in channels too.

    `read` gives them out with `CallParts.say`.
    """

    @property
    def channel_openers(self) -> Sequence[str]:
        """Those openers behind which text and reasoning may stand: they are followed whether or not
        calls are to be read.
        """
        ...
