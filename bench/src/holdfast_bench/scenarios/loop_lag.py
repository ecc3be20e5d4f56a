"""A session of 100,000 tokens beside which others are to be answered: how late the front's event
loop comes round.

The lag is what the front itself measures by its ticking task, asked for after each request: while
the request was received, parsed, rendered, tokenized, sent to the worker, admitted and answered.
The first one is read whole; the others are next turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_bench.answers import Answer
from holdfast_bench.load import Ask, Message
from holdfast_bench.memory_use import metric_values
from holdfast_bench.metrics import shown
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial, errors_of

MOST_SECONDS = 0.02
_TICK_SECONDS = 0.002  # finer than it is in use: a tick costs more than it finds there
_PREFIX = "holdfast_"
_LAG, _BUSY = "event_loop_lag_seconds", "event_loop_busy_seconds"
_MESSAGE_TOKENS = 500
_ANSWER_TOKENS = 8


def _cases(scale: Scale) -> Sequence[Case]:
    context, turns = {"quick": (5000, 1), "normal": (100_000, 3), "full": (100_000, 12)}[scale]
    return [
        Case(
            name=f"a session of {context} tokens",
            settings={"context_tokens": context, "turns": turns},
            rounds=1,
        )
    ]


async def _measure(trial: Trial) -> Sample:
    server = await trial.stage.server(trial.contender)
    if _PREFIX + _LAG not in await metric_values(server):
        return Sample(errors=[f"the server does not tell {_PREFIX}{_LAG}"])
    # odd: the last one is the user's
    count = trial.settings["context_tokens"] // _MESSAGE_TOKENS | 1
    messages: list[Message] = [
        {
            "role": ("user", "assistant")[number % 2],
            "content": trial.text(_MESSAGE_TOKENS, f"said {number}"),
        }
        for number in range(count)
    ]
    answers, told = list[Answer](), list[dict[str, float]]()
    for turn in range(1 + trial.settings["turns"]):
        await metric_values(server)  # what was before does not count
        answers.append(
            await server.client.ask(Ask(messages=tuple(messages), max_tokens=_ANSWER_TOKENS))
        )
        told.append(await metric_values(server))
        # a slow machine may not read it all in time; what was before is measured all the same
        if not answers[-1].is_good:
            break
        words = trial.text(20, f"turn {turn}")
        messages += [
            {"role": "assistant", "content": answers[-1].text},
            {"role": "user", "content": words},
        ]
    sample = Sample(errors=errors_of(answers), answers=[answer.text for answer in answers])
    good = [answer for answer in answers if answer.is_good]
    sample.metrics = {
        "context_tokens": [float(answer.prompt_tokens) for answer in good[-1:]],
        "first_token_seconds @ first": [answer.first_seconds for answer in good[:1]],
        "first_token_seconds @ next turns": [answer.first_seconds for answer in good[1:]],
    }
    for name in (_LAG, _BUSY):
        seconds = [values[_PREFIX + name] for values in told]
        sample.metrics |= {f"{name} @ first": seconds[:1], f"{name} @ next turns": seconds[1:]}
    return sample


def _judge(case: CaseResult) -> list[str]:
    lines = []
    for kind, what in ((_LAG, "Longest lag"), (_BUSY, "Longest work of the loop's own")):
        found = [
            value
            for name in case.metric_names()
            if name.startswith(kind)
            for value in case.contenders[0].pooled(name)
        ]
        if found:
            verdict = "met" if max(found) <= MOST_SECONDS else "NOT MET"
            lines.append(
                f"{what}: {shown(max(found), 's')}, to be at most {shown(MOST_SECONDS, 's')}: "
                f"{verdict}"
            )
    return lines


SCENARIO = Scenario(
    name="loop-lag",
    summary="how late the front's event loop comes round beside a session of 100,000 tokens",
    model="qwen3-9m-128k",
    cases=_cases,
    measure=_measure,
    judge=_judge,
    peers=(),
    rounds=1,
    against_itself="nobody",
    options=("--set", f"server.loop_tick_seconds={_TICK_SECONDS}"),
    needs_start=True,
)
