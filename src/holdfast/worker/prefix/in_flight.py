"""Tracks the prompts that are being prefilled: a second request with the same prefix waits for the
first.

A request is either a reader, which prefills, or it waits for a reader; so no reader waits, and
waits cannot form a cycle. A reader that stops for any reason (done, cancelled, preempted)
withdraws, which releases the requests that wait for it. One after the other, these look up the
stored tokens and the readers again: the first one may become the reader for the others. Device
thread only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.wire.requests import TOKEN_BYTES, RequestId, common_tokens


@dataclass(frozen=True, slots=True)
class InFlightPrefill:
    """A request whose prefill is worth waiting for.

    It will store the first `tokens` tokens of the prompt of the request that waits.
    """

    request_id: RequestId
    tokens: int


@dataclass(slots=True)
class _Reader:
    tenant: str
    packed: bytes  # the tokens of its prompt
    boundaries: tuple[int, ...] | None  # ascending; None: can resume anywhere
    progress: int = 0  # tokens stored so far

    def shared_tokens(self, packed: bytes) -> int:
        """How many of the first tokens of `packed` can be reused when the reader has finished."""
        tokens = common_tokens(self.packed, packed)
        if self.boundaries is None:
            return tokens
        usable = bisect_right(self.boundaries, tokens)
        return self.boundaries[usable - 1] if usable else 0


class InFlightPrefills:
    """The requests that prefill (readers), and the requests that wait for them."""

    def __init__(self) -> None:
        self._readers: dict[RequestId, _Reader] = {}  # oldest first
        self._waiting: dict[RequestId, InFlightPrefill] = {}
        self._waits = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait now."""
        return len(self._waiting)

    @property
    def waits(self) -> int:
        """The number of requests that have waited since the start."""
        return self._waits

    def announce(
        self,
        request_id: RequestId,
        packed: bytes,
        *,
        tenant: str = "",
        stored_tokens: int = 0,
        boundaries: Sequence[int] | None = None,
    ) -> None:
        """Register a sequence, which no longer waits, as a reader that prefills these packed tokens
        after the first `stored_tokens`.

        boundaries: the positions at which it will store states, if the model can resume only there.
        """
        assert request_id not in self._readers, "a request is announced twice"
        self._waiting.pop(request_id, None)
        ascending = None if boundaries is None else tuple(sorted(boundaries))
        self._readers[request_id] = _Reader(tenant, packed, ascending, stored_tokens)

    def record_progress(self, request_id: RequestId, tokens: int) -> tuple[RequestId, ...]:
        """Record that the first `tokens` tokens of a request that prefills are stored.

        Returns the requests that need not wait any longer. An unknown request id is ignored.
        """
        reader = self._readers.get(request_id)
        if reader is None:
            return ()
        reader.progress = max(reader.progress, tokens)
        return self._end_waits(request_id, tokens=tokens)

    def withdraw(self, request_id: RequestId) -> tuple[RequestId, ...]:
        """Remove a request, which no longer prefills or waits; returns the requests that this
        releases.

        Unknown requests are ignored.
        """
        self._waiting.pop(request_id, None)
        if self._readers.pop(request_id, None) is None:
            return ()
        return self._end_waits(request_id)

    def ahead_of(
        self, packed: bytes, stored_tokens: int, *, tenant: str = "", limit: int | None = None
    ) -> InFlightPrefill | None:
        """The reader that will store the most of the tokens `packed` of a request; None if no
        reader is useful.

        A useful reader will store more than the `stored_tokens` tokens that the request finds in the cache,
        and its progress is at least `stored_tokens`. Of equally useful readers, the one with the most
        progress is returned. limit: how many of its tokens the request can reuse at most; usually
        all except the last one.
        """
        if limit is not None:
            packed = packed[: max(0, limit) * TOKEN_BYTES]
        best: tuple[int, int, RequestId] | None = None  # tokens it will store, progress, id
        for request_id, reader in self._readers.items():
            if reader.tenant != tenant or reader.progress < stored_tokens:
                continue
            tokens = reader.shared_tokens(packed)
            # tokens that the reader has stored but the asking request does not find were evicted
            is_coming = tokens > max(stored_tokens, reader.progress)
            if is_coming and (best is None or (tokens, reader.progress) > best[:2]):
                best = (tokens, reader.progress, request_id)
        return None if best is None else InFlightPrefill(best[2], best[0])

    def wait(self, request_id: RequestId, prefill: InFlightPrefill) -> None:
        """Let a request wait for the reader that `ahead_of` has just returned."""
        assert request_id not in self._readers, "a reader waits"
        assert prefill.request_id in self._readers, "the reader does not exist"
        assert self._readers[prefill.request_id].progress < prefill.tokens, (
            "the awaited tokens are stored already"
        )
        self._waiting[request_id] = prefill
        self._waits += 1

    def _end_waits(
        self, request_id: RequestId, *, tokens: float = math.inf
    ) -> tuple[RequestId, ...]:
        """End the waits for at most `tokens` tokens of a request, and return who waited."""
        waiting_ids = tuple(
            waiting_id
            for waiting_id, prefill in self._waiting.items()
            if prefill.request_id == request_id and prefill.tokens <= tokens
        )
        for waiting_id in waiting_ids:
            del self._waiting[waiting_id]
        return waiting_ids

    def check_invariants(self) -> None:
        """Assert that every waiting request waits for a reader and for tokens that are not stored
        yet.
        """
        assert not self._readers.keys() & self._waiting.keys(), "a request prefills and waits"
        for prefill in self._waiting.values():
            assert prefill.request_id in self._readers, "a request waits for no reader"
            assert self._readers[prefill.request_id].progress < prefill.tokens, (
                "a request waits for stored tokens"
            )
