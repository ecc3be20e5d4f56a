from __future__ import annotations

from holdfast.residency.supervisor import LONGEST_BACKOFF_SECONDS, backoff_seconds


def test_the_first_restart_is_at_once_and_the_wait_doubles_up_to_a_limit() -> None:
    assert [backoff_seconds(failures) for failures in (1, 2, 3, 4, 5)] == [0.0, 1.0, 2.0, 4.0, 8.0]
    assert backoff_seconds(1000) == LONGEST_BACKOFF_SECONDS
