"""All scenarios by name."""

from __future__ import annotations

from holdfast.errors import HoldfastError
from holdfast_bench.scenario import Scenario
from holdfast_bench.scenarios import (
    agents,
    front,
    growth,
    loop_lag,
    memory,
    next_turn,
    overhead,
    peers,
    prefill,
    resident,
    reuse,
    salvage,
    saving,
    stall,
    start,
    streams,
)

SCENARIOS: dict[str, Scenario] = {
    module.SCENARIO.name: module.SCENARIO
    for module in (
        overhead,
        front,
        peers,
        prefill,
        streams,
        stall,
        start,
        next_turn,
        memory,
        resident,
        reuse,
        agents,
        salvage,
        saving,
        growth,
        loop_lag,
    )
}


def scenarios_of(names: list[str]) -> list[Scenario]:
    """The named scenarios; "all" is every one. Raises HoldfastError."""
    if names == ["all"]:
        return list(SCENARIOS.values())
    unknown = [name for name in names if name not in SCENARIOS]
    if unknown:
        raise HoldfastError(f"unknown scenario {unknown[0]!r}; there are: {', '.join(SCENARIOS)}")
    return [SCENARIOS[name] for name in names]
