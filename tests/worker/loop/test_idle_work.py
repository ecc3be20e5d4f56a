"""Prefilling ahead on a real worker: only while idle, without delaying requests or losing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from holdfast.wire.commands import ReadAhead, ReadAheadRun, SequenceRequest
from holdfast.wire.events import FinishReason
from holdfast.wire.requests import TokenIds
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.engine import Engine
from holdfast.worker.loop.idle_work import MOST_WAITING
from tests.fakes.caching_worker import CachingWorker, RunningAhead, greedy, random_prompt
from tests.fakes.script_inbox import cancel
from tests.fakes.slow import slow

PROMPT, TAIL = random_prompt(100), random_prompt(300, "tail")
NEW = random_prompt(10, "new")
CASES = [
    (Engine, "llama"),
    (RunningAhead, "llama"),
    (Engine, "gemma3_text"),
    (RunningAhead, "qwen3_next"),
    *slow((RunningAhead, "gemma3_text"), (Engine, "qwen3_next")),
]


def ahead(
    name: str, prompt: Sequence[int] = PROMPT + TAIL, *, known: int = len(PROMPT), **more: object
) -> SequenceRequest:
    return greedy(name, prompt, max_tokens=0, read_ahead=ReadAhead(known_tokens=known), **more)


def begun(*names: str, model: str = "llama", engine: type[Engine] = Engine) -> CachingWorker:
    """A worker that has answered a prompt and receives idle work."""
    worker = CachingWorker(model, engine=engine)
    worker.send(greedy("first", PROMPT))
    worker.run_to_end()
    worker.send(*(ahead(name, PROMPT + random_prompt(300, name)) for name in names))
    return worker


def reading(worker: CachingWorker) -> list[str]:
    """The requests with a span in the running step."""
    dispatched = worker.loop._step_under_way
    return [] if dispatched is None else [span.request_id for span in dispatched.plan.spans]


@pytest.mark.parametrize(("engine", "model"), CASES)
def test_the_next_turn_starts_after_the_tokens_prefilled_ahead(
    engine: type[Engine], model: str
) -> None:
    worker = begun(engine=engine, model=model)
    worker.send(ahead("ahead"))
    worker.run_to_end()
    assert worker.inbox.finished("ahead").reason is FinishReason.LENGTH
    worker.send(greedy("next", PROMPT + TAIL + NEW))
    worker.run_to_end()
    worker.check_answer("next")
    report = worker.inbox.finished("next").cache_report
    assert report.cached_tokens == len(PROMPT + TAIL)
    # some start from a state before the last token
    assert len(TAIL) <= report.read_ahead_tokens <= len(TAIL) + 1


@pytest.mark.parametrize(("engine", "model"), CASES)
def test_a_new_request_runs_immediately_and_takes_over_prefilled_tokens(
    engine: type[Engine], model: str
) -> None:
    worker = begun(engine=engine, model=model)
    worker.send(ahead("ahead"))
    for _ in range(3):
        worker.step()
    assert reading(worker) == ["ahead"]
    read = worker.loop._ledger["ahead"].prefilled_tokens
    worker.send(greedy("next", PROMPT + TAIL + NEW))
    worker.step()
    assert reading(worker) == ["next"]
    worker.run_to_end()
    worker.check_answer("next")
    assert worker.inbox.finished("next").cache_report.cached_tokens >= read > len(PROMPT)
    assert worker.inbox.finished("ahead").reason is FinishReason.CANCELLED, (
        "the conversation has gone on"
    )


@pytest.mark.parametrize("engine", [Engine, RunningAhead])
def test_idle_work_resumes_after_an_unrelated_request(engine: type[Engine]) -> None:
    worker = begun(engine=engine)
    worker.send(ahead("ahead"))
    for _ in range(4):
        worker.step()
    worker.send(greedy("stranger", random_prompt(80, "other"), max_tokens=12))
    while "stranger" in worker.open():
        worker.step()
        assert "ahead" not in reading(worker) or "stranger" not in worker.open()
    worker.run_to_end()
    assert worker.inbox.finished("ahead").reason is FinishReason.LENGTH
    read = worker.loop.statistics()
    assert read.cache is not None
    assert read.cache.read_ahead_tokens <= len(TAIL) + 8, (
        "what was read before the stranger came was read again"
    )


def test_idle_work_waits_until_all_requests_have_ended() -> None:
    worker = begun()
    worker.send(greedy("long", random_prompt(80, "other"), max_tokens=20), ahead("ahead"))
    while "long" in worker.open():
        assert reading(worker) in ([], ["long"])
        worker.step()
    worker.run_to_end()
    assert worker.ended()[-1] == "ahead"


def test_the_newest_conversation_is_first_and_the_oldest_dropped() -> None:
    names = [f"ahead{number}" for number in range(MOST_WAITING + 2)]
    worker = begun(*names)
    worker.run_to_end()
    reasons = {name: worker.inbox.finished(name).reason for name in names}
    assert [name for name in names if reasons[name] is FinishReason.CANCELLED] == names[:2]
    assert [name for name in worker.ended() if name in names[2:]] == names[:1:-1]


def test_an_idle_step_is_no_longer_than_the_stall_time() -> None:
    worker = begun()
    # seconds per token: 16 tokens take a chunk's maximum
    worker.loop._scheduler._cost_model._prompt_trend._mean = 0.25 / 16.5
    worker.send(ahead("ahead"))
    worker.step()
    assert [span.tokens for span in worker.loop._step_under_way.plan.spans] == [16]  # type: ignore[union-attr]


def test_idle_work_is_not_charged_to_a_client() -> None:
    worker = begun()
    before = worker.loop.statistics()
    worker.send(ahead("ahead"))
    worker.step()
    during = worker.loop.statistics()
    worker.run_to_end()
    after = worker.loop.statistics()
    assert (during.running, during.queued) == (0, 0)
    assert (after.prompt_tokens, after.cached_tokens, after.finished) == (
        before.prompt_tokens,
        before.cached_tokens,
        before.finished,
    )
    assert after.cache is not None
    assert after.cache.read_ahead_tokens == len(TAIL)


def test_idle_work_that_does_not_fit_into_memory_is_dropped() -> None:
    worker = CachingWorker(budget_tokens=200)
    worker.send(ahead("too much", PROMPT + TAIL, known=0))
    worker.run_to_end()
    assert worker.inbox.finished("too much").reason is FinishReason.CANCELLED


def test_another_tenants_turn_does_not_end_idle_work() -> None:
    worker = begun()
    worker.send(ahead("ahead", tenant="a"), greedy("other", PROMPT + TAIL + NEW, tenant="b"))
    worker.run_to_end()
    assert worker.inbox.finished("ahead").reason is FinishReason.LENGTH


def test_waiting_and_running_idle_work_can_be_cancelled() -> None:
    worker = begun("one", "two")
    worker.step()
    assert reading(worker) == ["two"]
    worker.send(cancel("two"), cancel("one"))
    worker.run_to_end()
    assert {worker.inbox.finished(name).reason for name in ("one", "two")} == {
        FinishReason.CANCELLED
    }
    assert worker.step() is False


def test_closing_a_session_cancels_its_idle_work() -> None:
    worker = begun()
    worker.send(ahead("ahead", session_id="s"), ahead("waits", session_id="s"))
    worker.step()
    worker.send(SessionCommand(operation="close", tenant="", session_id="s", forget=True))
    assert {worker.inbox.finished(name).reason for name in ("ahead", "waits")} == {
        FinishReason.CANCELLED
    }


def test_a_shutdown_ends_waiting_and_running_requests() -> None:
    worker = begun("one", "two")
    worker.step()
    worker.end()
    assert {worker.inbox.finished(name).reason for name in ("one", "two")} == {
        FinishReason.CANCELLED
    }


def test_preempted_sequences_count_as_queued() -> None:
    names = [f"ahead{number}" for number in range(MOST_WAITING)]
    worker = begun(*names)
    worker.step()
    # while another one is prefilled
    worker.send(ahead("newest", PROMPT + random_prompt(300, "newest")))
    worker.send(greedy("stranger", random_prompt(20, "stranger")))
    worker.run_to_end()
    assert [
        name for name in names if worker.inbox.finished(name).reason is FinishReason.CANCELLED
    ] == names[:1]


def test_tokens_that_an_earlier_worker_prefilled_ahead_count_once(tmp_path: Path) -> None:
    worker = CachingWorker(folder=tmp_path)
    worker.send(greedy("first", PROMPT + TAIL))
    worker.run_to_end()
    worker.end()
    worker = CachingWorker(folder=tmp_path)
    worker.send(ReadAheadRun(tenant="", token_ids=TokenIds.of(PROMPT + TAIL), start=len(PROMPT)))
    for name in ("next", "again"):
        worker.send(greedy(name, PROMPT + TAIL + NEW))
        worker.run_to_end()
    assert worker.inbox.finished("next").cache_report.disk_tokens == len(PROMPT + TAIL)
    assert worker.inbox.finished("next").cache_report.read_ahead_tokens == len(TAIL)
    assert worker.inbox.finished("again").cache_report.read_ahead_tokens == 0
    worker.end()


def test_evicted_tokens_do_not_count_as_prefilled_ahead() -> None:
    worker = CachingWorker()
    worker.send(ReadAheadRun(tenant="", token_ids=TokenIds.of(PROMPT + TAIL), start=len(PROMPT)))
    for name in ("next", "again"):
        worker.send(greedy(name, PROMPT + TAIL + NEW))
        worker.run_to_end()
    assert worker.inbox.finished("again").cache_report.cached_tokens > len(PROMPT + TAIL)
    assert [
        worker.inbox.finished(name).cache_report.read_ahead_tokens for name in ("next", "again")
    ] == [
        0,
        0,
    ]
