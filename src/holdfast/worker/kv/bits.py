"""The forms of keys and values: not quantized, or quantized to some bits. Does not import MLX."""

from __future__ import annotations

from typing import Literal, TypeAlias

# not quantized, or quantized to the bits in `BITS`
KVBits: TypeAlias = Literal["native", "8", "8/4", "4"]
Bits: TypeAlias = Literal[8, 5, 4]
# Bits of keys and of values. Keys are the more sensitive ones: with 4 bits, the predictions of the
# bundled model diverge from native ones 3.6 times as much as with 5 (KL 2.5e-3 and 7.0e-4).
BITS: dict[KVBits, tuple[Bits, Bits]] = {"8": (8, 8), "8/4": (8, 4), "4": (5, 4)}
AUTO_WHEN_SHORT: KVBits = "8"  # what "auto" means when memory runs short


def form_of(bits: tuple[Bits, Bits] | None) -> KVBits:
    """The form of keys and values quantized to these bits; None: not quantized."""
    return next((form for form, each in BITS.items() if each == bits), "native")
