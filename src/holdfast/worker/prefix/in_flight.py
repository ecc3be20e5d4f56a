"""Who is reading what now, so that a second request with the same beginning waits for the first
instead of reading it again.

A request either reads or waits, never both; so nobody who is waited for waits, and no waits can go
round in a circle. Whoever stops reading, for whatever reason (done, cancelled, preempted),
withdraws, and that frees who waits for it. Who is freed asks anew what is stored and who is ahead,
one after the other: the first may become the reader for the others. Device thread only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.wire.requests import RequestId
from holdfast.wire.token_ids import TOKEN_BYTES, common_tokens


@dataclass(frozen=True, slots=True)
class InFlightPrefill:
    """A reader that will have the first `tokens` tokens stored, which are the asker's too, if it is
    not stopped.
    """

    request_id: RequestId
    tokens: int


@dataclass(slots=True)
class _Reader:
    tenant: str
    packed: bytes
    boundaries: tuple[int, ...] | None  # ascending; None: anywhere will do
    progress: int = 0

    def shared(self, packed: bytes) -> int:
        """How many tokens a request with these tokens could resume from when all is read."""
        tokens = common_tokens(self.packed, packed)
        if self.boundaries is None:
            return tokens
        usable = bisect_right(self.boundaries, tokens)
        return self.boundaries[usable - 1] if usable else 0


class InFlightPrefills:
    """Running sequences that still read known tokens, and requests that wait for them."""

    def __init__(self) -> None:
        self._readers: dict[RequestId, _Reader] = {}  # oldest first
        self._waiting: dict[RequestId, InFlightPrefill] = {}
        self._waits = 0

    @property
    def waiting(self) -> int:
        """Requests that wait now."""
        return len(self._waiting)

    @property
    def waits(self) -> int:
        """How often one has waited, since the start."""
        return self._waits

    def announce(
        self,
        request_id: RequestId,
        packed: bytes,
        *,
        tenant: str = "",
        have: int = 0,
        boundaries: Sequence[int] | None = None,
    ) -> None:
        """A sequence begins to read these packed tokens; it has the first `have` of them stored or
        restored already.

        boundaries: where it will leave states, if the model can only be resumed there. A request
        that waited does so no more.
        """
        assert request_id not in self._readers, "a request is read twice at once"
        self._waiting.pop(request_id, None)
        at = None if boundaries is None else tuple(sorted(boundaries))
        self._readers[request_id] = _Reader(tenant, packed, at, have)

    def progress(self, request_id: RequestId, tokens: int) -> tuple[RequestId, ...]:
        """The first `tokens` tokens of a reader are stored now; returns who has waited for that.

        Unknown readers are ignored.
        """
        reader = self._readers.get(request_id)
        if reader is None:
            return ()
        reader.progress = max(reader.progress, tokens)
        return self._free(
            [
                who
                for who, ahead in self._waiting.items()
                if ahead.request_id == request_id and ahead.tokens <= tokens
            ]
        )

    def withdraw(self, request_id: RequestId) -> tuple[RequestId, ...]:
        """A request neither reads nor waits any more; returns who has waited for it.

        Unknown requests are ignored.
        """
        self._waiting.pop(request_id, None)
        if self._readers.pop(request_id, None) is None:
            return ()
        return self._free(
            [who for who, ahead in self._waiting.items() if ahead.request_id == request_id]
        )

    def ahead_of(
        self, packed: bytes, have: int, *, tenant: str = "", limit: int | None = None
    ) -> InFlightPrefill | None:
        """Who will have most of these tokens stored: more than the `have` that the asker begins
        from now, and is not behind it.

        limit: the most tokens that the asker can use; all but its last one, as a rule. Of equals,
        the one that is furthest.
        """
        if limit is not None:
            packed = packed[: max(0, limit) * TOKEN_BYTES]
        best: tuple[int, int, RequestId] | None = None
        for request_id, reader in self._readers.items():
            if reader.tenant != tenant or reader.progress < have:
                continue
            tokens = reader.shared(packed)
            # what it has stored and the asker does not find is gone again
            is_coming = tokens > max(have, reader.progress)
            if is_coming and (best is None or (tokens, reader.progress) > best[:2]):
                best = (tokens, reader.progress, request_id)
        return None if best is None else InFlightPrefill(best[2], best[0])

    def wait(self, request_id: RequestId, ahead: InFlightPrefill) -> None:
        """A request waits for what `ahead_of` has just found."""
        assert request_id not in self._readers, "a reader waits"
        assert ahead.request_id in self._readers, "nobody reads what is waited for"
        assert self._readers[ahead.request_id].progress < ahead.tokens, (
            "what is waited for is there"
        )
        self._waiting[request_id] = ahead
        self._waits += 1

    def _free(self, waiting: list[RequestId]) -> tuple[RequestId, ...]:
        for request_id in waiting:
            del self._waiting[request_id]
        return tuple(waiting)

    def check_invariants(self) -> None:
        """Assert that nobody waits for a waiting one, for nobody, or for what is there."""
        assert not self._readers.keys() & self._waiting.keys(), "a request reads and waits"
        for ahead in self._waiting.values():
            assert ahead.request_id in self._readers, "a request waits for nobody"
            assert self._readers[ahead.request_id].progress < ahead.tokens, (
                "a request waits for what is there"
            )
