"""Which models to load and to unload."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from holdfast.front.fleet.budget import Candidate, Phase, PlaceLimits, Verdict, decide

TWO = PlaceLimits(max_loaded=2, turn_seconds=10)
NAMES = ("a", "b", "c", "d")


def ready(name: str, **facts: object) -> Candidate:
    return replace(Candidate(name=name, phase="ready", footprint_bytes=10), **facts)


def wanted(name: str, number: int = 1, *, footprint_bytes: int = 10) -> Candidate:
    return Candidate(
        name=name, phase="unloaded", footprint_bytes=footprint_bytes, waiting_since=number
    )


def test_one_model_that_fits_is_loaded_at_a_time() -> None:
    unwanted = Candidate(name="b", phase="unloaded", footprint_bytes=10)
    assert decide([wanted("a"), unwanted], TWO, now=0) == Verdict(load=("a",))


def test_the_least_recently_used_model_makes_room_first() -> None:
    models = [ready("a", used_at=2), ready("b", used_at=1), wanted("c")]
    assert decide(models, TWO, now=3) == Verdict(unload=("b",), makes_room={"b": "c"})
    stopping = [models[0], replace(models[1], phase="stopping"), models[2]]
    assert decide(stopping, TWO, now=3) == Verdict()
    assert decide(
        [models[0], replace(models[1], phase="unloaded"), models[2]], TWO, now=3
    ) == Verdict(load=("c",))


def test_a_model_in_use_is_drained_only_after_its_turn() -> None:
    models = [ready("a", leases=1, ready_at=5), ready("b", leases=3, ready_at=4), wanted("c")]
    assert decide(models, TWO, now=6) == Verdict(next_check_at=14)
    assert decide(models, TWO, now=14) == Verdict(drain=frozenset("b"), makes_room={"b": "c"})
    drained = [models[0], replace(models[1], leases=0, waiting_since=2), models[2]]
    assert decide(drained, TWO, now=20) == Verdict(unload=("b",), makes_room={"b": "c"})


def test_no_more_models_are_unloaded_than_necessary() -> None:
    limits = PlaceLimits(memory_bytes=100)
    models = [
        ready("small", used_at=1),
        ready("large", used_at=2, footprint_bytes=80),
        wanted("c", footprint_bytes=60),
    ]
    assert decide(models, limits, now=3) == Verdict(unload=("large",), makes_room={"large": "c"})


def test_models_stay_loaded_if_unloading_them_would_not_help() -> None:
    limits = PlaceLimits(memory_bytes=100, turn_seconds=10)
    models = [
        ready("small"),
        ready("busy", leases=1, footprint_bytes=80),
        wanted("c", footprint_bytes=60),
    ]
    assert decide(models, limits, now=3) == Verdict(next_check_at=10)


def test_pinned_models_stay_and_block_others_that_do_not_fit() -> None:
    models = [ready("a", is_pinned=True), ready("b", is_pinned=True), wanted("c")]
    assert decide(models, TWO, now=99) == Verdict(blocked=("c",))
    assert decide([models[0], ready("b"), wanted("c")], TWO, now=99) == Verdict(
        unload=("b",), makes_room={"b": "c"}
    )


def test_a_model_larger_than_the_budget_is_loaded_alone() -> None:
    limits = PlaceLimits(memory_bytes=5)
    assert decide([wanted("a")], limits, now=0) == Verdict(load=("a",))
    assert decide([ready("b"), wanted("a")], limits, now=0) == Verdict(
        unload=("b",), makes_room={"b": "a"}
    )


def test_an_idle_model_is_unloaded_after_its_idle_time() -> None:
    assert decide([ready("a", used_at=5, idle_seconds=3)], TWO, now=7) == Verdict(next_check_at=8)
    assert decide([ready("a", used_at=5, idle_seconds=3)], TWO, now=8) == Verdict(unload=("a",))
    assert decide([ready("a", used_at=5, idle_seconds=0)], TWO, now=5) == Verdict(unload=("a",))
    for kept in (
        ready("a"),
        ready("a", idle_seconds=3, leases=1),
        ready("a", idle_seconds=3, is_pinned=True),
    ):
        assert decide([kept], TWO, now=999) == Verdict()


def test_a_requested_unload_waits_until_the_model_is_unused() -> None:
    assert decide([ready("a", is_unload_requested=True)], TWO, now=5) == Verdict(unload=("a",))
    assert decide([ready("a", is_unload_requested=True, leases=1)], TWO, now=5) == Verdict(
        drain=frozenset("a")
    )


def test_a_smaller_model_does_not_overtake_an_earlier_request() -> None:
    limits = PlaceLimits(memory_bytes=100, turn_seconds=10)
    models = [
        ready("a", leases=1, footprint_bytes=80),
        wanted("large", 1, footprint_bytes=60),
        wanted("small", 2),
    ]
    assert decide(models, limits, now=0) == Verdict(next_check_at=10)
    assert decide(models, limits, now=10) == Verdict(
        drain=frozenset("a"), makes_room={"a": "large"}
    )
    gone = [replace(models[0], phase="unloaded"), *models[1:]]
    assert decide(gone, limits, now=11) == Verdict(load=("large", "small"))


def test_a_place_is_not_freed_twice() -> None:
    stopping = Candidate(name="a", phase="stopping", footprint_bytes=10, waiting_since=3)
    # c takes the place of a
    assert decide([stopping, ready("b"), wanted("c", 2)], TWO, now=0) == Verdict()
    # a is back
    assert decide([stopping, ready("b"), wanted("c", 4)], TWO, now=0).unload == ("b",)


@dataclass
class Model:
    """The state of one model in the state machine below."""

    phase: Phase = "unloaded"
    footprint_bytes: int = 10
    leases: int = 0
    waiting: int = 0
    waiting_since: int | None = None
    is_pinned: bool = False
    idle_seconds: float | None = None
    used_at: float = 0.0
    ready_at: float = 0.0


class Places(RuleBasedStateMachine):
    """Requests, loads, failures, pins and time in any order; decisions are carried out as by
    `Residency`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.models = {
            name: Model(footprint_bytes=size)
            for name, size in zip(NAMES, (10, 10, 25, 40), strict=True)
        }
        self.limits = PlaceLimits(max_loaded=2, memory_bytes=50, turn_seconds=10)
        self.now, self.number = 0.0, 0
        self.verdict = Verdict()

    def candidate(self, name: str) -> Candidate:
        model = self.models[name]
        return Candidate(
            name=name,
            phase=model.phase,
            footprint_bytes=model.footprint_bytes,
            leases=model.leases,
            is_pinned=model.is_pinned,
            idle_seconds=model.idle_seconds,
            used_at=model.used_at,
            ready_at=model.ready_at,
            waiting_since=model.waiting_since,
        )

    def admit(self, name: str) -> None:
        model = self.models[name]
        model.leases, model.waiting, model.waiting_since = model.leases + model.waiting, 0, None

    def settle(self) -> None:
        """Carry out decisions until there are no more."""
        for _ in range(20):
            self.verdict = decide(
                [self.candidate(name) for name in NAMES], self.limits, now=self.now
            )
            for name in self.verdict.unload:
                assert (self.models[name].leases, self.models[name].is_pinned) == (0, False)
                assert self.models[name].phase == "ready"
                self.models[name].phase = "stopping"
            for name in self.verdict.load:
                assert self.models[name].phase == "unloaded", "one load at a time"
                assert self.models[name].waiting
                self.models[name].phase = "loading"
                self.admit(name)
            for name in self.verdict.blocked:
                assert any(model.is_pinned for model in self.models.values())
                self.models[name].waiting, self.models[name].waiting_since = 0, None
            for name, model in self.models.items():
                if model.phase == "ready" and name not in self.verdict.drain and model.waiting:
                    self.admit(name)
                    self.verdict = replace(self.verdict, load=(name,))  # look again
            if not (self.verdict.unload or self.verdict.load or self.verdict.blocked):
                return
        raise AssertionError("it never comes to rest")

    @rule(name=st.sampled_from(NAMES))
    def request(self, name: str) -> None:
        model = self.models[name]
        if model.phase == "loading" or (model.phase == "ready" and name not in self.verdict.drain):
            model.leases += 1
            model.used_at = self.now
        else:
            self.number += 1
            model.waiting += 1
            model.waiting_since = (
                self.number if model.waiting_since is None else model.waiting_since
            )
        self.settle()

    @rule(name=st.sampled_from(NAMES))
    def end(self, name: str) -> None:
        model = self.models[name]
        if model.leases:
            model.leases -= 1
            model.used_at = self.now
            self.settle()

    @rule(name=st.sampled_from(NAMES))
    def give_up_waiting(self, name: str) -> None:
        model = self.models[name]
        if model.waiting:
            model.waiting -= 1
            model.waiting_since = model.waiting_since if model.waiting else None
            self.settle()

    @rule(name=st.sampled_from(NAMES), succeeds=st.booleans())
    def load_ends(self, name: str, *, succeeds: bool) -> None:
        model = self.models[name]
        if model.phase == "loading":
            model.phase = "ready" if succeeds else "stopping"
            model.leases = model.leases if succeeds else 0
            model.used_at = model.ready_at = self.now
            self.settle()

    @rule(name=st.sampled_from(NAMES))
    def has_stopped(self, name: str) -> None:
        if self.models[name].phase == "stopping":
            self.models[name].phase = "unloaded"
            self.settle()

    @rule(seconds=st.sampled_from([0.0, 1.0, 9.0, 50.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(name=st.sampled_from(NAMES), idle_seconds=st.sampled_from([None, 0.0, 5.0]))
    def choose_idle_policy(self, name: str, idle_seconds: float | None) -> None:
        self.models[name].idle_seconds = idle_seconds
        self.settle()

    @rule(name=st.sampled_from(NAMES), is_pinned=st.booleans())
    def pin(self, name: str, *, is_pinned: bool) -> None:
        self.models[name].is_pinned = is_pinned
        self.settle()

    @invariant()
    def never_more_than_there_is_room_for(self) -> None:
        placed = [model for model in self.models.values() if model.phase != "unloaded"]
        assert len(placed) <= 2
        assert len(placed) == 1 or sum(model.footprint_bytes for model in placed) <= 50

    @invariant()
    def only_what_is_used_is_drained(self) -> None:
        for name in self.verdict.drain:
            assert self.models[name].phase == "ready"
            assert not self.models[name].is_pinned

    @precondition(lambda self: any(model.waiting for model in self.models.values()))
    @rule()
    def everybody_who_waits_is_served_in_the_end(self) -> None:
        """Answers end, but each one that ends on an open model is followed by another."""
        waited = {name for name, model in self.models.items() if model.waiting}
        for _ in range(12 * len(NAMES)):
            for name in NAMES:
                self.load_ends(name, succeeds=True)
                self.has_stopped(name)
                for _ in range(self.models[name].leases):
                    self.request(name)
                    self.end(name)
                if name in self.verdict.drain:
                    while self.models[name].leases:
                        self.end(name)
                waited &= {name for name, model in self.models.items() if model.waiting}
            self.wait(max(min(self.verdict.next_check_at - self.now, 100.0), 0.0))
            if not waited:
                return
        raise AssertionError(f"{waited} wait for ever")


Places.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestPlaces = Places.TestCase


@pytest.mark.parametrize("max_loaded", [1, 2, 3])
def test_three_busy_models_take_turns(max_loaded: int) -> None:
    machine = Places()
    machine.limits = PlaceLimits(max_loaded=max_loaded, turn_seconds=10)
    served: dict[str, int] = dict.fromkeys(NAMES[:3], 0)
    for _ in range(300):
        for name in served:
            machine.request(name)
            machine.load_ends(name, succeeds=True)
            machine.has_stopped(name)
            while machine.models[name].leases > (name not in machine.verdict.drain):
                machine.end(name)
                served[name] += 1
        machine.wait(1.0)
    assert min(served.values()) > 60
    assert machine.verdict.next_check_at >= machine.now or math.isinf(machine.verdict.next_check_at)
