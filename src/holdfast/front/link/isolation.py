"""Finds the request that kills workers: requests that met too many deaths are tried one at a time.

Pure.

A worker that dies does not say of what. So each death is noted with all requests that ran and the
tokens that each of them drew in that worker's life. Three rules turn this record into suspects, and
no rule forgets a death because tokens came after it: a request that kills after two tokens makes
progress in every life.

A suspect then runs alone. If the worker dies meanwhile, that request is refused, and the deaths
that it met are explained: they no longer count against the others. If it draws more tokens than it
has been dying after, it has passed. Each further trial of the same request is twice as long. A
suspect whose stream is not read cannot be tried: it waits, and the others run meanwhile. It never
runs beside them before it has passed. So the number of deaths that one request can cause is
bounded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from holdfast.wire.requests import RequestId

# in a row in which no request got a new token: then every request that ran is tried alone
DEATHS_TOGETHER = 2
DEATHS_OF_ONE = 3  # of one request after fewer than FEW_TOKENS tokens of its own: it is tried
DEATHS_OF_A_LIFE = 12  # of one request, however many tokens it drew: it is tried
FEW_TOKENS = 8


class Isolation:
    """Records which requests ran when workers died, and says which request has to run alone.

    A request in the worker's queue counts as if it ran, because only the worker knows better. It is
    tried after those that drew tokens, and believed again as soon as another request is found
    guilty of the deaths that it met.
    """

    def __init__(self) -> None:
        # unexplained ones: what each request drew in that life, oldest first
        self._deaths: list[dict[RequestId, int]] = []
        self._deaths_together = 0
        self._passed: dict[RequestId, int] = {}  # how many trials each request has passed
        self._untried: list[RequestId] = []
        self.alone: RequestId | None = None  # the request that runs alone now

    @property
    def is_over(self) -> bool:
        """Whether no request has to run alone, now or later."""
        return self.alone is None and not self._untried

    def is_untried(self, request_id: RequestId) -> bool:
        """Whether the request still has to run alone before it may run beside others."""
        return request_id in self._untried

    @property
    def tokens_to_pass(self) -> int:
        """How many new tokens the request that runs alone has to draw: more than twice those of its
        last life.
        """
        assert self.alone is not None
        drawn = [death[self.alone] for death in self._deaths if self.alone in death]
        last_life = drawn[-1] if drawn else 0
        return (2 * last_life + 1) << self._passed.get(self.alone, 0)

    def worker_died(
        self,
        drawn: Mapping[RequestId, int],
        *,
        had_progress: bool,
        open_requests: Collection[RequestId],
    ) -> RequestId | None:
        """A worker has died. Returns the request that is to be refused, if there is one.

        drawn: the new tokens in this life of each request that ran, oldest request first.
        had_progress: some request drew a token or ended in this life.
        open_requests: all that have not ended; the others are forgotten.
        """
        self._forget_all_but(open_requests)
        self._deaths.append(dict(drawn))
        self._deaths_together = 1 if had_progress else self._deaths_together + 1
        alone = self.alone
        self.alone = None
        if alone is not None and alone in drawn:
            self._deaths = [death for death in self._deaths if alone not in death]
            self._untried = [each for each in self._untried if self._is_suspect(each)]
            return alone
        suspects = (
            drawn if self._deaths_together >= DEATHS_TOGETHER else filter(self._is_suspect, drawn)
        )
        self._untried = sorted(
            dict.fromkeys([*self._untried, *suspects]), key=self._likelihood_order
        )
        return None

    def next_of(self, able: Collection[RequestId]) -> RequestId | None:
        """Let the next suspect among `able` run alone; None when there is none, and all who are not
        suspects may run.
        """
        self.alone = next((each for each in self._untried if each in able), None)
        if self.alone is not None:
            self._untried.remove(self.alone)
        return self.alone

    def has_passed(self, request_id: RequestId) -> None:
        """The request that runs alone has drawn `tokens_to_pass`, or has ended."""
        assert self.alone == request_id
        self.alone = None
        self._passed[request_id] = self._passed.get(request_id, 0) + 1
        for death in self._deaths:
            death.pop(request_id, None)

    def interrupt_trial(self) -> None:
        """The request that runs alone cannot go on, because its stream is not read.

        It is tried again once it can.
        """
        assert self.alone is not None
        self._untried.append(self.alone)
        self.alone = None

    def _is_suspect(self, request_id: RequestId) -> bool:
        lives = [death[request_id] for death in self._deaths if request_id in death]
        short_lives = sum(tokens < FEW_TOKENS for tokens in lives)
        return short_lives >= DEATHS_OF_ONE or len(lives) >= DEATHS_OF_A_LIFE

    def _likelihood_order(self, request_id: RequestId) -> tuple[int, bool, int]:
        """Sorts the likeliest first: never passed a trial, drew tokens (else it may have been
        queued), and few of them.
        """
        tokens = sum(death.get(request_id, 0) for death in self._deaths)
        return self._passed.get(request_id, 0), tokens == 0, tokens

    def _forget_all_but(self, open_requests: Collection[RequestId]) -> None:
        self._deaths = [
            death for death in self._deaths if not death.keys().isdisjoint(open_requests)
        ]
        self._passed = {
            each: times for each, times in self._passed.items() if each in open_requests
        }
        self._untried = [each for each in self._untried if each in open_requests]
