"""Which token made which characters of the answer: for offsets, and to cut tokens where the text is
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.wire.events import TokenLogprob


@dataclass(slots=True)
class PlacedToken:
    """A token whose text is not shown yet.

    `start` and `end` are places in the answer, `emitted` the text between them.

    A token that is a part of a character has the place of that character. Until the character is
    certain, `end` is `start`.
    """

    token_id: int
    start: int
    end: int
    emitted: str
    logprob: TokenLogprob | None


def spread(text: str, tokens: Sequence[PlacedToken], raws: Sequence[bytes], *, start: int) -> bool:
    """Place tokens that became certain together.

    False, and nothing done, when their bytes are not those of the text.

    start: the place of the text in the answer. raws: the bytes of each of the tokens.
    """
    data = text.encode()
    if b"".join(raws) != data:
        return False
    at, begun = 0, 0
    for token, raw in zip(tokens, raws, strict=True):
        first = begun - 1 if raw and _continues(raw[0]) else begun
        at, begun = at + len(raw), begun + sum(not _continues(byte) for byte in raw)
        token.start, token.end, token.emitted = start + first, start + begun, text[first:begun]
    return True


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80
