"""The steps that unpack codes of 5 bits with integer operations, for numpy and for MLX. Imports
nothing.
"""

from __future__ import annotations

# A 64-bit integer contains eight codes in its lowest 40 bits. Three steps give each code a byte of
# its own: the first moves the upper four codes apart from the lower four, the next two do the same
# with pairs and with single codes. A step consists of the mask of the bits that stay, the mask of
# the bits that are shifted left, and the number of bits by which these are shifted.
FIELDS_OF_FIVE_BITS = (
    (0x00000000000FFFFF, 0x000000FFFFF00000, 12),
    (0x000003FF000003FF, 0x000FFC00000FFC00, 6),
    (0x001F001F001F001F, 0x03E003E003E003E0, 3),
)
