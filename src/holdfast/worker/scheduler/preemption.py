"""Who gives way when a running sequence needs more memory than is free: those that are paused, then
the highest in rank.

By rank (`fairness`) that is the youngest of whoever has most running; of a single flow the
youngest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from holdfast.wire.requests import RequestId
from holdfast.worker.scheduler.admission import KvLedger
from holdfast.worker.scheduler.decision import Reservation
from holdfast.worker.scheduler.fairness import Rank
from holdfast.worker.scheduler.sequence import ScheduledSequence


@dataclass(slots=True)
class RoomMade:
    """What was done so that running sequences can go on."""

    grown: list[Reservation] = field(default_factory=list)
    preempted: list[RequestId] = field(default_factory=list)
    someone_waits: bool = False  # for memory that becomes free soon; nobody may be admitted before


def make_room(
    needy: list[ScheduledSequence],
    running: dict[RequestId, ScheduledSequence],
    ledger: KvLedger,
    *,
    ranks: Mapping[RequestId, Rank],
    preempt: Callable[[ScheduledSequence], None],
) -> RoomMade:
    """Grow each sequence that has no room for its next token, the lowest in rank first.

    What does not fit waits if the steps under way will free enough, else the highest is preempted.
    The highest itself is never preempted for its own sake: it keeps what it has read and pauses
    until a lower one ends. The lowest always finds room, for alone it fits (admission saw to it),
    so somebody always moves on.

    running: oldest first; `preempt` takes a sequence out of it.
    """
    made = RoomMade()
    claimed_bytes = 0
    for sequence in sorted(needy, key=lambda each: ranks[each.request_id]):
        if sequence.request_id not in running:
            continue  # preempted for a lower one
        least_bytes = extra_bytes(ledger, sequence, ledger.capacities_for_growth(sequence)[-1])
        while ledger.free_bytes - claimed_bytes < least_bytes:
            victim = first_to_give_way(running, ranks)
            if victim is sequence and len(running) == 1 and sequence.held_tokens:
                # What it shares may take more than its tokens need, and nobody else can free
                # anything: it begins anew.
                made.preempted.append(victim.request_id)
                preempt(victim)
                break
            if (
                victim is sequence
                or _bytes_free_soon(ledger, running) - claimed_bytes >= least_bytes
            ):
                claimed_bytes += least_bytes
                made.someone_waits = True
                break
            made.preempted.append(victim.request_id)
            preempt(victim)
        else:
            made.grown.append(
                _grow(ledger, sequence, spare_bytes=ledger.free_bytes - claimed_bytes)
            )
    return made


def who_is_beyond(
    running: Mapping[RequestId, ScheduledSequence], ranks: Mapping[RequestId, Rank], *, most: int
) -> list[ScheduledSequence]:
    """Those that have to leave so that only `most` run; what is about to end does so by itself."""
    able = [sequence for sequence in running.values() if not sequence.is_fully_planned]
    able.sort(key=lambda each: (each.is_paused, ranks[each.request_id]), reverse=True)
    return able[: max(0, len(running) - most)]


def who_makes_way(
    waits: ScheduledSequence,
    running: Mapping[RequestId, ScheduledSequence],
    ledger: KvLedger,
    *,
    givers: Iterable[ScheduledSequence],
    max_running: int,
) -> list[ScheduledSequence]:
    """Those of `givers`, the first ones, that leave a waiting sequence a place and memory; none
    where all of them could not.
    """
    left, gone = dict(running), list[ScheduledSequence]()

    def has_room() -> bool:
        return len(left) < max_running and ledger.may_enter_without(waits, left.values(), gone=gone)

    for giver in givers:
        if has_room():
            return gone
        gone.append(giver)
        del left[giver.request_id]
    return gone if has_room() else []


def _grow(ledger: KvLedger, sequence: ScheduledSequence, *, spare_bytes: int) -> Reservation:
    for capacity in ledger.capacities_for_growth(sequence):
        if extra_bytes(ledger, sequence, capacity) <= spare_bytes:
            break
    ledger.grow(sequence, capacity)
    return Reservation(request_id=sequence.request_id, capacity_tokens=capacity)


def extra_bytes(ledger: KvLedger, sequence: ScheduledSequence, capacity_tokens: int) -> int:
    """What has to be reserved beyond what is, for a larger capacity."""
    return (
        ledger.bytes_for(capacity_tokens, held_tokens=sequence.held_tokens)
        - sequence.reserved_bytes
    )


def first_to_give_way(
    running: dict[RequestId, ScheduledSequence], ranks: Mapping[RequestId, Rank]
) -> ScheduledSequence:
    """The highest that is paused, else the highest that still has something to plan.

    One that is about to end frees its memory by itself.
    """
    able = [sequence for sequence in running.values() if not sequence.is_fully_planned]
    return max(able, key=lambda each: (each.is_paused, ranks[each.request_id]))


def _bytes_free_soon(ledger: KvLedger, running: dict[RequestId, ScheduledSequence]) -> int:
    ending = sum(
        sequence.reserved_bytes for sequence in running.values() if sequence.is_fully_planned
    )
    return ledger.free_bytes + ledger.leaving_bytes + ending
