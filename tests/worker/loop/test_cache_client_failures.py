"""A step that raises commits nothing. Through a whole worker with a tiny model."""

from __future__ import annotations

import pytest

from holdfast.wire.commands import Command
from holdfast.wire.events import FinishReason
from tests.fakes.caching_worker import (
    CachingWorker,
    FailingOnce,
    answer_alone,
    greedy,
    random_prompt,
)
from tests.fakes.script_inbox import cancel
from tests.fakes.slow import slow


class FailingAhead(FailingOnce):
    @property
    def runs_ahead(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", FailingOnce),
        ("llama", FailingAhead),
        ("qwen3_next", FailingOnce),
        *slow(("qwen3_next", FailingAhead)),
    ],
)
def test_a_failing_step_commits_nothing(name: str, engine: type[FailingOnce]) -> None:
    subject = CachingWorker(name, engine=engine)
    assert isinstance(subject.engine, FailingOnce)
    # the step that ends the prompt and completes its first blocks
    subject.engine.fails_at = subject.engine.collected + 5
    kept: list[int] = []

    def look() -> None:
        kept.append(subject.index.figures().kept_tokens)

    inbox = subject.serve([[greedy("a", random_prompt(300), max_tokens=40)]], on_receive=look)
    assert inbox.finished("a").reason is FinishReason.LENGTH
    # from the steps before it; the rest when the request, prefilled alone, has ended
    assert max(kept[:-2]) <= 256
    assert subject.index.figures().kept_tokens == 339


@pytest.mark.parametrize("engine", [FailingOnce, FailingAhead])
@pytest.mark.parametrize("failing", [1, 3, 5])
def test_a_request_cancelled_while_failing_commits_nothing(
    failing: int, engine: type[FailingOnce]
) -> None:
    """A request that arrives at the same moment does not get the rest of the cancelled one."""
    subject = CachingWorker(engine=engine)
    assert isinstance(subject.engine, FailingOnce)
    subject.engine.fails_at = subject.engine.collected + failing
    script: list[list[Command]] = [[greedy("a", random_prompt(300), max_tokens=40)]]
    script += [[]] * (failing - 1)
    script += [[cancel("a"), greedy("b", random_prompt(300))]]
    inbox = subject.serve(script)
    assert tuple(inbox.tokens("b")) == answer_alone("llama", random_prompt(300), 6)
    assert inbox.finished("b").reason is FinishReason.LENGTH
