"""The commonest request of an agent: the next turn, a few new tokens after a context that the
server has just seen.

Each server and case has a conversation, prefilled before the measurement. A turn contains the text
so far, the answer and a few new words, and generates one token. Turns of Holdfast are compared with
the minimum: an ordinary engine step in another process over the same number of tokens after a context of the same length
and the same pause.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from holdfast_bench.comparison import ratio_of
from holdfast_bench.load import Answer, Ask, Message, cached_share, errors_of
from holdfast_bench.measuring_process import Job, MeasuringProcess
from holdfast_bench.metrics import shown
from holdfast_bench.results import CaseResult, Sample
from holdfast_bench.scenario import Case, Scale, Scenario, Trial

ALLOWED_SECONDS, ALLOWED_SECONDS_PER_TOKEN = 0.005, 0.2e-6  # for a turn, in addition to the step
MOST_OF_A_PEER = 0.75
_FEWEST_NEW, _MOST_NEW = 4, 10
# of new text; the previous answer adds one, and two may merge into one
_WORDS_TOKENS = range(_FEWEST_NEW, _MOST_NEW - 1)
_TRIES = 20
_PAUSE_SECONDS = 0.05  # before each turn
_FLOOR = "step"


class StepJob(Job, frozen=True, kw_only=True):
    """The job of the process that measures steps."""

    context_tokens: int
    # before each step, as before each turn: caches get cold and threads fall asleep
    pause_seconds: float


def _cases(scale: Scale) -> Sequence[Case]:
    contexts, chats, turns = {
        "quick": ((500,), (), 3),
        "normal": ((1000, 8000, 24_000), (8000,), 8),
        "full": ((1000, 8000, 24_000, 64_000), (8000, 24_000), 12),
    }[scale]
    cases = []
    for context in contexts:
        for is_chat in (False, True) if context in chats else (False,):
            settings = {"context_tokens": context, "turns": turns, "is_chat": is_chat}
            cases.append(Case(name=f"{context} tokens{', chat' * is_chat}", settings=settings))
    return cases


@dataclass(slots=True)
class _Conversation:
    """A conversation with one server: a growing text, or messages."""

    is_chat: bool
    text: str = ""
    messages: list[Message] = field(default_factory=list)
    turns: int = 0
    prompt_tokens: int = 0

    def begin(self, text: str) -> None:
        self.text, self.messages = text, [{"role": "user", "content": text}]

    def go_on(self, answer: str, words: str) -> None:
        self.turns += 1
        self.text = " ".join(part for part in (self.text, answer, words) if part)
        self.messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": words},
        ]

    def request(self) -> Ask:
        if self.is_chat:
            return Ask(messages=tuple(self.messages), max_tokens=1)
        return Ask(prompt=self.text, max_tokens=1)


async def _prepare(trial: Trial) -> None:
    """Prefill the context, and start the process that measures engine steps."""
    server = await trial.stage.server(trial.contender)
    conversation = _Conversation(is_chat=trial.settings["is_chat"])
    conversation.begin(
        trial.stage.prompts.text(trial.settings["context_tokens"], seed=trial.case.name)
    )
    answer = await server.client.ask(conversation.request())
    if answer.is_good:
        _say(trial, conversation, answer)
        server.conversations[trial.case.name] = conversation
    else:
        # it may still be computing, and the others must not wait for it
        trial.stage.drop(trial.contender, kill=True)
    if trial.contender.label == "holdfast" and _FLOOR not in trial.stage.kept:
        starter = trial.stage.starter
        job = StepJob(
            folder=str(starter.model.folder),
            threads=starter.threads,
            context_tokens=trial.settings["context_tokens"],
            pause_seconds=_PAUSE_SECONDS,
        )
        process = await asyncio.to_thread(MeasuringProcess, "step_process", job)
        trial.stage.kept[_FLOOR] = process


def _say(trial: Trial, conversation: _Conversation, answer: Answer) -> None:
    conversation.prompt_tokens = answer.prompt_tokens
    conversation.go_on(answer.text, _words(trial, f"{trial.case.name}/turn {conversation.turns}"))


def _words(trial: Trial, seed: str) -> str:
    """A few words with the wanted number of tokens, if one of several tries has it."""
    prompts, text = trial.stage.prompts, ""
    for number in range(_TRIES):
        text = prompts.text(_WORDS_TOKENS[-1], seed=f"{seed}/{number}")
        if len(prompts.tokens(f" {text}")) in _WORDS_TOKENS:
            break
    return text


async def _measure(trial: Trial) -> Sample:
    server, answers, new = await trial.stage.server(trial.contender), list[Answer](), list[int]()
    conversation: _Conversation | None = server.conversations.get(trial.case.name)
    if conversation is None:
        return Sample(errors=["the context was not prefilled in time"])
    used = server.use()
    for _ in range(trial.settings["turns"]):
        await asyncio.sleep(_PAUSE_SECONDS)
        before = conversation.prompt_tokens
        answers.append(await server.client.ask(conversation.request()))
        if not answers[-1].is_good:
            return Sample(errors=errors_of(answers))
        _say(trial, conversation, answers[-1])
        new.append(conversation.prompt_tokens - before)
    sample = Sample(answers=[answer.text for answer in answers])
    sample.metrics = {
        "context_tokens": [float(conversation.prompt_tokens)],
        "new_tokens": [float(count) for count in new],
        "first_token_seconds": [answer.first_seconds for answer in answers],
        "request_seconds": [answer.seconds for answer in answers],
        "cached_share": [share for answer in answers for share in cached_share([answer])],
        "cpu_seconds": [(server.use().cpu_seconds - used.cpu_seconds) / len(answers)],
    }
    floor = trial.stage.kept.get(_FLOOR)
    if trial.contender.label == "holdfast" and isinstance(floor, MeasuringProcess):
        measured = await asyncio.to_thread(floor.measure, str(new))
        steps = msgspec.json.decode(measured, type=list[float])
        sample.metrics["step_seconds"] = steps
        pairs = zip(sample.metrics["first_token_seconds"], steps, strict=True)
        sample.metrics["beyond_step_seconds"] = [turn - step for turn, step in pairs]
    return sample


def _judge(case: CaseResult) -> list[str]:
    """Compare the figures with the claims."""
    ours, *others = case.contenders
    lines = []
    if beyond := ours.pooled("beyond_step_seconds"):
        context = statistics.median(ours.pooled("context_tokens"))
        allowed = ALLOWED_SECONDS + ALLOWED_SECONDS_PER_TOKEN * context
        found = statistics.median(beyond)
        limit = f"limit {shown(allowed, 's')} after {context:,.0f} tokens"
        verdict = _verdict(found <= allowed)
        lines.append(f"Beyond an ordinary step: {shown(found, 's')}, {limit}: {verdict}")
    for other in others:
        if (ratio := ratio_of(case, other, "first_token_seconds")) is not None:
            median = ratio.spread.median
            verdict = _verdict(median <= MOST_OF_A_PEER)
            lines.append(f"Over {other.label}: {median:.2f} ×, limit {MOST_OF_A_PEER} ×: {verdict}")
    new = ours.pooled("new_tokens")
    if new and not case.settings["is_chat"] and not _is_within(new):
        wanted = f"{_FEWEST_NEW} to {_MOST_NEW}"
        lines.append(f"Turns had {min(new):.0f} to {max(new):.0f} new tokens, not {wanted}")
    return lines


def _is_within(new: Sequence[float]) -> bool:
    return min(new) >= _FEWEST_NEW and max(new) <= _MOST_NEW


def _verdict(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


SCENARIO = Scenario(
    name="next-turn",
    summary="the next turn: a few new tokens after a long context, compared with an engine step",
    model="holdfast-demo-endless",
    cases=_cases,
    measure=_measure,
    prepare=_prepare,
    judge=_judge,
    peers=("mlx_lm", "llama.cpp"),
    measures_all_noise=True,
)
