"""Finds the request that kills workers: after deaths without a new token, those that ran are tried one at a time. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from holdfast.messages.requests import RequestId

DEATHS_TOGETHER = 2  # so many in a row without a new token of anybody, and all that ran are tried alone
DEATHS_OF_ONE = 3  # so many without a new token of its own while others had some, and it is tried alone


class Isolation:
    """Counts the deaths that each request met without a new token of its own in between, and says who runs alone.

    A request that has run alone until it drew a token has passed. One that was the only one to run when its worker died, while it
    was tried, is to be refused.

    Who waits in a worker's queue counts as if it ran: only the worker knows better. So when one is found among those that never
    had a token while others had, the rest are believed again.
    """

    def __init__(self) -> None:
        self._deaths: dict[RequestId, int] = {}
        self._deaths_together = 0
        self._untried: list[RequestId] = []
        self._tries_all = False  # else only those that never had a token
        self.alone: RequestId | None = None  # who runs alone now

    @property
    def is_over(self) -> bool:
        """Whether nobody has to run alone any more."""
        return self.alone is None and not self._untried

    def worker_died(self, ran: Sequence[RequestId], *, grown: Collection[RequestId], had_progress: bool) -> RequestId | None:
        """A worker has died that ran these, oldest first; `grown`: who had a new token since the death before.

        had_progress: some request had a token or ended since then. Returns the request that is to be refused, if there is one.
        """
        self._deaths_together = 1 if had_progress else self._deaths_together + 1
        self._deaths = {each: 1 if each in grown else self._deaths.get(each, 0) + 1 for each in ran}
        alone, self.alone = self.alone, None
        if alone is not None:
            is_found = alone in ran and alone not in grown
            self._untried = [each for each in self._untried if each != alone and not (is_found and not self._tries_all)]
            return alone if is_found else None
        if self._deaths_together >= DEATHS_TOGETHER:
            self._untried, self._tries_all = sorted(ran, key=self._deaths.__getitem__, reverse=True), True
        elif self.is_over:
            self._tries_all = False
            self._untried = [each for each in ran if self._deaths[each] >= DEATHS_OF_ONE]
        return None

    def next_of(self, able: Collection[RequestId]) -> RequestId | None:
        """Let the next one run alone, of those that can be run; None when there is none left, and all may run."""
        self._untried = [each for each in self._untried if each in able]
        self.alone = self._untried.pop(0) if self._untried else None
        return self.alone

    def has_passed(self, request_id: RequestId) -> None:
        """Who runs alone has drawn a token, or ended."""
        assert self.alone == request_id
        self.alone = None
        self._deaths[request_id] = 0
