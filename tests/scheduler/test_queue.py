from __future__ import annotations

from holdfast.scheduler.queue import PlaceEstimate, WaitingQueue
from holdfast.scheduler.sequence import Sequence


def sequence(order: int) -> Sequence:
    return Sequence(request_id=str(order), order=order, prompt_tokens=1, max_tokens=1, submitted_after_step=0)


def test_who_came_first_is_the_head() -> None:
    queue = WaitingQueue()
    for order in (3, 4, 5):
        queue.join(sequence(order))
    assert queue.pop_head().order == 3
    assert queue.head.order == 4
    assert len(queue) == 2


def test_who_was_preempted_is_the_head_again() -> None:
    queue = WaitingQueue()
    queue.join(sequence(7))
    queue.rejoin(sequence(3))
    queue.rejoin(sequence(2))
    assert [each.order for each in queue] == [2, 3, 7]
    queue.check_invariants()


def test_anyone_can_leave() -> None:
    queue, middle = WaitingQueue(), sequence(2)
    for each in (sequence(1), middle, sequence(3)):
        queue.join(each)
    queue.remove(middle)
    assert [each.order for each in queue] == [1, 3]


def test_the_estimate_follows_the_time_between_two_ends() -> None:
    places = PlaceEstimate()
    for _ in range(30):
        places.observe(seconds=5.0, ends=0)
        places.observe(seconds=5.0, ends=1)
    assert 9.0 < places.seconds < 10.5
    for _ in range(30):
        places.observe(seconds=8.0, ends=2)
    assert 3.9 < places.seconds < 4.5


def test_the_estimate_grows_while_nobody_ends() -> None:
    places = PlaceEstimate()
    for _ in range(20):
        places.observe(seconds=1.0, ends=0)
    assert places.seconds == 20.0


def test_the_estimate_stays_between_a_second_and_a_minute() -> None:
    quick, slow = PlaceEstimate(), PlaceEstimate()
    for _ in range(30):
        quick.observe(seconds=0.01, ends=4)
        slow.observe(seconds=1000.0, ends=1)
    assert quick.seconds == 1.0
    assert slow.seconds == 60.0
