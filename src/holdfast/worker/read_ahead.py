"""What was read ahead of its turn, so that it can be told how much of it was of use."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from holdfast.prefix.packed import common_tokens
from holdfast.store.block import TOKEN_BYTES
from holdfast.worker.sequences import LiveSequence

_MOST_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class _Run:
    """Tokens that were read ahead: those of a chain from `start` to its end."""

    tenant: str
    chain: bytes
    start: int


class ReadAheadRuns:
    """What was read ahead lately, and not begun from yet. For the figures alone."""

    def __init__(self) -> None:
        self._runs: deque[_Run] = deque(maxlen=_MOST_REMEMBERED)

    def add(self, sequence: LiveSequence) -> None:
        """A sequence has read its prompt ahead, or a part of it."""
        start = 0 if sequence.report is None else sequence.report.cached_tokens
        if sequence.read_to > start:
            chain = sequence.request.prompt_token_ids.packed[: sequence.read_to * TOKEN_BYTES]
            self._runs.append(_Run(sequence.request.tenant, chain, start))

    def take(self, chain: bytes | bytearray, *, tenant: str, cached_tokens: int) -> int:
        """How many of the first `cached_tokens` tokens of a chain were read ahead; they do not count again."""
        found = 0
        for run in tuple(self._runs):
            used = min(common_tokens(run.chain, chain), cached_tokens) - run.start if run.tenant == tenant else 0
            if used > 0:
                found += used
                self._runs.remove(run)
        return found
