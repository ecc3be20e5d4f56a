"""A tool's definition that is kept, with what has been made of it: agents send the same ones with
every turn.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import pickle
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

T = TypeVar("T")
_MOST_MADE = 6  # derived values kept per definition, such as its hash, its JSON and its packed form
_MOST_UNPACKED = 128
# a version of marshal's in which the same content is always written the same
_WITHOUT_REFERENCES = 2


class KeptTool(dict[str, Any]):
    """A definition, OpenAI-shaped, that nobody changes. A copy of it is a plain dictionary."""

    __slots__ = ("_made",)

    def __init__(self, definition: Mapping[str, Any]) -> None:
        super().__init__(definition)
        self._made: dict[Hashable, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def made_once(tool: KeptTool, kind: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of a definition, which is the same each time; `kind` says what that is.

    Any thread may call it.
    """
    if kind in tool._made:
        return cast(T, tool._made[kind])
    made = make()
    if len(tool._made) < _MOST_MADE:
        tool._made[kind] = made
    return made


def packed_tool(tool: KeptTool) -> bytes:
    """The definition as bytes, for `unpacked_tool` in another process. Any thread may call it."""
    return made_once(tool, "packed", lambda: pickle.dumps(dict(tool), pickle.HIGHEST_PROTOCOL))


@functools.lru_cache(maxsize=_MOST_UNPACKED)
def unpacked_tool(packed: bytes) -> KeptTool:
    """The definition again, and the same object for the same bytes, so that what is made of it is
    made once here too.
    """
    return KeptTool(pickle.loads(packed))


def exact_key(definition: Any, *, tenant: str) -> bytes | None:
    """A hash of a definition as it came, its order and the types of its values included.

    None: it has none.

    Written by `marshal`, which takes a fifth of the time that sorted JSON does.
    """
    try:
        written = marshal.dumps((tenant, definition), _WITHOUT_REFERENCES)
    except ValueError:  # not what JSON brings, or nested too deeply
        return None
    return hashlib.blake2b(written, digest_size=16, person=b"exact").digest()
