"""Chooses the contenders and models of scenarios."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_bench.contenders import Contender, is_installed, peers_of
from holdfast_bench.run import Item
from holdfast_bench.scenario import Scenario

AS_INSTALLED = "mlx_lm-as-installed"


def item_for(
    scenario: Scenario,
    subject: Contender,
    *,
    others: Sequence[Contender] = (),
    peers: Sequence[str] | None = None,
    model: str = "",
    case: str = "",
) -> Item:
    """One scenario with its contenders: the subject, the named peers and `others`.

    peers: None means the installed ones of the scenario, and mlx_lm.server as installed in short
    scenarios. Raises HoldfastError.
    """
    missing = (
        [] if peers is not None else [each for each in scenario.peers if not is_installed(each)]
    )
    usual = [
        *filter(is_installed, scenario.peers),
        *([AS_INSTALLED] if scenario.as_installed_too else []),
    ]
    names = list(peers) if peers is not None else usual
    if subject.is_ours_to_start:
        subject = replace(subject, command=(*subject.command, *scenario.options))
    contenders = {each.label: each for each in (subject, *peers_of(names), *others)}
    if scenario.uses_store:
        contenders = {label: each.storing() for label, each in contenders.items()}
    return Item(
        scenario=scenario,
        contenders=tuple(contenders.values()),
        model=model,
        only=case,
        not_installed=tuple(missing),
    )


def models_of(scenario: Scenario, wanted: str, *, is_served: bool = False) -> tuple[str, ...]:
    """The models to measure: the wanted one, or the scenario's.

    is_served: the server already runs, with its own model.
    """
    return (wanted,) if wanted or is_served else (scenario.model, *scenario.more_models)
