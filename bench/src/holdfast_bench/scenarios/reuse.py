"""Time to first token of a context that was sent before: repeated, extended, changed, after a
restart, after other contexts.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast_bench.load import Answer, Ask, Message, cached_share, errors_of
from holdfast_bench.results import Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

_ANSWER_TOKENS = 8
_TURN_TOKENS = 64
_OTHERS = 12  # contexts that push the first one out of memory


def _cases(scale: Scale) -> Sequence[Case]:
    contexts = {"quick": (1000,), "normal": (1000, 4000), "full": (1000, 4000, 16000)}[scale]
    cases = []
    for context in contexts:
        pushes_out = scale == "full" and context == contexts[0]
        settings = {"context_tokens": context, "push_out": pushes_out}
        rounds = 1 if context > 4000 else 2
        cases.append(Case(name=f"{context} tokens", settings=settings, rounds=rounds))
    return cases


async def _measure(trial: Trial) -> Sample:
    sample, tokens = Sample(), trial.settings["context_tokens"]
    context = trial.text(tokens, "context")
    cold = await _step(trial, sample, "cold", _said(context))
    await _step(trial, sample, "exact repeat", _said(context))
    reply: Message = {"role": "assistant", "content": cold.text}
    turn: Message = {"role": "user", "content": trial.text(_TURN_TOKENS, "turn")}
    await _step(trial, sample, "extended by a turn", (*_said(context), reply, turn))
    for percent in (90, 50):
        changed = _changed(trial, context, percent)
        await _step(trial, sample, f"diverging at {percent} %", _said(changed))
    if trial.settings["push_out"]:
        for number in range(_OTHERS):
            await _ask(trial, _said(trial.text(tokens, f"other {number}")))
        await _step(trial, sample, f"after {_OTHERS} others", _said(context))
    await trial.stage.restart(trial.contender)
    await _step(trial, sample, "after a restart", _said(context))
    return sample


async def _step(trial: Trial, sample: Sample, name: str, messages: tuple[Message, ...]) -> Answer:
    answer = await _ask(trial, messages)
    sample.errors += errors_of([answer])
    sample.answers.append(answer.text)
    if answer.is_good:
        sample.metrics[f"first_token_seconds @ {name}"] = [answer.first_seconds]
        sample.metrics[f"cached_share @ {name}"] = cached_share([answer])
    return answer


async def _ask(trial: Trial, messages: tuple[Message, ...]) -> Answer:
    client = await trial.client()
    return await client.ask(Ask(messages=messages, max_tokens=_ANSWER_TOKENS))


def _said(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def _changed(trial: Trial, context: str, percent: int) -> str:
    """The text with a different ending from this percentage on."""
    cut = context.rfind(" ", 0, len(context) * percent // 100)
    rest = trial.settings["context_tokens"] * (100 - percent) // 100
    return f"{context[:cut]} {trial.text(rest, f'changed {percent}')}"


SCENARIO = Scenario(
    name="reuse",
    summary="a context sent again: repeated, extended, diverging, after a restart",
    model="qwen3-9m",
    cases=_cases,
    measure=_measure,
    uses_store=True,
    rounds=2,
)
