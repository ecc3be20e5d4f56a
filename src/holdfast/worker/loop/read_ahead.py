"""What was read ahead of its turn, so that it can be told how much of it was of use."""

from __future__ import annotations

from collections import deque

from holdfast.wire.commands import ReadAheadRun
from holdfast.wire.token_ids import common_tokens
from holdfast.worker.loop.sequences import LiveSequence

_MOST_REMEMBERED = 32


class ReadAheadRuns:
    """What was read ahead lately, and not begun from yet. For the figures alone."""

    def __init__(self) -> None:
        self._runs: deque[ReadAheadRun] = deque(maxlen=_MOST_REMEMBERED)

    def add(self, sequence: LiveSequence) -> None:
        """A sequence has read its prompt ahead, or a part of it."""
        start = 0 if sequence.report is None else sequence.report.cached_tokens
        if sequence.read_to > start:
            request = sequence.request
            token_ids = request.prompt_token_ids[: sequence.read_to]
            self.note(ReadAheadRun(tenant=request.tenant, token_ids=token_ids, start=start))

    def note(self, run: ReadAheadRun) -> None:
        """Remember what was read ahead, by this worker or an earlier one."""
        self._runs.append(run)

    def take(self, chain: bytes | bytearray, *, tenant: str, cached_tokens: int) -> int:
        """How many of the first `cached_tokens` tokens of a chain were read ahead; they do not
        count again.

        Nor does a run that the request reads itself because it is no longer cached.
        """
        found = 0
        for run in tuple(self._runs):
            common = common_tokens(run.token_ids.packed, chain) if run.tenant == tenant else 0
            if common > run.start:
                found += max(0, min(common, cached_tokens) - run.start)
                self._runs.remove(run)
        return found
