"""How requests wait before they start, with a cache without arrays and the real scheduler."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from holdfast.wire.events import CacheFigures, WaitReason
from holdfast.worker.engine.plan import Span, SpanResult, StepPlan
from holdfast.worker.loop.cache_client import LEAST_SHARED_TOKENS, CacheClient
from holdfast.worker.loop.sequences import Ledger, LiveSequence
from holdfast.worker.prefix.chain import Cursor, Root
from tests.fakes.fake_cache import FakeCache, stored_chain
from tests.fakes.fake_engine import BLOCK, FakeEngine, Run
from tests.fakes.looped_worker import a_scheduler, a_sequence, flight_of, request

LONG = tuple(range(1, LEAST_SHARED_TOKENS + 2 * BLOCK))


class Waiting:
    """Lookups of queued sequences; each reading of the clock advances it by a second."""

    def __init__(self) -> None:
        self.cache, self.scheduler = FakeCache(), a_scheduler()
        self.now = 0.0
        self.ledger = Ledger(clock=self.tick)
        self.client = CacheClient(
            self.cache,  # type: ignore[arg-type]
            engine=FakeEngine(),  # type: ignore[arg-type]
            scheduler=self.scheduler,
            ledger=self.ledger,
            on_end=lambda sequence: None,
        )

    @property
    def figures(self) -> CacheFigures:
        figures = self.client.figures()
        assert figures is not None
        return figures

    def progress(self, sequence: LiveSequence, tokens: int) -> None:
        """The first tokens of a sequence are in the cache now."""
        sequence.start.cursor = Cursor(Root(b""))
        kept = [Run(tokens - BLOCK, BLOCK, sequence.request.request_id)]
        span = Span(request_id=sequence.id, start=tokens - BLOCK, tokens=BLOCK, samples=False)
        pending = SimpleNamespace(copies={sequence.id: kept})
        flight = flight_of(StepPlan(spans=(span,)), sequence, pending)
        self.client.end_step(flight, (SpanResult(request_id=sequence.id),))

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def arrive(self, name: str, *prompt: int) -> LiveSequence:
        sequence = a_sequence(request(name, *prompt))
        self.scheduler.submit(sequence.scheduled)
        self.ledger.accept(sequence)
        self.client.look_up(sequence)
        return sequence

    def admitted(self) -> dict[str, int]:
        """The sequences admitted with the next step, and their cached tokens."""
        decision = self.scheduler.next_step()
        starts = {span.request_id: span.start for span in decision.plan.spans}
        return {
            name: starts.get(name, self.ledger[name].scheduled.position)
            for name in decision.admitted
        }


def test_blocks_in_ram_are_used_immediately() -> None:
    waiting = Waiting()
    waiting.cache.blocks |= stored_chain(1, 2, 3, 4, 5, 6, 7, 8)
    sequence = waiting.arrive("a", 1, 2, 3, 4, 5, 6, 9)
    assert not waiting.client.is_waited_for
    assert waiting.admitted() == {"a": 4}
    assert sequence.start.lookup is not None
    assert sequence.start.lookup_seconds > 0


def test_a_request_waits_for_the_disk_and_lets_others_pass() -> None:
    waiting = Waiting()
    waiting.cache.blocks |= stored_chain(1, 2, 3, 4)
    waiting.cache.on_disk = True
    disk = waiting.arrive("disk", 1, 2, 3, 4, 5)
    waiting.arrive("other", 9, 9)
    assert waiting.client.is_waited_for
    assert disk.scheduled.waits_for is WaitReason.DISK
    assert waiting.admitted() == {"other": 0}
    waiting.client.advance()
    assert waiting.admitted() == {}
    waiting.cache.arrive()
    waiting.client.advance()
    assert not waiting.client.is_waited_for
    assert disk.scheduled.waits_for is WaitReason.MEMORY
    assert disk.times.waited[WaitReason.DISK] > 0
    assert waiting.admitted() == {"disk": 4}


def test_a_request_waits_for_its_twin_and_is_looked_up_again() -> None:
    waiting = Waiting()
    reader = waiting.arrive("reader", *LONG, 1)
    behind = waiting.arrive("behind", *LONG, 2)
    assert (waiting.figures.waiting, waiting.figures.waits) == (1, 1)
    assert behind.start.lookup is None, "what it would begin from now is not held for it"
    assert behind.scheduled.waits_for is WaitReason.TWIN
    assert waiting.admitted().keys() == {"reader"}
    waiting.cache.blocks |= stored_chain(*LONG)
    waiting.progress(reader, len(LONG))
    assert behind.scheduled.waits_for is WaitReason.LOOKUP
    waiting.client.advance()
    assert behind.scheduled.waits_for is WaitReason.MEMORY
    assert behind.start.lookup is not None
    assert behind.start.lookup.cached_tokens == len(LONG) // BLOCK * BLOCK
    assert behind.times.waited[WaitReason.TWIN] > 0


def test_no_request_waits_for_a_short_prefix_or_another_tenant() -> None:
    waiting = Waiting()
    waiting.arrive("reader", *LONG[: LEAST_SHARED_TOKENS - 1], 1)
    waiting.arrive("behind", *LONG, 2)
    assert waiting.figures.waiting == 0


@pytest.mark.parametrize("leaves", ["withdraw", "progress"])
def test_waiters_are_looked_up_when_their_reader_leaves(
    leaves: str,
) -> None:
    """The first becomes the reader for the others, unless the awaited blocks are stored."""
    waiting = Waiting()
    reader = waiting.arrive("reader", *LONG, 1)
    for name in ("first", "second"):
        waiting.arrive(name, *LONG, 2)
    if leaves == "progress":
        waiting.cache.blocks |= stored_chain(*LONG, 2, 2, 2, 2)
        waiting.progress(reader, len(LONG))
    else:
        waiting.client.withdraw(reader)
    waiting.client.advance()
    assert waiting.figures.waiting == (1 if leaves == "withdraw" else 0)
    assert "first" in waiting.admitted()


def test_a_withdrawn_waiting_request_is_not_looked_up_again() -> None:
    waiting = Waiting()
    reader, behind = waiting.arrive("reader", *LONG, 1), waiting.arrive("behind", *LONG, 2)
    waiting.client.withdraw(behind)
    waiting.client.withdraw(reader)
    waiting.client.advance()
    assert len(waiting.cache.lookups) == 2


def test_a_failed_second_lookup_costs_only_the_shortcut() -> None:
    waiting = Waiting()
    reader = waiting.arrive("reader", *LONG, 1)
    for name in ("first", "second"):
        waiting.arrive(name, *LONG, 2)
    waiting.client.withdraw(reader)
    waiting.cache.raises.add("lookup")
    waiting.client.advance()
    assert not waiting.client.is_waited_for
    assert waiting.admitted().keys() == {"reader", "first", "second"}


def test_all_waiting_requests_can_restart_cold() -> None:
    waiting = Waiting()
    waiting.cache.blocks |= stored_chain(9, 9, 9, 9)
    waiting.arrive("reader", *LONG, 1)
    waiting.arrive("behind", *LONG, 2)
    waiting.cache.on_disk = True
    waiting.arrive("disk", 9, 9, 9, 9, 9)
    waiting.cache.raises.add("maintain")
    waiting.client.advance()
    assert not waiting.client.is_waited_for
    assert waiting.admitted().keys() == {"reader", "behind", "disk"}
    assert waiting.figures.waiting == 0


def test_a_request_is_looked_up_again_if_its_blocks_are_gone() -> None:
    waiting = Waiting()
    waiting.cache.blocks |= stored_chain(1, 2, 3, 4)
    waiting.arrive("running", 1, 2, 3, 4, 7)
    waiting.admitted()
    waiting.arrive("a", 1, 2, 3, 4, 5)
    waiting.cache.forget(tuple(stored_chain(1, 2, 3, 4)))
    waiting.client.make_room()
    assert waiting.ledger.wait_reasons()["a"] is WaitReason.LOOKUP
    assert waiting.admitted() == {}
    waiting.client.advance()
    assert waiting.admitted() == {"a": 0}
    assert len(waiting.cache.lookups) == 3, "who runs is not looked up again"


def test_requests_postponed_while_memory_is_critical_wait_for_memory() -> None:
    waiting = Waiting()
    waiting.arrive("early", 9, 9)
    waiting.arrive("second", 8, 8)
    waiting.scheduler.admits_one_at_a_time = True
    for name in ("third", "fourth"):
        waiting.arrive(name, 7, 7)
    for _ in range(2):
        waiting.client.advance()
        assert set(waiting.ledger.wait_reasons().values()) == {WaitReason.MEMORY}
        assert [each.id for each in waiting.client._with_pinned_prefix()] == ["early"]
    assert waiting.admitted().keys() == {"early"}
    waiting.ledger["early"].start.release()
    waiting.client.advance()
    assert [each.id for each in waiting.client._with_pinned_prefix()] == ["second"]
    waiting.scheduler.admits_one_at_a_time = False
    waiting.client.advance()
    assert len(waiting.client._with_pinned_prefix()) == 3
    assert waiting.ledger["fourth"].times.waited.keys() == {WaitReason.MEMORY}


def test_postponed_requests_do_not_each_scan_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, scans = Waiting(), [0]
    waiting.scheduler.admits_one_at_a_time = True
    for index in range(1, 12):
        waiting.arrive(str(index), index, 1)
    live = waiting.ledger.live

    def counted() -> tuple[LiveSequence, ...]:
        scans[0] += 1
        return live()

    monkeypatch.setattr(waiting.ledger, "live", counted)
    waiting.client.advance()
    assert 0 < scans[0] < 4


def test_released_blocks_may_be_evicted() -> None:
    waiting = Waiting()
    waiting.cache.blocks |= stored_chain(1, 2, 3, 4)
    waiting.cache.order.add(next(iter(stored_chain(1, 2, 3, 4))), parent=None)
    sequence = waiting.arrive("a", 1, 2, 3, 4, 5)
    assert waiting.cache.order.next_to_leave() is None
    waiting.client.withdraw(sequence)
    assert waiting.cache.order.next_to_leave() is not None
