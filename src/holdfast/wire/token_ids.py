"""The ids of a prompt's tokens in one piece of memory, the same from the tokenizer to the device.

Leaf module.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator

import msgspec

TOKEN_ID_BYTES = 4
TOKEN_BYTES = 4
_SMALL_BYTES = 2048


class TokenIds(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Token ids, packed as little-endian uint32: 100,000 of them are sent, copied and compared in
    microseconds.

    A slice is packed too. Equal to other packed ids only, never to a tuple.
    """

    packed: bytes = b""

    @staticmethod
    def of(token_ids: Iterable[int]) -> TokenIds:
        """Pack ids. Raises OverflowError for one that does not fit."""
        if isinstance(token_ids, TokenIds):
            return token_ids
        ids = array("I", token_ids)
        assert ids.itemsize == TOKEN_ID_BYTES
        return TokenIds(_little_endian(ids.tobytes()))

    @staticmethod
    def joined(parts: Iterable[TokenIds]) -> TokenIds:
        """Several runs as one."""
        return TokenIds(b"".join([part.packed for part in parts]))

    @property
    def view(self) -> memoryview[int]:
        """The ids as integers, without a copy."""
        return memoryview(_little_endian(self.packed)).cast("I")

    def __len__(self) -> int:
        return len(self.packed) // TOKEN_ID_BYTES

    def __iter__(self) -> Iterator[int]:
        return iter(self.view)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self.view

    def __getitem__(self, part: slice) -> TokenIds:
        return TokenIds(_little_endian(self.view[part].tobytes()))

    def __add__(self, other: TokenIds) -> TokenIds:
        return TokenIds(self.packed + other.packed)


def _little_endian(packed: bytes) -> bytes:
    """From the order of the machine, and back: all that MLX runs on are little-endian."""
    if sys.byteorder == "little":
        return packed
    ids = array("I", packed)
    ids.byteswap()
    return ids.tobytes()


def common_tokens(ours: bytes | bytearray, theirs: bytes | bytearray) -> int:
    """How many tokens two runs begin with alike. 100,000 equal tokens cost 20 µs."""
    low, high = 0, min(len(ours), len(theirs))
    if ours[:high] == theirs[:high]:
        return high // TOKEN_BYTES
    while high - low > _SMALL_BYTES:
        middle = (low + high) // 2
        if ours[low:middle] == theirs[low:middle]:
            low = middle
        else:
            high = middle
    # The lowest bit in which two little-endian numbers differ lies in the first byte in which they
    # differ.
    differing = int.from_bytes(ours[low:high], "little") ^ int.from_bytes(
        theirs[low:high], "little"
    )
    lowest_bit = (differing & -differing).bit_length() - 1
    return (low + lowest_bit // 8) // TOKEN_BYTES


def token_at(packed: bytes, index: int) -> int:
    """One token of a run."""
    return int.from_bytes(packed[index * TOKEN_BYTES : (index + 1) * TOKEN_BYTES], "little")
