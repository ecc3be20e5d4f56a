"""How codes of 5 bits are unpacked with integer operations. Imports nothing."""

from __future__ import annotations

# Steps that spread eight 5-bit codes (40 bits) over eight bytes: the mask of the bits that stay,
# the mask of the bits that move up, and by how many bits.
FIELDS_OF_FIVE_BITS = (
    (0x00000000000FFFFF, 0x000000FFFFF00000, 12),
    (0x000003FF000003FF, 0x000FFC00000FFC00, 6),
    (0x001F001F001F001F, 0x03E003E003E003E0, 3),
)
