"""All scenarios by name."""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast_bench.scenario import Scenario
from holdfast_bench.scenarios import (
    agents,
    growth,
    memory,
    next_turn,
    overhead,
    peers,
    prefill,
    reuse,
    saving,
    speculation,
    stall,
    start,
    streams,
)

SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        overhead.SCENARIO,
        peers.SCENARIO,
        peers.FOUR_BIT_SCENARIO,
        prefill.SCENARIO,
        streams.SCENARIO,
        speculation.SCENARIO,
        stall.SCENARIO,
        start.SCENARIO,
        next_turn.SCENARIO,
        memory.SCENARIO,
        reuse.SCENARIO,
        agents.SCENARIO,
        saving.SCENARIO,
        growth.SCENARIO,
    )
}


def scenarios_of(names: list[str]) -> list[Scenario]:
    """The named scenarios. "all": those that do not repeat cases of others. Raises HoldfastError."""
    if names == ["all"]:
        return [scenario for scenario in SCENARIOS.values() if not scenario.only_by_name]
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise HoldfastError(f"unknown scenario {unknown[0]!r}; there are: {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names]
