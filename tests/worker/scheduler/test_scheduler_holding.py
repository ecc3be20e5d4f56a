"""Memory of live states in addition to reservations: never beyond the budget, freed when needed,
and no request hangs.
"""

from __future__ import annotations

import random

import pytest

from holdfast.config import SchedulerSettings
from holdfast.worker.scheduler.scheduler import Scheduler, StepOutcome
from holdfast.worker.scheduler.sequence import ScheduledSequence, SequenceCosts
from tests.fakes.step_worker import submit

BUDGET, TOKEN_BYTES = 960, 10


class HoldingWorker:
    """Ended sequences leave a parked state with their tokens; new ones take one over or prefill
    everything.
    """

    def __init__(self, rng: random.Random, *, reserve_step: int) -> None:
        self.rng = rng
        self.scheduler = Scheduler(
            SchedulerSettings(
                max_running=4,
                max_queued=20,
                step_tokens=24,
                min_chunk_tokens=4,
                expected_output_tokens=8,
            ),
            SequenceCosts(
                kv_bytes_per_token=TOKEN_BYTES,
                fixed_bytes_per_sequence=0,
                reserve_step_tokens=reserve_step,
            ),
            budget_bytes=BUDGET,
            context_tokens=90,
            mixes_chunks=True,
        )
        self.sequences: dict[str, ScheduledSequence] = {}
        self.sizes: dict[str, tuple[int, int]] = {}  # prompt and answer
        self.parked: list[int] = []  # tokens of each
        self.held: dict[str, int] = {}  # unreserved tokens of running ones
        self.claims: dict[str, int] = {}  # tokens of waiting ones in a parked state
        self.admitted = self.moved = self.reclaimed = 0

    @property
    def held_bytes(self) -> int:
        return (sum(self.parked) + sum(self.held.values())) * TOKEN_BYTES

    def submit(self, request_id: str) -> None:
        prompt = self.rng.choice([self.rng.randrange(1, 30), self.rng.randrange(30, 80)])
        answer = self.rng.choice([1, self.rng.randrange(1, 91 - prompt)])
        self.sizes[request_id] = prompt, answer
        self.sequences[request_id] = submit(
            self.scheduler, request_id, prompt_tokens=prompt, max_tokens=answer
        )
        self.look_up(request_id)

    def look_up(self, request_id: str) -> None:
        fit = [
            tokens
            for tokens in self.parked
            if tokens < self.sizes[request_id][0] and tokens not in self.claims.values()
        ]
        tokens = max(fit, default=0)
        if tokens:
            self.claims[request_id] = tokens
        self.sequences[request_id].start_after(tokens, held_tokens=tokens)

    def make_room(self) -> None:
        wanted = self.held_bytes - self.hold()
        for tokens in sorted(self.parked, key=lambda tokens: tokens in self.claims.values()):
            if self.held_bytes <= wanted:
                break
            self.parked.remove(tokens)
            self.reclaimed += 1
            for request_id in [name for name, claimed in self.claims.items() if claimed == tokens]:
                del self.claims[request_id]
                self.look_up(request_id)
        self.hold()

    def hold(self) -> int:
        return self.scheduler.record_live_states(
            total_bytes=self.held_bytes, parked_bytes=sum(self.parked) * TOKEN_BYTES
        )

    def freeze_one(self) -> None:
        """A running sequence freezes its tokens, to share them or because its tail has to grow."""
        running = [each for each in self.sequences.values() if each.is_running]
        if running and self.rng.random() < 0.2:
            one = self.rng.choice(running)
            if self.held.get(one.request_id, 0) < one.position:
                self.held[one.request_id] = one.position
                one.held_tokens = one.position

    def step(self) -> bool:
        """Whether any request has advanced."""
        self.make_room()
        reclaimed = self.reclaimed
        decision = self.scheduler.next_step()
        for request_id in decision.preempted:
            self.held.pop(request_id, None)
            self.look_up(request_id)
        for request_id in decision.admitted:
            tokens = self.claims.pop(request_id, 0)
            self.admitted += 1
            if tokens:
                self.parked.remove(tokens)
                self.held[request_id] = tokens
                self.moved += 1
        self.scheduler.check_invariants()
        reservations = self.scheduler._reservations
        assert reservations.running_bytes + reservations.ending_bytes + self.held_bytes <= BUDGET, (
            "memory is over-committed"
        )
        generated_tokens = {span.request_id: 1 for span in decision.plan.spans if span.samples}
        read = {span.request_id: span.start + span.tokens for span in decision.plan.spans}
        for request_id in self.scheduler.record_step(
            StepOutcome(
                plan=decision.plan, generated_tokens=generated_tokens, ended=(), seconds=0.01
            )
        ):
            self.held.pop(request_id, None)
            del self.sizes[request_id]
            if read[request_id] not in self.parked:  # lengths are names here
                self.parked.append(read[request_id])
        self.freeze_one()
        return bool(
            decision.plan.spans
            or decision.admitted
            or decision.preempted
            or self.reclaimed > reclaimed
        )


@pytest.mark.parametrize("reserve_step", [1, 8])
def test_held_and_reserved_memory_stay_within_the_budget(
    reserve_step: int,
) -> None:
    moved = reclaimed = 0
    for seed in range(12):
        rng = random.Random(seed)
        worker = HoldingWorker(rng, reserve_step=reserve_step)
        for number in range(30):
            while len(worker.sizes) >= 6:
                assert worker.step(), "everything stands still"
            worker.submit(f"r{number}")
            for _ in range(rng.randrange(6)):
                worker.step()
        for _ in range(5000):
            if not worker.sizes:
                break
            assert worker.step(), "everything stands still"
        assert not worker.sizes, "requests never end"
        assert (
            worker.scheduler._reservations.running_bytes
            == worker.scheduler._reservations.ending_bytes
            == 0
        )
        moved, reclaimed = moved + worker.moved, reclaimed + worker.reclaimed
    assert moved > 20
    assert reclaimed > 20
