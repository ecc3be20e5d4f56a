"""What an engine holds at a moment, which nobody but a test asks."""

from __future__ import annotations

from holdfast.worker.engine.engine import Engine


def open_sequences(engine: Engine) -> int:
    """How many sequences are open."""
    return len(engine._sequences)


def live_bytes(engine: Engine) -> int:
    """What the live state of all of them takes now."""
    # by identity: sequences that decode together keep rows of one stack
    arrays = {
        id(array): array
        for sequence in engine._sequences.values()
        for array in sequence.live.arrays()
    }
    return sum(array.nbytes for array in arrays.values())
