"""Decides which models to load and which to unload. The decision is a pure function of the states
of all models; it uses no clock, processes or tasks.

A loaded model takes a *place*: it counts towards `max_loaded`, and its memory towards
`memory_bytes`. Requests get places for their models in the order of their arrival. To make room,
unused models are unloaded, least recently used first. If that is not enough, a model that has been
ready for at least `turn_seconds` is *drained*: it gets no new requests, and is unloaded once the
running ones have finished. So no request starves, and no model is unloaded while a request uses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Phase: TypeAlias = Literal["unloaded", "loading", "ready", "stopping"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The state of one model, as far as the decision depends on it.

    All times are in seconds, measured by the same clock.
    """

    name: str
    phase: Phase
    footprint_bytes: int  # memory of the loaded model: measured, or an estimate
    leases: int = 0  # requests that use the model, or only wait until it is loaded
    is_pinned: bool = False  # never unloaded to make room
    is_unload_requested: bool = False  # unload it when it is ready
    # the model is unloaded after this many seconds without a request; None: never
    idle_seconds: float | None = None
    used_at: float = 0.0  # time of the last use, or of becoming ready if that is later
    ready_at: float = 0.0  # time at which the model became ready, and its turn began
    # arrival number of the first request that waits for a place for this model; None: none waits
    waiting_since: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaceLimits:
    """How many places there are. A model in use keeps its place for at least `turn_seconds`."""

    max_loaded: float = math.inf  # number of models
    memory_bytes: float = math.inf  # for all loaded models
    turn_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision: which models to load, unload and drain now. Models are given by name."""

    load: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    # model that is unloaded or drained -> model that gets its place
    makes_room: Mapping[str, str] = field(default_factory=dict)
    drain: frozenset[str] = frozenset()  # models to drain; all ready and in use
    # models that were requested, for which pinned models leave no room
    blocked: tuple[str, ...] = ()
    next_check_at: float = math.inf  # time at which the decision may change without another event


def decide(models: Sequence[Candidate], limits: PlaceLimits, *, now: float) -> Verdict:
    """Decide what to do at the time `now`.

    Models that are loading or stopping keep their places.
    """
    return _Decision(models, limits, now=now).verdict()


def idle_until(model: Candidate) -> float:
    """The time at which a model is unloaded if no request uses it until then."""
    return math.inf if model.idle_seconds is None else model.used_at + model.idle_seconds


class _Decision:
    """One decision in progress: the models chosen so far."""

    def __init__(self, models: Sequence[Candidate], limits: PlaceLimits, *, now: float) -> None:
        self._models = models
        self._limits = limits
        self._now = now
        self._to_load: list[Candidate] = []
        self._reserved: list[Candidate] = []  # models for which room is being made
        self._to_unload: list[Candidate] = []
        self._to_drain: list[Candidate] = []
        self._makes_room: dict[
            str, str
        ] = {}  # model to unload or drain -> model that gets its place
        self._blocked: list[Candidate] = []
        self._next_check_at = math.inf  # when the decision may change without another event

    def verdict(self) -> Verdict:
        """Make the decision. Call this only once."""
        for model in self._models:
            if model.is_unload_requested and model.phase == "ready":
                (self._to_drain if model.leases else self._to_unload).append(model)
            elif _is_unused(model):
                self._unload_if_idle(model)
        waiting = [
            model
            for model in self._models
            if model.waiting_since is not None and model.phase == "unloaded"
        ]
        for model in sorted(waiting, key=_arrival_number):
            pinned = [
                other for other in self._models if other.is_pinned and other.phase != "unloaded"
            ]
            if not _fits(model, pinned, self._limits):
                self._blocked.append(model)
            elif not self._load_or_make_room(model):
                break  # later arrivals have to wait, or the first might starve
        return Verdict(
            load=_names(self._to_load),
            unload=_names(self._to_unload),
            makes_room=self._makes_room,
            drain=frozenset(_names(self._to_drain)),
            blocked=_names(self._blocked),
            next_check_at=self._next_check_at,
        )

    def _unload_if_idle(self, model: Candidate) -> None:
        """Unload an unused model whose idle time is over; otherwise check again when it ends."""
        ends_at = idle_until(model)
        if ends_at <= self._now:
            self._to_unload.append(model)
        else:
            self._next_check_at = min(self._next_check_at, ends_at)

    def _load_or_make_room(self, model: Candidate) -> bool:
        """Load a waiting model, or make room for it. Returns False if neither is possible yet."""
        occupied = [other for other in self._models if other.phase != "unloaded"]
        if _fits(model, [*occupied, *self._to_load, *self._reserved], self._limits):
            self._to_load.append(model)
            return True
        idle, busy = self._eviction_candidates()
        victims = self._fewest_victims(model, [*idle, *busy])
        if victims is None:
            self._check_again_when_turns_end()
            return False
        self._makes_room |= {victim.name: model.name for victim in victims}
        self._to_unload += [victim for victim in victims if victim in idle]
        self._to_drain += [victim for victim in victims if victim in busy]
        self._reserved.append(model)
        return True

    def _eviction_candidates(self) -> tuple[list[Candidate], list[Candidate]]:
        """Return the models that can be unloaded now, and those that can be drained.

        Both lists begin with the model that should go first.
        """
        staying = [
            model
            for model in self._models
            if model.phase == "ready" and not model.is_pinned and not self._is_leaving(model)
        ]
        idle = sorted(
            (model for model in staying if not model.leases), key=lambda model: model.used_at
        )
        past_their_turn = [
            model
            for model in staying
            if model.leases and model.ready_at + self._limits.turn_seconds <= self._now
        ]
        return idle, sorted(past_their_turn, key=lambda model: model.ready_at)

    def _fewest_victims(
        self, model: Candidate, candidates: Sequence[Candidate]
    ) -> list[Candidate] | None:
        """Choose a minimal set of candidates that makes enough room for a model.

        Earlier candidates are preferred. Returns None if even all of them do not make enough room.
        """
        victims: list[Candidate] = []
        remaining = iter(candidates)
        while not self._would_fit(model, without=victims):
            if (victim := next(remaining, None)) is None:
                return None
            victims.append(victim)
        for victim in reversed(victims):
            fewer = [other for other in victims if other is not victim]
            if self._would_fit(model, without=fewer):
                victims = fewer
        return victims

    def _would_fit(self, model: Candidate, *, without: Sequence[Candidate]) -> bool:
        """Whether a model will fit once the models in `without`, and all those that are already to
        be unloaded or drained, are gone.
        """
        staying = [
            other
            for other in self._models
            if self._takes_up_room(other, beside=model) and other not in without
        ]
        return _fits(model, [*staying, *self._to_load, *self._reserved], self._limits)

    def _takes_up_room(self, model: Candidate, *, beside: Candidate) -> bool:
        """Whether a model takes up room when `beside` is loaded. A stopping model does if a request
        for it arrived first: it will be loaded again before.
        """
        if model.phase == "stopping":
            return _arrival_number(model) < _arrival_number(beside)
        return model.phase != "unloaded" and not self._is_leaving(model)

    def _is_leaving(self, model: Candidate) -> bool:
        """Whether the model is already chosen to be unloaded or drained."""
        return model in self._to_unload or model in self._to_drain

    def _check_again_when_turns_end(self) -> None:
        """Check again when a model that is in use may be drained."""
        for model in self._models:
            ends_at = model.ready_at + self._limits.turn_seconds
            if model.phase == "ready" and not model.is_pinned and ends_at > self._now:
                self._next_check_at = min(self._next_check_at, ends_at)


def _arrival_number(model: Candidate) -> float:
    """The arrival number of the first waiting request; infinite if none waits."""
    return math.inf if model.waiting_since is None else model.waiting_since


def _is_unused(model: Candidate) -> bool:
    """Whether the model may be unloaded after its idle time."""
    return (
        model.phase == "ready"
        and not model.leases
        and not model.is_pinned
        and model.waiting_since is None
    )


def _fits(model: Candidate, beside: Iterable[Candidate], limits: PlaceLimits) -> bool:
    """Whether a model fits in addition to other models.

    A model on its own always counts as fitting, because only loading it shows whether it does.
    """
    others = list(beside)
    if not others:
        return True
    used_bytes = sum(other.footprint_bytes for other in others)
    return (
        len(others) < limits.max_loaded
        and used_bytes + model.footprint_bytes <= limits.memory_bytes
    )


def _names(models: Iterable[Candidate]) -> tuple[str, ...]:
    return tuple(model.name for model in models)
