"""All scenarios, with their models and contenders."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.errors import HoldfastError
from holdfast_bench.contenders import Contender, holdfast, is_installed, peers_of
from holdfast_bench.run import Item
from holdfast_bench.scenario import Scale, Scenario
from holdfast_bench.scenarios import (
    agents,
    growth,
    memory,
    next_turn,
    overhead,
    prefill,
    reuse,
    saving,
    speculation,
    stall,
    start,
    streams,
)

_MODULES = (
    *(overhead, prefill, streams, speculation, stall, start),
    *(next_turn, memory, reuse, agents, saving, growth),
)
SCENARIOS: dict[str, Scenario] = {module.SCENARIO.name: module.SCENARIO for module in _MODULES}


def items_of(
    names: Sequence[str],
    scale: Scale = "normal",
    *,
    peers: Sequence[str] | None = None,
    others: Sequence[Contender] = (),
    model: str = "",
    case: str = "",
) -> list[Item]:
    """The named scenarios, or "all", on their models or this one: this Holdfast, the named peers
    and `others`.

    peers: None means the installed ones of the scenario. case: part of the names of cases. Raises
    HoldfastError.
    """
    if unknown := [name for name in names if name not in (*SCENARIOS, "all")]:
        raise HoldfastError(f"unknown scenario {unknown[0]!r}; there are: {', '.join(SCENARIOS)}")
    items = []
    for scenario in map(SCENARIOS.__getitem__, SCENARIOS if "all" in names else names):
        usual = [peer for peer in scenario.peers if is_installed(peer)]
        contenders = [holdfast(), *peers_of(usual if peers is None else peers), *others]
        if scenario.uses_store:
            contenders = [each.storing() for each in contenders]
        cases = tuple(each for each in scenario.cases(scale) if case in each.name)
        items += [
            Item(scenario=scenario, model=name, contenders=tuple(contenders), cases=cases)
            for name in ((model,) if model else (scenario.model, *scenario.more_models))
        ]
    return items
