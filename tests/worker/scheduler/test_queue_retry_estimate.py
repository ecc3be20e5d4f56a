from __future__ import annotations

from holdfast.worker.scheduler.queue import RetryEstimate


def test_the_estimate_follows_the_time_between_two_ends() -> None:
    places = RetryEstimate()
    for _ in range(30):
        places.learn(seconds=5.0, ends=0)
        places.learn(seconds=5.0, ends=1)
    assert 9.0 < places.seconds < 10.5
    for _ in range(30):
        places.learn(seconds=8.0, ends=2)
    assert 3.9 < places.seconds < 4.5


def test_the_estimate_grows_while_no_request_ends() -> None:
    places = RetryEstimate()
    for _ in range(20):
        places.learn(seconds=1.0, ends=0)
    assert places.seconds == 20.0


def test_the_estimate_stays_between_a_second_and_a_minute() -> None:
    quick, slow = RetryEstimate(), RetryEstimate()
    for _ in range(30):
        quick.learn(seconds=0.01, ends=4)
        slow.learn(seconds=1000.0, ends=1)
    assert quick.seconds == 1.0
    assert slow.seconds == 60.0
