"""Who gives way when a running sequence needs more memory than is free: the youngest, before it those that are paused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.messages.requests import RequestId
from holdfast.scheduler.admission import KvLedger
from holdfast.scheduler.decision import Reservation
from holdfast.scheduler.sequence import ScheduledSequence


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
    preempt: Callable[[ScheduledSequence], None],
) -> RoomMade:
    """Grow each sequence that has no room for its next token, the oldest first.

    What does not fit waits if the steps under way will free enough, else the youngest is preempted. The youngest itself is
    never preempted for its own sake: it keeps what it has read and pauses until an older one ends. The oldest always finds room,
    for alone it fits (admission saw to it), so somebody always moves on.

    running: oldest first; `preempt` takes a sequence out of it.
    """
    made = RoomMade()
    claimed_bytes = 0
    for sequence in sorted(needy, key=lambda each: each.order):
        if sequence.request_id not in running:
            continue  # preempted for an older one
        least_bytes = extra_bytes(ledger, sequence, ledger.capacities_for_growth(sequence)[-1])
        while ledger.free_bytes - claimed_bytes < least_bytes:
            victim = first_to_give_way(running)
            if victim is sequence and len(running) == 1 and sequence.held_tokens:
                # What it shares may take more than its tokens need, and nobody else can free anything: it begins anew.
                made.preempted.append(victim.request_id)
                preempt(victim)
                break
            if victim is sequence or _bytes_free_soon(ledger, running) - claimed_bytes >= least_bytes:
                claimed_bytes += least_bytes
                made.someone_waits = True
                break
            made.preempted.append(victim.request_id)
            preempt(victim)
        else:
            made.grown.append(_grow(ledger, sequence, spare_bytes=ledger.free_bytes - claimed_bytes))
    return made


def _grow(ledger: KvLedger, sequence: ScheduledSequence, *, spare_bytes: int) -> Reservation:
    for capacity in ledger.capacities_for_growth(sequence):
        if extra_bytes(ledger, sequence, capacity) <= spare_bytes:
            break
    ledger.grow(sequence, capacity)
    return Reservation(request_id=sequence.request_id, capacity_tokens=capacity)


def extra_bytes(ledger: KvLedger, sequence: ScheduledSequence, capacity_tokens: int) -> int:
    """What has to be reserved beyond what is, for a larger capacity."""
    return ledger.bytes_for(capacity_tokens, held_tokens=sequence.held_tokens) - sequence.reserved_bytes


def first_to_give_way(running: dict[RequestId, ScheduledSequence]) -> ScheduledSequence:
    """The youngest that is paused, else the youngest that still has something to plan.

    One that is about to end frees its memory by itself.
    """
    able = [sequence for sequence in reversed(running.values()) if not sequence.is_fully_planned]
    return next((sequence for sequence in able if sequence.is_paused), able[0])


def _bytes_free_soon(ledger: KvLedger, running: dict[RequestId, ScheduledSequence]) -> int:
    ending = sum(sequence.reserved_bytes for sequence in running.values() if sequence.is_fully_planned)
    return ledger.free_bytes + ledger.leaving_bytes + ending
