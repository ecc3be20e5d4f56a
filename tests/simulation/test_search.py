from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from concurrent.futures import Future

from tests.simulation.actions import (
    Branch,
    Call,
    KeyChange,
    Scenario,
    Trouble,
    Turn,
    scenario_of,
)
from tests.simulation.outcomes import BEGAN, Failure, Result, Task
from tests.simulation.planted import FAULTS, wrong_texts
from tests.simulation.search import MOST_ACTIONS, Search, Shrinker, Shrunk, mutated
from tests.simulation.stories import literal, regression, story

SCENARIOS = [scenario_of(seed) for seed in range(40)]


def violated(*, at: float = 0.0) -> Result:
    failure = Failure("the oracle's tokens", "choice 0 of a0-1.0 is 'x'", at=BEGAN + at)
    return Result(failures=(failure,), events=100)


class FakeWorlds:
    """Worlds whose results come from a function of the scenario."""

    processes = 3

    def __init__(self, result_of: Callable[[Scenario], Result]) -> None:
        self.result_of = result_of

    def submit(self, task: Task) -> Future[Result | None]:
        future: Future[Result | None] = Future()
        future.set_result(self.result_of(task.scenario))
        return future


def shrink(scenario: Scenario, result_of: Callable[[Scenario], Result]) -> Shrunk:
    worlds = FakeWorlds(result_of)
    return Shrinker(worlds, scenario, result_of(scenario), seconds=60).shrink()  # type: ignore[arg-type]


def test_a_literal_evaluates_to_the_same_scenario() -> None:
    for scenario in SCENARIOS:
        assert eval(literal(scenario)) == scenario
    kinds = {type(action) for scenario in SCENARIOS for action in scenario.actions}
    assert kinds == {Branch, Call, KeyChange, Trouble, Turn}


def test_a_literal_omits_defaults() -> None:
    scenario = Scenario(
        order=3,
        actions=(Turn(at=0.0, agent="a0"), Trouble(at=1.5, kind="worker dies", number=2)),
        options={"kv_bits": "8", "has_store": True},
    )
    assert literal(scenario) == (
        "Scenario(\n"
        "    order=3,\n"
        "    actions=(\n"
        '        Turn(at=0.0, agent="a0"),\n'
        '        Trouble(at=1.5, kind="worker dies", number=2),\n'
        "    ),\n"
        '    options={"kv_bits": "8"},\n'
        ")"
    )


def test_mutated_scenarios_are_valid_and_reproducible() -> None:
    def changes() -> list[Scenario]:
        dice = random.Random(5)
        scenario = SCENARIOS[0]
        found = []
        for _ in range(300):
            scenario = mutated(dice, scenario, dice.choice(SCENARIOS))
            found.append(scenario)
        return found

    first = changes()
    assert first == changes()
    assert len({literal(each) for each in first}) > 200
    for each in first:
        assert len(each.actions) <= MOST_ACTIONS
        times = [action.at for action in each.actions]
        assert times == sorted(times)
        models = {action.model for action in each.actions if isinstance(action, Turn | Trouble)}
        assert models <= set(each.options["models"])


def test_the_search_is_guided_by_coverage_and_deterministic() -> None:
    def result_of(scenario: Scenario) -> Result:
        kinds = [action.kind for action in scenario.actions if isinstance(action, Trouble)]
        return Result(states=frozenset(itertools.pairwise(kinds)))

    def searched(first: int, *, processes: int) -> list[str]:
        """The scenarios of 160 worlds, of which so many run at once, and the last one ends first."""
        search = Search(first)
        texts: list[str] = []
        running: list[tuple[int, Scenario]] = []
        results: dict[int, tuple[Scenario, Result]] = {}
        while len(results) < 160:
            while len(running) < processes and len(texts) < 160:
                chosen = search.scenario(len(texts), results)
                if chosen is None:
                    break
                running.append((len(texts), chosen[1]))
                texts.append(literal(chosen[1]))
            number, scenario = running.pop()
            results[number] = scenario, result_of(scenario)
        return texts

    texts = searched(100, processes=1)
    assert texts == searched(100, processes=7) == searched(100, processes=50)
    assert texts != searched(200, processes=1)
    fresh = {literal(scenario_of(100 + number)) for number in range(160)}
    assert 90 < len(fresh & set(texts)) < 140


def test_a_failure_is_shrunk_to_the_actions_and_fields_that_it_needs() -> None:
    def result_of(scenario: Scenario) -> Result:
        """Fails if a worker dies after a turn of an agent with an answer of two tokens or more."""
        turns = [
            action.at
            for action in scenario.actions
            if isinstance(action, Turn)
            and action.max_tokens >= 2
            and action.protocol == "responses"
        ]
        deaths = [
            action.at
            for action in scenario.actions
            if isinstance(action, Trouble) and action.kind == "worker dies"
        ]
        if turns and deaths and turns[0] < deaths[-1] and scenario.options["max_running"] < 8:
            return violated(at=deaths[-1] + 1.0)
        return Result(events=100)

    found = next(
        scenario
        for scenario in map(scenario_of, range(1000))
        if len(scenario.actions) > 30 and result_of(scenario).failures
    )
    shrunk = shrink(found, result_of)
    kinds = [type(action) for action in shrunk.scenario.actions]
    assert kinds == [Turn, Trouble]
    turn, trouble = shrunk.scenario.actions
    assert isinstance(turn, Turn) and isinstance(trouble, Trouble)
    assert turn.max_tokens == 20 and turn.protocol == "responses"
    assert (turn.reader, turn.choices, turn.timeout_seconds) == ("reads", 1, None)
    assert (trouble.kind, trouble.number) == ("worker dies", 0)
    text = literal(shrunk.scenario)
    assert text.count("\n") <= 8 and "max_running" in text and "kv_bits" not in text


def test_shrinking_keeps_the_violated_invariant() -> None:
    def result_of(scenario: Scenario) -> Result:
        if len(scenario.actions) > 5:
            return violated(at=1e9)
        return Result(failures=(Failure("progress", "another", at=BEGAN),), events=100)

    shrunk = shrink(SCENARIOS[0], result_of)
    assert len(shrunk.scenario.actions) == 6
    assert shrunk.result.failures[0].invariant == "the oracle's tokens"


def test_shrinking_tries_other_scheduler_seeds() -> None:
    def result_of(scenario: Scenario) -> Result:
        fails = len(scenario.actions) == len(SCENARIOS[0].actions) or scenario.order % 3 == 1
        return violated(at=1e9) if fails and scenario.actions else Result(events=100)

    assert len(shrink(SCENARIOS[0], result_of).scenario.actions) == 1


def test_shrinking_stops_at_its_time_limit() -> None:
    now = iter(range(1000))
    worlds = FakeWorlds(lambda scenario: violated(at=1e9))
    shrinker = Shrinker(
        worlds,  # type: ignore[arg-type]
        SCENARIOS[0],
        violated(at=1e9),
        seconds=5,
        clock=lambda: next(now),
    )
    assert shrinker.shrink().worlds <= 5


def test_a_story_shows_requests_faults_and_the_violation() -> None:
    scenario = Scenario(
        order=1,
        actions=(
            Turn(at=0.0, agent="a0", tokens=300, reader="breaks"),
            Branch(at=0.5, agent="a1", source="a0", keep=2),
            Trouble(at=1.0, kind="step fails", number=2),
            Call(at=2.0, method="GET", path="/health"),
        ),
        options={"kv_bits": "8"},
    )
    result = Result(
        failures=(Failure("ends exactly once", "a0-1.0 has no end", at=BEGAN + 3.0),),
        story=((BEGAN + 0.01, "a0 asks m (/v1/messages, request a0-1.0)"),),
    )
    assert story(scenario, result).splitlines() == [
        '  options: {"kv_bits": "8"}',
        "       0.000 s  a0 gets a turn: tokens 300, reader breaks",
        "       0.010 s  a0 asks m (/v1/messages, request a0-1.0)",
        "       0.500 s  a1 goes on from 2 messages of a0",
        "       1.000 s  trouble: step fails (number 2)",
        "       2.000 s  somebody calls GET /health",
        "       3.000 s  ends exactly once: a0-1.0 has no end",
    ]


def test_a_long_story_keeps_all_faults_and_the_agents_in_the_violation() -> None:
    lines = tuple((BEGAN + place, f"a{place % 7} asks m") for place in range(500))
    result = Result(
        failures=(Failure("ends exactly once", "a3-9.0 has no end", at=BEGAN + 490.0),), story=lines
    )
    scenario = Scenario(order=1, actions=(Trouble(at=470.0, kind="worker dies"),))
    told = story(scenario, result).splitlines()
    assert len(told) < 80
    early = told[1:-17]
    assert all("a3" in line or "trouble" in line for line in early)
    assert any("trouble" in line for line in told)
    assert "lines more" in told[-17]


def test_a_regression_test_is_code_that_checks_the_scenario() -> None:
    text = regression(SCENARIOS[1], violated().failures[0], was_in="seed 1")
    checked: list[Scenario] = []
    names: dict[str, object] = dict(globals())
    names["Worlds"] = FakeWorlds
    names["check"] = lambda worlds, scenario: checked.append(scenario)
    exec(text, names)
    test = names["test_the_oracle_s_tokens"]
    assert callable(test)
    test(FakeWorlds(lambda scenario: Result()))
    assert checked == [SCENARIOS[1]]


def test_each_planted_fault_applies_to_the_sources() -> None:
    assert len(FAULTS) >= 34
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert wrong_texts() == []
