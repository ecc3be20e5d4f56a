"""Agents with a common system prompt and growing turns, a restart in the middle, and two resumed
ones.

The trace has the shape of recorded ones, with random words, so that any model can run it. Answers
of the server become part of the history. Tools are described in the system prompt and results are
user messages, which every server accepts.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast_bench.load import Answer, Ask, Message, cached_share, errors_of
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_ANSWER_TOKENS = 32
_RESULT_TOKENS = (40, 220, 90, 400, 60, 150)  # of successive tool results
_TASK_TOKENS = 80
_RESUMED_AGENTS = 2
_TOOLS = ("read_file", "write_file", "search", "run_command", "fetch_page", "list_folder")


def _cases(scale: Scale) -> Sequence[Case]:
    agents, turns, system = {
        "quick": (2, 3, 400),
        "normal": (6, 6, 2000),
        "full": (6, 20, 2000),
    }[scale]
    settings = {"agents": agents, "turns": turns, "system_tokens": system}
    settings["answer_tokens"] = _ANSWER_TOKENS
    rounds = 1 if scale == "full" else 2
    return [Case(name=f"{agents} agents, {turns} turns", settings=settings, rounds=rounds)]


@dataclass(slots=True)
class _Agent:
    number: int
    messages: list[Message]
    answers: list[Answer] = field(default_factory=list)


async def _measure(trial: Trial) -> Sample:
    settings = trial.settings
    system: Message = {"role": "system", "content": _system_prompt(trial)}
    agents = []
    for number in range(settings["agents"]):
        task: Message = {"role": "user", "content": trial.text(_TASK_TOKENS, f"task {number}")}
        agents.append(_Agent(number, [system, task]))
    half = settings["turns"] // 2
    seconds = await _work_together(trial, agents, half)
    await trial.stage.restart(trial.contender)
    seconds += await _work_together(trial, agents, settings["turns"] - half)
    worked = [answer for agent in agents for answer in agent.answers]
    after = [agent.answers[half] for agent in agents]
    for agent in agents[:_RESUMED_AGENTS]:
        await _work(trial, agent, 1)
    resumed = [agent.answers[-1] for agent in agents[:_RESUMED_AGENTS]]
    answers = [*worked, *resumed]
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    if not sample.errors:
        sample.gaps = [gap for answer in worked for gap in answer.gaps()]
        sample.metrics = {
            "total_seconds": [seconds],
            "first_token_seconds": [answer.first_seconds for answer in worked],
            "first_token_seconds @ after the restart": [answer.first_seconds for answer in after],
            "resumed_first_token_seconds": [answer.first_seconds for answer in resumed],
            "cached_share": cached_share(worked),
        }
    return sample


async def _work_together(trial: Trial, agents: Sequence[_Agent], turns: int) -> float:
    """Some turns of all agents; returns the seconds."""
    began = time.perf_counter()
    await asyncio.gather(*(_work(trial, agent, turns) for agent in agents))
    return time.perf_counter() - began


async def _work(trial: Trial, agent: _Agent, turns: int) -> None:
    client = await trial.client()
    for _ in range(turns):
        answer = await client.ask(Ask(messages=tuple(agent.messages), max_tokens=_ANSWER_TOKENS))
        agent.answers.append(answer)
        turn = len(agent.answers)
        tokens = _RESULT_TOKENS[(turn + agent.number) % len(_RESULT_TOKENS)]
        result = trial.text(tokens, f"result {agent.number} {turn}")
        agent.messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"Tool result: {result}"},
        ]


def _system_prompt(trial: Trial) -> str:
    tools = [
        {
            "name": name,
            "description": trial.text(40, name),
            "parameters": {"path": "string", "limit": "integer"},
        }
        for name in _TOOLS
    ]
    described = json.dumps(tools)
    left = trial.settings["system_tokens"] - len(trial.stage.prompts.tokens(described))
    return f"{trial.text(max(left, 16), 'system')}\n\nTools:\n{described}"


SCENARIO = Scenario(
    name="agents",
    summary="6 agents with a common system prompt, growing turns and a restart; 2 resumed agents",
    model="qwen3-9m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=2,
)
