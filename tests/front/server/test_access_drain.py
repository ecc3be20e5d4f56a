from __future__ import annotations

import pytest

from holdfast.errors import ServerStopping
from holdfast.front.server.access import Drain
from holdfast.front.server.problem import problem_of

READS = [("GET", "/health"), ("GET", "/v1/responses/r"), ("HEAD", "/"), ("OPTIONS", "/v1/models")]
ENDS = [("DELETE", "/admin/requests/r"), ("POST", "/v1/responses/r/cancel")]


@pytest.mark.parametrize(("method", "path"), [*READS, *ENDS, ("POST", "/v1/chat/completions")])
def test_everything_is_accepted_before_the_drain(method: str, path: str) -> None:
    drain = Drain()
    assert not drain.is_on
    assert drain.refusal(method, path) is None
    assert drain.seconds_left == 0.0


@pytest.mark.parametrize(("method", "path"), [*READS, *ENDS])
def test_reads_and_cancellations_are_allowed_during_the_drain(method: str, path: str) -> None:
    drain = Drain()
    drain.begin(10.0)
    assert drain.refusal(method, path) is None


@pytest.mark.parametrize(
    ("limit", "passed", "retry_after"), [(10.0, 4.0, "8"), (0.0, 1.0, "2"), (3600.0, 0.0, "60")]
)
def test_new_work_is_refused_with_retry_after(
    limit: float, passed: float, retry_after: str
) -> None:
    now = [1000.0]
    drain = Drain(clock=lambda: now[0])
    drain.begin(limit)
    now[0] += passed
    refusal = drain.refusal("POST", "/v1/chat/completions")
    assert isinstance(refusal, ServerStopping)
    problem = problem_of(refusal)
    assert (problem.status, problem.code, problem.headers["retry-after"]) == (
        503,
        "server_stopping",
        retry_after,
    )
    assert f"try again in {retry_after} s" in problem.message
