"""The state held by an engine, for tests only."""

from __future__ import annotations

from holdfast.worker.engine.engine import Engine


def open_sequences(engine: Engine) -> int:
    """The number of open sequences."""
    return len(engine._sequences)


def live_bytes(engine: Engine) -> int:
    """The bytes of all live states."""
    # by identity: sequences that decode together keep rows of one stack
    arrays = {
        id(array): array
        for sequence in engine._sequences.values()
        for array in sequence.live.arrays()
    }
    return sum(array.nbytes for array in arrays.values())
