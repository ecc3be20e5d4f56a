"""Corrupted stored state: blocks of a closed store, rewritten by its own writer so that checksums
match.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from holdfast.store.block import StoredBlock
from holdfast.store.store import BlockStore

Change = Callable[[Sequence[bytes]], tuple[bytes, ...]]  # parts, before and after


def rewrite(
    folder: Path,
    change: Change = tuple,
    *,
    kind: str = "kv",
    fingerprint: str = "a model",
    form: str | None = "",
) -> int:
    """Change the parts of every block of a kind, and the form that their headers state, unless it is
    empty; returns their number.
    """
    with BlockStore(folder, fingerprint=fingerprint) as store:
        blocks = [
            store.read(entry.block.key).result()
            for entry in store.entries()
            if entry.block.kind == kind
        ]
        whole = [store.read(entry.block.key).result() for entry in store.entries()]
        changed: list[StoredBlock] = []
        for stored in whole:
            parts = tuple(bytes(part) for part in stored.parts)
            stated = stored.form
            if stored.block.kind == kind:
                parts = change(parts)
                stated = stated if form == "" else form
            changed.append(replace(stored, parts=parts, form=stated))
        store.remove([block.key for block in reversed(whole)])
        assert store.flush()
        for block in changed:
            store.put(block)
        assert store.flush()
        assert len(store.entries()) == len(whole)
    return len(blocks)


def with_value(value: float, *, part: int = -1, at: int = -1) -> Change:
    """Replace one float32 value of one array."""

    def change(parts: Sequence[bytes]) -> tuple[bytes, ...]:
        numbers = np.frombuffer(parts[part], np.float32).copy()
        numbers[at] = value
        changed = list(parts)
        changed[part] = numbers.tobytes()
        return tuple(changed)

    return change


def with_values(value: float) -> Change:
    """Replace every float32 value."""

    def change(parts: Sequence[bytes]) -> tuple[bytes, ...]:
        return tuple(np.full(len(part) // 4, value, np.float32).tobytes() for part in parts)

    return change
