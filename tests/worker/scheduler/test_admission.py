from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.errors import TooLargeForMemory
from holdfast.worker.scheduler.admission import KvReservations
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts

COSTS = SequenceCosts(kv_bytes_per_token=10, fixed_bytes_per_sequence=100, reserve_step_tokens=16)


def reservations(*, budget_bytes: int = 2000, expected_output_tokens: int = 8) -> KvReservations:
    return KvReservations(
        COSTS, budget_bytes=budget_bytes, expected_output_tokens=expected_output_tokens
    )


def sequence(
    order: int = 1, *, prompt_tokens: int = 20, max_tokens: int = 100
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id=str(order),
        order=order,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        costs=COSTS,
    )


def test_capacities_are_whole_steps() -> None:
    assert [reservations().capacity_for(tokens) for tokens in (1, 16, 17)] == [16, 16, 32]


def test_a_sequence_costs_its_capacity_plus_its_fixed_part() -> None:
    assert COSTS.bytes_for(32) == 420
    with_draft = replace(COSTS, draft_bytes_per_token=3)
    assert with_draft.bytes_for(32) == 420 + 3 * 32
    # live states contain tokens of the model, but not of the draft model
    held_bytes = COSTS.bytes_for(32) - COSTS.bytes_for(32, held_tokens=8)
    assert with_draft.bytes_for(32, held_tokens=8) == 420 + 3 * 32 - held_bytes


def test_admission_reserves_the_expected_not_the_longest_answer() -> None:
    books, entering = reservations(), sequence()
    books.reserve(entering, step=0)
    assert entering.capacity_tokens == 32
    assert books.reserved_bytes == entering.reserved_bytes == 420


def test_admission_reserves_no_more_than_the_longest_answer() -> None:
    books, entering = reservations(expected_output_tokens=1000), sequence(max_tokens=5)
    books.reserve(entering, step=0)
    assert entering.capacity_tokens == 32


def test_a_request_that_cannot_run_alone_is_refused_with_numbers() -> None:
    with pytest.raises(TooLargeForMemory) as caught:
        reservations().check_fits_alone(COSTS, final_tokens=200)
    assert caught.value.needed_bytes == 2180
    assert caught.value.budget_bytes == 2000


def test_a_request_that_fits_exactly_is_accepted() -> None:
    reservations(budget_bytes=2180).check_fits_alone(COSTS, final_tokens=200)


@pytest.mark.parametrize(
    ("budget_bytes", "tokens"),
    [
        (100 + 10 * 320, 320),
        (100 + 10 * 320 - 1, 304),  # capacities are whole steps
        (100 + 10 * 1024, 1000),  # as much as the model supports
        (99, 16),  # which is then refused with a reason
    ],
)
def test_the_longest_sequence_is_the_largest_that_fits_alone(
    budget_bytes: int, tokens: int
) -> None:
    longest = COSTS.longest_sequence(budget_bytes, most_tokens=1000)
    assert longest == tokens
    if tokens > 16:
        reservations(budget_bytes=budget_bytes).check_fits_alone(COSTS, final_tokens=longest)


def test_a_state_that_does_not_grow_fits_at_any_length() -> None:
    costs = SequenceCosts(kv_bytes_per_token=0, fixed_bytes_per_sequence=100)
    assert costs.longest_sequence(10, most_tokens=1000) == 1000


def test_room_is_left_for_the_growth_of_running_sequences() -> None:
    books = reservations(budget_bytes=420 + 420 + 159)
    first = sequence(1)
    assert books.fits(first)
    books.reserve(first, step=0)
    assert not books.fits(sequence(2))
    full = reservations(budget_bytes=420 + 420 + 160)
    full.reserve(sequence(1), step=0)
    assert full.fits(sequence(2))


def test_a_sequence_at_its_full_length_needs_no_headroom() -> None:
    books = reservations(budget_bytes=840)
    first = sequence(1, max_tokens=8)
    books.reserve(first, step=0)
    assert books.fits(sequence(2))


def test_growth_prefers_a_whole_answer_and_accepts_one_step() -> None:
    books, growing = reservations(expected_output_tokens=40), sequence(max_tokens=1000)
    growing.position = 64
    assert books.capacities_for_growth(growing) == (112, 80)


def test_growth_stops_at_the_longest_answer() -> None:
    books, growing = reservations(expected_output_tokens=40), sequence(max_tokens=50)
    growing.position = 64
    assert books.capacities_for_growth(growing) == (80,)


def test_bytes_without_a_pending_step_are_freed_immediately() -> None:
    books, leaving = reservations(), sequence()
    books.reserve(leaving, step=0)
    books.release(leaving, recorded_steps=0)
    assert books.free_bytes == 2000


def test_bytes_of_a_dispatched_step_are_freed_afterwards() -> None:
    books, leaving = reservations(), sequence()
    books.reserve(leaving, step=0)
    leaving.last_step = 5
    books.release(leaving, recorded_steps=3)
    books.release_after(4)
    assert books.free_bytes == 2000 - 420
    books.release_after(5)
    assert books.free_bytes == 2000
    books.check_invariants([])
