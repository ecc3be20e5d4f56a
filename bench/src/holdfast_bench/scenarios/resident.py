"""Agents that are all alive and take turns: what their states take in memory and on disk, over the
sum of those states.

A warm-up of the same length comes first, so that what reading such a context needs besides its
state is there already; what the server keeps of the warm-up stays, and is in no figure but the
growth since the server was idle: that has what allocators keep of freed memory in it, the other may
be filled with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from holdfast_bench.answers import Answer
from holdfast_bench.load import Ask, Message
from holdfast_bench.memory_use import ToldMemory, resident_bytes, sampled, told_memory
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.scenario import NOT_STARTED_HERE, Case, Scale, Scenario, Trial, errors_of
from holdfast_bench.servers import RunningServer

MOST_OF_THE_STATES = 1.1
_ANSWER_TOKENS = 16
_TURN_TOKENS = 40
_SETTLING_SECONDS = 3.0  # until what was handed to the writing thread is on disk, and let go
_SAMPLING_SECONDS = 0.1
_JUDGED = ("ram_over_states", "peak_ram_over_states", "grown_over_states")
_JUDGED_ON_DISK = "disk_over_states"


def _cases(scale: Scale) -> Sequence[Case]:
    context, prefix, turns = {
        "quick": (600, 600, 1),
        "normal": (8000, 4000, 2),
        "full": (8000, 4000, 6),
    }[scale]
    apart = {"agents": 6, "own_tokens": context, "common_tokens": 0, "turns": turns}
    on_one_prefix = {"agents": 8, "own_tokens": 100, "common_tokens": prefix, "turns": turns}
    return [
        Case(name=f"6 agents of {context} tokens in turn", settings=apart, rounds=1),
        Case(name=f"8 agents on one prefix of {prefix}", settings=on_one_prefix, rounds=1),
    ]


@dataclass(slots=True)
class _Agent:
    messages: list[Message]
    answers: list[Answer] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of its state now."""
        return self.answers[-1].prompt_tokens + self.answers[-1].completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class _Holding:
    """What the server holds at a moment."""

    resident: int
    disk: int
    told: ToldMemory | None

    @property
    def told_bytes(self) -> int:
        return self.told.ram_bytes + self.told.live_bytes if self.told is not None else 0


async def _held(server: RunningServer) -> _Holding:
    told = await told_memory(server, with_live=True)
    return _Holding(resident=await resident_bytes(server), disk=server.store_bytes(), told=told)


async def _measure(trial: Trial) -> Sample:
    server = await trial.stage.restart(trial.contender)
    if server is None:
        return Sample(errors=[NOT_STARTED_HERE])
    settings = trial.settings
    idle = await _held(server)
    warm = _Agent(_begun(trial, settings["common_tokens"] + settings["own_tokens"], "warm-up"))
    await _take_turn(trial, warm)
    await _take_turn(trial, warm)
    await asyncio.sleep(_SETTLING_SECONDS)
    before = await _held(server)
    common = (
        trial.text(settings["common_tokens"], "common") + " " if settings["common_tokens"] else ""
    )
    agents = [
        _Agent(_begun(trial, settings["own_tokens"], f"agent {n}", common))
        for n in range(settings["agents"])
    ]
    async with sampled(partial(_held, server), seconds=_SAMPLING_SECONDS) as seen:
        for _ in range(1 + settings["turns"]):
            for agent in agents:
                await _take_turn(trial, agent)
    answers = [answer for agent in agents for answer in agent.answers]
    if errors := errors_of([*warm.answers, *answers]):
        return Sample(errors=errors)
    await asyncio.sleep(_SETTLING_SECONDS)
    after = await _held(server)
    sample = Sample(answers=[answer.text for answer in answers])
    for step, which in (("cold", slice(1)), ("next turns", slice(1, None))):
        first = [answer.first_seconds for agent in agents for answer in agent.answers[which]]
        sample.metrics[f"first_token_seconds @ {step}"] = first
    if after.told is not None and after.told.kv_bytes_per_token:
        _add_ratios(
            sample, _states_bytes(trial, agents, after.told), before=before, seen=seen, after=after
        )
        all_states = (
            _states_bytes(trial, [*agents, warm], after.told)
            + settings["common_tokens"] * after.told.kv_bytes_per_token
        )
        sample.metrics["grown_from_idle_over_states"] = [
            (after.resident - idle.resident) / all_states
        ]
    return sample


def _begun(trial: Trial, tokens: int, name: str, common: str = "") -> list[Message]:
    return [{"role": "user", "content": common + trial.text(tokens, name)}]


async def _take_turn(trial: Trial, agent: _Agent) -> None:
    client = await trial.client()
    answer = await client.ask(Ask(messages=tuple(agent.messages), max_tokens=_ANSWER_TOKENS))
    agent.answers.append(answer)
    words = trial.text(_TURN_TOKENS, f"{agent.messages[0]['content'][-40:]} {len(agent.answers)}")
    agent.messages += [
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": words},
    ]


def _states_bytes(trial: Trial, agents: Sequence[_Agent], told: ToldMemory) -> float:
    """Of all agents' tokens; those that all have in common once."""
    common = trial.settings["common_tokens"]
    tokens = common + sum(agent.tokens - common for agent in agents)
    return float(tokens * told.kv_bytes_per_token + len(agents) * told.fixed_bytes_per_sequence)


def _add_ratios(
    sample: Sample, states: float, *, before: _Holding, seen: Sequence[_Holding], after: _Holding
) -> None:
    sample.metrics |= {
        "states_bytes": [states],
        "ram_over_states": [(after.told_bytes - before.told_bytes) / states],
        "peak_ram_over_states": [
            (max(each.told_bytes for each in seen) - before.told_bytes) / states
        ],
        "grown_over_states": [(after.resident - before.resident) / states],
        "peak_grown_over_states": [
            (max(each.resident for each in seen) - before.resident) / states
        ],
        "disk_over_states": [(after.disk - before.disk) / states],
    }


def _judge(case: CaseResult) -> list[str]:
    ours = case.contenders[0]
    judged = (*_JUDGED, _JUDGED_ON_DISK) if case.settings["common_tokens"] else _JUDGED
    lines = []
    for name in judged:
        if found := ours.pooled(name):
            verdict = "met" if max(found) <= MOST_OF_THE_STATES else "NOT MET"
            lines.append(
                f"{name.replace('_', ' ')}: {max(found):.3f} ×, to be at most {MOST_OF_THE_STATES} "
                f"×: {verdict}"
            )
    return lines


SCENARIO = Scenario(
    name="resident",
    summary="agents that are all alive and take turns: memory and disk over the sum of their states",
    model="qwen3-30m",
    cases=_cases,
    measure=_measure,
    judge=_judge,
    peers=(),
    uses_store=True,
    rounds=1,
    against_itself="nobody",
    needs_start=True,
)
