"""A worker's budgets follow other loaded models and the memory pressure of the system, in both
directions.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from holdfast.config import SchedulerSettings
from holdfast.machine.device_memory import Pressure, pressure_of, pressure_reader
from holdfast.machine.memory_plan import MemoryPlan
from holdfast.worker.loop.memory_budget import CLEAR_SECONDS, READ_SECONDS, MemoryBudget
from holdfast.worker.scheduler.scheduler import Scheduler
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.fake_cache import NothingLive
from tests.fakes.step_worker import submit

MIB = 1 << 20


@dataclass
class ParkedStates(NothingLive):
    reclaimed: list[int] = field(default_factory=list)

    def reclaim(self, nbytes: int) -> None:
        self.reclaimed.append(nbytes)


class CacheWithLimits:
    def __init__(self) -> None:
        self.live = ParkedStates()
        self.limits: list[tuple[int, int | None]] = []

    def limit_ram(self, nbytes: int, *, most_parked_bytes: int | None) -> None:
        self.limits.append((nbytes, most_parked_bytes))


class Subject:
    def __init__(self) -> None:
        self.scheduler = Scheduler(
            SchedulerSettings(step_tokens=64),
            SequenceCosts(kv_bytes_per_token=1000, fixed_bytes_per_sequence=0),
            budget_bytes=8 * MIB,
            context_tokens=10_000,
            mixes_chunks=True,
        )
        self.cache = CacheWithLimits()
        self.level = Pressure.NORMAL
        self.cleared = 0
        self.budget = MemoryBudget(
            MemoryPlan(kv_bytes=8 * MIB, ram_tier_bytes=2 * MIB),
            scheduler=self.scheduler,
            cache=self.cache,  # type: ignore[arg-type]
            clear_buffers=self.clear,
            plan_for=lambda state_bytes: MemoryPlan(
                kv_bytes=state_bytes * 4 // 5, ram_tier_bytes=state_bytes // 5
            ),
            read_pressure=lambda: self.level,
        )

    def clear(self) -> None:
        self.cleared += 1

    def submit(self, name: str, *, tokens: int = 100) -> None:
        submit(self.scheduler, name, prompt_tokens=tokens, max_tokens=10)


def test_a_warning_frees_parked_states_ram_blocks_and_buffers() -> None:
    subject = Subject()
    subject.level = Pressure.WARNING
    subject.budget.maintain(now=10.0)
    assert subject.cache.limits == [(0, 0)]
    assert subject.cleared == 1
    subject.submit("a")
    assert subject.scheduler.next_step().admitted, "new requests are served"
    subject.level = Pressure.NORMAL
    subject.budget.maintain(now=20.0)
    assert subject.cache.limits[1:] == [(2 * MIB, None)]
    assert subject.cleared == 1


def test_at_the_critical_level_one_request_runs_at_a_time() -> None:
    subject = Subject()
    subject.budget.set_system_pressure(Pressure.CRITICAL)
    subject.submit("a")
    subject.submit("b")
    assert subject.scheduler.next_step().admitted == ("a",), "one at a time goes on"
    assert not subject.scheduler.next_step().admitted
    subject.budget.set_system_pressure(Pressure.WARNING)
    assert subject.scheduler.next_step().admitted == ("b",)


def test_a_paused_request_blocks_none_at_the_critical_level() -> None:
    subject = Subject()
    subject.submit("paused")
    assert subject.scheduler.next_step().admitted
    subject.scheduler.pause("paused")
    subject.budget.set_system_pressure(Pressure.CRITICAL)
    subject.submit("a")
    subject.submit("b")
    assert subject.scheduler.next_step().admitted == ("a",)


def test_the_pressure_is_read_once_a_second_at_most() -> None:
    subject = Subject()
    subject.budget.maintain(now=5.0)
    subject.level = Pressure.CRITICAL
    subject.budget.maintain(now=5.0 + READ_SECONDS / 2)
    assert subject.budget.pressure is Pressure.NORMAL
    subject.budget.maintain(now=5.0 + READ_SECONDS)
    assert subject.budget.pressure is Pressure.CRITICAL


def test_the_budget_follows_the_other_loaded_models() -> None:
    subject = Subject()
    subject.budget.set_share(2_500_000)
    assert subject.scheduler.statistics().budget_bytes == 2_000_000
    assert subject.cache.limits == [(500_000, None)]
    subject.budget.set_share(50_000_000)
    assert subject.scheduler.statistics().budget_bytes == 40_000_000


def test_a_request_accepted_under_a_larger_budget_still_runs() -> None:
    subject = Subject()
    subject.submit("large", tokens=5_000)
    subject.budget.set_share(1_000_000)
    assert subject.scheduler.statistics().budget_bytes > 5_000_000
    assert subject.scheduler.next_step().admitted
    subject.scheduler.cancel("large")
    assert subject.scheduler.statistics().budget_bytes == 800_000


def test_a_share_changed_under_pressure_applies_afterwards() -> None:
    subject = Subject()
    subject.budget.set_system_pressure(Pressure.WARNING)
    subject.budget.set_share(2_500_000)
    assert subject.cache.limits[-1] == (0, 0)
    subject.budget.set_system_pressure(Pressure.NORMAL)
    assert subject.cache.limits[-1] == (500_000, None)


def test_the_higher_of_both_pressures_applies() -> None:
    subject = Subject()
    subject.budget.set_worker_pressure(Pressure.WARNING)
    assert subject.cache.limits == [(0, 0)]
    subject.budget.set_system_pressure(Pressure.CRITICAL)
    subject.budget.set_worker_pressure(Pressure.NORMAL)
    assert subject.budget.pressure is Pressure.CRITICAL
    assert subject.cache.limits[-1] == (0, 0)
    subject.budget.set_system_pressure(Pressure.NORMAL)
    assert subject.budget.pressure is Pressure.NORMAL
    assert subject.cache.limits[-1] == (2 * MIB, None)


def test_free_buffers_are_released_regularly_under_pressure() -> None:
    subject = Subject()
    subject.budget.maintain(now=1.0)
    subject.budget.set_worker_pressure(Pressure.WARNING)
    for now in (2.0, 1.0 + CLEAR_SECONDS, 2.0 + CLEAR_SECONDS, 1.0 + 2 * CLEAR_SECONDS):
        subject.budget.maintain(now=now)
    assert subject.cleared == 3
    subject.budget.set_worker_pressure(Pressure.NORMAL)
    subject.budget.maintain(now=100.0)
    assert subject.cleared == 3


@pytest.mark.parametrize(
    ("level", "pressure"),
    [(0, "NORMAL"), (1, "NORMAL"), (2, "WARNING"), (3, "WARNING"), (4, "CRITICAL")],
)
def test_levels_of_the_system_have_their_names(level: int, pressure: str) -> None:
    assert pressure_of(level) is Pressure[pressure]


def test_pressure_is_read_if_the_system_supports_it() -> None:
    read = pressure_reader()
    assert read is None or read() in Pressure
