"""Numbers for people: bytes, and how many there are of something."""

from __future__ import annotations


def size_text(size: int) -> str:
    """A number of bytes with three digits or so, in binary units: 1536 is `1.5 KiB`."""
    shown = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if shown < 1024:
            return f"{size} bytes" if unit == "bytes" else f"{shown:.1f} {unit}"
        shown /= 1024
    return f"{shown:,.1f} TiB"


def count_text(number: int, one: str, many: str = "") -> str:
    """How many there are: `1 block`, `2 blocks`, `1,000 branches`. many: where the plural is not
    just an s.
    """
    return f"{number:,} {one if number == 1 else many or one + 's'}"
