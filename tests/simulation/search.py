"""The search for violations, guided by coverage, and the shrinking of failing scenarios.

The search keeps scenarios that reached new coverage in a corpus, and mutates them. Coverage is a set
of pairs: a phase of the server and an event in it. Half of the worlds are newly generated.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

from tests.simulation.actions import (
    DEFAULT_OPTIONS,
    Action,
    Branch,
    Call,
    KeyChange,
    Scenario,
    Trouble,
    Turn,
    options_of,
    scenario_of,
)
from tests.simulation.outcomes import Result, Task
from tests.simulation.pool import Worlds

LAG = 64  # the choice of world N depends on the results of all worlds before N - LAG, and no others
MOST_ACTIONS = 80
FRESH_SHARE = 0.5
_SPANS = (0.0005, 0.005, 0.05, 0.5, 5.0)  # seconds from a turn to a fault


class Search:
    """Chooses scenarios by number. How many worlds run at once, and which ends first, has no
    influence.
    """

    def __init__(self, first: int) -> None:
        """first: the seed of the first generated scenario."""
        self.first = first
        self._learned = 0  # number of worlds, the first ones, whose coverage is recorded
        self._reached: Counter[tuple[str, str]] = Counter()
        self._corpus: dict[tuple[str, str], Scenario] = {}  # by the pair that it reached first

    def scenario(
        self, number: int, results: Mapping[int, tuple[Scenario, Result]]
    ) -> tuple[str, Scenario] | None:
        """The scenario of a world, with a name. None while a result that the choice depends on is
        unknown. Called in the order of numbers.
        """
        while self._learned < number - LAG:
            if self._learned not in results:
                return None
            self._learn(*results[self._learned])
        seed = self.first + number
        dice = random.Random(f"search {seed}")
        if dice.random() < FRESH_SHARE or not self._corpus:
            return f"seed {seed}", scenario_of(seed)
        scenario = self._interesting(dice)
        for _ in range(dice.choice((1, 1, 2, 4))):
            scenario = mutated(dice, scenario, self._interesting(dice))
        return f"a changed scenario (world {number} of --first {self.first})", scenario

    def _interesting(self, dice: random.Random) -> Scenario:
        """A scenario that reached a rare pair."""
        rarest = sorted(self._corpus, key=lambda pair: (self._reached[pair], pair))
        return self._corpus[dice.choice(rarest[: 1 + len(rarest) // 4])]

    def _learn(self, scenario: Scenario, result: Result) -> None:
        """Record the coverage of the next world."""
        self._learned += 1
        for pair in sorted(result.states):
            self._reached[pair] += 1
            self._corpus.setdefault(pair, scenario)


# -- mutation


def mutated(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """The scenario with one mutation. other: a scenario that may be spliced into it."""
    change = dice.choice((_reordered, _thinned, _moved, _altered, _altered, _troubled, _troubled,
                          _squeezed, _joined, _set_up))  # fmt: skip
    changed = change(dice, scenario, other)
    return _in_order(changed)


def _reordered(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    return replace(scenario, order=dice.randrange(1 << 32))


def _thinned(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    share = dice.choice((0.1, 0.5))
    return replace(
        scenario, actions=tuple(each for each in scenario.actions if dice.random() > share)
    )


def _moved(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Move an action to another time, or repeat it there."""
    if not scenario.actions:
        return scenario
    place = dice.randrange(len(scenario.actions))
    action = scenario.actions[place]
    again = replace(action, at=dice.choice(scenario.actions).at + dice.choice(_SPANS))
    kept = scenario.actions if dice.random() < 0.5 else _without(scenario.actions, place, place + 1)
    return replace(scenario, actions=(*kept, again))


def _altered(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Set a field of an action to its value in a newly generated action."""
    places = [
        place
        for place, action in enumerate(scenario.actions)
        if isinstance(action, Turn | Trouble | KeyChange)
    ]
    if not places:
        return scenario
    place = dice.choice(places)
    action = scenario.actions[place]
    model = _of_kind(dice, type(action))
    name = dice.choice([each.name for each in fields(action) if each.name not in ("at", "agent")])
    changed = replace(action, **{name: getattr(model, name)})
    return replace(
        scenario, actions=(*scenario.actions[:place], changed, *scenario.actions[place + 1 :])
    )


def _troubled(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Add a fault soon after a turn, or move one there."""
    turns = [action for action in scenario.actions if isinstance(action, Turn)]
    if not turns:
        return scenario
    at = dice.choice(turns).at + dice.expovariate(1 / dice.choice(_SPANS))
    troubles = [
        place for place, action in enumerate(scenario.actions) if isinstance(action, Trouble)
    ]
    if troubles and dice.random() < 0.5:
        place = dice.choice(troubles)
        kept = _without(scenario.actions, place, place + 1)
        return replace(scenario, actions=(*kept, replace(scenario.actions[place], at=at)))
    trouble = replace(_of_kind(dice, Trouble), at=at)
    return replace(scenario, actions=(*scenario.actions, trouble))


def _squeezed(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Scale all times."""
    factor = dice.choice((0.001, 0.03, 0.3, 3.0))
    return replace(
        scenario,
        actions=tuple(replace(action, at=action.at * factor) for action in scenario.actions),
    )


def _joined(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Join its beginning with the end of another scenario."""
    cut = dice.randrange(len(scenario.actions) + 1)
    theirs = other.actions[dice.randrange(len(other.actions) + 1) :]
    head = scenario.actions[:cut]
    shift = (head[-1].at if head else 0.0) - (theirs[0].at if theirs else 0.0)
    tail = tuple(replace(action, at=action.at + shift) for action in theirs)
    return replace(scenario, actions=(*head, *tail))


def _set_up(dice: random.Random, scenario: Scenario, other: Scenario) -> Scenario:
    """Change one or two options of the server."""
    fresh = options_of(dice)
    names = [name for name in fresh if name != "models"]
    changed = {name: fresh[name] for name in dice.sample(names, dice.choice((1, 2)))}
    return replace(scenario, options={**scenario.options, **changed})


def _in_order(scenario: Scenario) -> Scenario:
    """Sort the actions by time, and replace models that do not exist."""
    models = scenario.options["models"]
    actions = sorted(scenario.actions, key=lambda action: action.at)[:MOST_ACTIONS]
    kept: list[Action] = []
    for action in actions:
        if isinstance(action, Turn | Trouble) and action.model not in models:
            action = replace(action, model=models[0])
        if isinstance(action, Call) and len(models) == 1 and "other" in str(action):
            continue
        kept.append(action)
    options = scenario.options
    if len(models) == 1:
        options = {**options, "max_loaded": None}
    return replace(scenario, actions=tuple(kept), options=options)


def _of_kind(dice: random.Random, kind: type[Action]) -> Any:
    """A newly generated action of this kind."""
    while True:
        fresh = scenario_of(dice.randrange(1 << 32))
        found = [action for action in fresh.actions if isinstance(action, kind)]
        if found:
            return dice.choice(found)


def _without(actions: Sequence[Action], start: int, end: int) -> tuple[Action, ...]:
    return (*actions[:start], *actions[end:])


# -- shrinking


@dataclass
class Shrunk:
    """The shortest failing scenario so far, with its result. worlds: how many were run for it."""

    scenario: Scenario
    result: Result
    worlds: int = 0


class Shrinker:
    """Shrinks a failing scenario, as long as it violates the same invariant."""

    def __init__(
        self,
        worlds: Worlds,
        scenario: Scenario,
        result: Result,
        *,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: the time limit."""
        self._worlds = worlds
        self._clock = clock
        self._ends_at = clock() + seconds
        self._invariant = result.failures[0].invariant
        self._tried = {repr(scenario)}
        self.best = Shrunk(scenario, result)

    def shrink(self) -> Shrunk:
        """Return the shortest scenario found in time."""
        self._cut_end()
        before: Scenario | None = None
        while before != self.best.scenario and self._has_time:
            before = self.best.scenario
            self._drop_actions()
            self._simplify()
        return self.best

    @property
    def _has_time(self) -> bool:
        return self._clock() < self._ends_at

    def _take_first(self, candidates: Iterator[Scenario]) -> bool:
        """Take the first candidate that still fails, if any does."""
        running: list[tuple[Scenario, Future[Result | None]]] = []
        found = False
        while True:
            while not found and self._has_time and len(running) < self._worlds.processes:
                candidate = next(candidates, None)
                if candidate is None:
                    break
                if (text := repr(candidate)) in self._tried:
                    continue
                self._tried.add(text)
                # a candidate with more events is not simpler
                most = 2 * self.best.result.events + 5000
                running.append(
                    (candidate, self._worlds.submit(Task(scenario=candidate, most_events=most)))
                )
            if not running:
                return found
            candidate, future = running.pop(0)
            result = future.result()
            self.best.worlds += 1
            if found or result is None:
                continue
            if any(each.invariant == self._invariant for each in result.failures):
                self.best = Shrunk(candidate, result, self.best.worlds)
                found = True

    def _cut_end(self) -> None:
        """Drop the actions after the violation."""
        scenario, failure = self.best.scenario, self.best.result.failures[0]
        kept = tuple(action for action in scenario.actions if action.at <= failure.seconds)
        if len(kept) < len(scenario.actions):
            self._take_first(iter([replace(scenario, actions=kept)]))

    def _drop_actions(self) -> None:
        """Drop actions in ever smaller pieces (delta debugging)."""
        pieces = 2
        while pieces <= 2 * len(self.best.scenario.actions) and self._has_time:
            if self._take_first(_in_some_orders(list(_with_gaps(self.best.scenario, pieces)))):
                pieces = max(2, pieces - 1)
            elif pieces >= len(self.best.scenario.actions):
                break
            else:
                pieces = min(2 * pieces, len(self.best.scenario.actions))

    def _simplify(self) -> None:
        """Reset fields and options to their defaults, one after the other."""
        place = 0
        while self._has_time:
            candidates = list(_simpler(self.best.scenario))
            if place >= len(candidates):
                return
            count = self._worlds.processes
            # candidates before `place` did not fail, when other fields had other values
            if not self._take_first(iter(candidates[place : place + count])):
                place += count


def _in_some_orders(candidates: Sequence[Scenario]) -> Iterator[Scenario]:
    """Each candidate with its scheduler seed, then with two others: without the dropped action, the
    same seed leads to another order of events.
    """
    yield from candidates
    for shift in (1, 2):
        for each in candidates:
            yield replace(each, order=each.order + shift)


def _with_gaps(scenario: Scenario, pieces: int) -> Iterator[Scenario]:
    actions = scenario.actions
    edges = [len(actions) * piece // pieces for piece in range(pieces + 1)]
    for start, end in reversed(list(itertools.pairwise(edges))):
        if end > start:
            yield replace(scenario, actions=_without(actions, start, end))


def _simpler(scenario: Scenario) -> Iterator[Scenario]:
    usual = {
        name: value
        for name, value in DEFAULT_OPTIONS.items()
        if scenario.options.get(name) != value
    }
    if len(usual) > 1 and "models" not in usual:
        yield replace(scenario, options={**scenario.options, **usual})
    for name, value in usual.items():
        if name != "models" or all(getattr(each, "model", "m") == "m" for each in scenario.actions):
            yield replace(scenario, options={**scenario.options, name: value})
    for place, action in enumerate(scenario.actions):
        for changed in _simpler_actions(action):
            yield replace(
                scenario,
                actions=(*scenario.actions[:place], changed, *scenario.actions[place + 1 :]),
            )
    yield from _simpler_times(scenario)


def _simpler_actions(action: Action) -> Iterator[Action]:
    if isinstance(action, Branch | Call):
        return
    different = {
        each.name: each.default
        for each in fields(action)
        if each.default is not MISSING and getattr(action, each.name) != each.default
    }
    if len(different) > 1:
        yield replace(action, **different)
    for name, value in different.items():
        yield replace(action, **{name: value})
    if isinstance(action, Turn):
        for name in ("tokens", "max_tokens"):
            if name in different and getattr(action, name) // 2 > different[name]:
                yield replace(action, **{name: getattr(action, name) // 2})
    elif isinstance(action, Trouble) and action.number > 1:
        yield replace(action, number=action.number // 2)


def _simpler_times(scenario: Scenario) -> Iterator[Scenario]:
    """With shorter waits, and with rounded times."""
    actions = scenario.actions
    for place, action in enumerate(actions):
        wait = action.at - (actions[place - 1].at if place else 0.0)
        for shorter in (0.0, float(f"{wait / 4:.1g}")):
            if shorter < wait * 0.7:
                shift = shorter - wait
                later = tuple(
                    replace(each, at=round(each.at + shift, 6)) for each in actions[place:]
                )
                yield replace(scenario, actions=(*actions[:place], *later))
    rounded = tuple(replace(each, at=float(f"{each.at:.3g}")) for each in actions)
    if rounded != actions and list(rounded) == sorted(rounded, key=lambda each: each.at):
        yield replace(scenario, actions=rounded)
