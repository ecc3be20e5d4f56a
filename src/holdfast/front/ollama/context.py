"""`context` of /api/generate: the conversation so far, which a client hands back as it got it to go
on from there.

In Ollama these are token ids. Here they are the compressed text of the turns, so that what goes on
is an ordinary conversation, rendered by the template, its earlier answers put back as the tokens
that were generated.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from holdfast.front.server.problem import RequestRefused


class ContextTurn(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One turn."""

    role: Literal["system", "user", "assistant"]
    content: str
    reasoning_content: str = ""


_turns = msgspec.json.Decoder(list[ContextTurn])


def packed(turns: Sequence[dict[str, Any]]) -> list[int]:
    """The turns as numbers from 0 to 255."""
    return list(zlib.compress(msgspec.json.encode(turns)))


def unpacked(numbers: Sequence[int], *, limit_bytes: int) -> tuple[dict[str, Any], ...]:
    """The turns again.

    Raises RequestRefused for what `packed` has not made, or more than so many bytes.
    """
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(bytes(numbers), limit_bytes)
        if not unpacking.eof:
            raise ValueError("it is cut, or too long")
        return tuple(msgspec.to_builtins(turn) for turn in _turns.decode(text))
    except (ValueError, zlib.error, msgspec.DecodeError):
        raise RequestRefused(
            "`context`: this is none that an answer of this server has brought", field="context"
        ) from None
