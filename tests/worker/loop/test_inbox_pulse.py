from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.loop.inbox import PAGING_FAULTS, Pulse


def test_a_worker_loads_first_and_then_works_and_rests() -> None:
    pulse = Pulse(interval_seconds=1.0)
    assert pulse.beat(elapsed_seconds=0.0, page_faults=0).activity == "loading"
    pulse.work(0.5)
    working = pulse.beat(elapsed_seconds=1.0, page_faults=0)
    assert (working.activity, working.expected_seconds, working.lasting_seconds) == (
        "working",
        0.5,
        0.0,
    )
    pulse.rest()
    assert pulse.beat(elapsed_seconds=1.0, page_faults=0).activity == "resting"


def test_the_duration_restarts_with_each_piece_of_work() -> None:
    pulse = Pulse(interval_seconds=1.0)
    pulse.work(0.5)
    assert [pulse.beat(elapsed_seconds=1.0, page_faults=0).lasting_seconds for _ in range(3)] == [
        0.0,
        1.0,
        2.0,
    ]
    pulse.work(0.5)  # equal, but another piece of work
    assert pulse.beat(elapsed_seconds=1.0, page_faults=0).lasting_seconds == 0.0


def test_time_while_the_process_was_stopped_does_not_count() -> None:
    pulse = Pulse(interval_seconds=1.0)
    pulse.beat(elapsed_seconds=0.0, page_faults=0)
    assert pulse.beat(elapsed_seconds=3600.0, page_faults=0).lasting_seconds == 1.0


def test_time_for_paging_memory_in_does_not_count() -> None:
    pulse = Pulse(interval_seconds=1.0)
    for _ in range(100):
        assert pulse.beat(elapsed_seconds=1.0, page_faults=PAGING_FAULTS).lasting_seconds == 0.0


def test_time_while_other_processes_had_the_cores_does_not_count() -> None:
    pulse = Pulse(interval_seconds=1.0)
    for beats in range(1, 100):
        beat = pulse.beat(elapsed_seconds=1.0, page_faults=0, share_of_core=0.25)
        assert beat.lasting_seconds == 0.25 * beats


@given(gaps=st.lists(st.floats(0.0, 100.0), max_size=50))
def test_work_never_seems_longer_than_it_is(gaps: list[float]) -> None:
    pulse = Pulse(interval_seconds=1.0)
    for made, gap in enumerate(gaps, start=1):
        lasting = pulse.beat(elapsed_seconds=gap, page_faults=0).lasting_seconds
        assert lasting <= min(made, sum(gaps[:made])) + 1e-9
