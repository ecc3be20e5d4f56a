"""Parked and running states that other sequences start from: moved, shared, copied and lost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.wire.commands import SequenceRequest
from holdfast.wire.events import CacheOutcome, CacheReport
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.engine.layouts import choose_sharing
from holdfast.worker.kv.layer import SnapshotMismatch
from holdfast.worker.kv.live import LiveBase, LiveState, all_bytes
from holdfast.worker.prefix import live_tier
from holdfast.worker.prefix.lookup import LiveChain
from tests.fakes.architectures import probed
from tests.fakes.caching_worker import (
    CachingWorker,
    FailingOnce,
    RunningAhead,
    greedy,
    make_blocks_small,
    random_prompt,
)
from tests.fakes.script_inbox import cancel


class FailingAhead(FailingOnce, RunningAhead):
    """Both."""


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


def serve(subject: CachingWorker, *requests: SequenceRequest) -> None:
    """Run requests together to their ends and check each answer against its answer alone."""
    subject.send(*requests)
    subject.run_to_end()
    for request in requests:
        subject.check_answer(request.request_id)


def known(subject: CachingWorker, request_id: str) -> tuple[int, ...]:
    return tuple(subject.sent[request_id].prompt_token_ids) + tuple(
        subject.inbox.tokens(request_id)
    )


def parked(subject: CachingWorker) -> list[LiveChain]:
    return subject.cache.live._chains.parked


def rest(subject: CachingWorker) -> None:
    """Ended requests are parked."""
    while subject.step():
        pass


def spoil(chain: LiveChain) -> None:
    assert chain.state is not None
    for leaf in chain.state.leaves:
        for array in leaf.arrays():
            if mx.issubdtype(array.dtype, mx.floating):
                array[...] = math.nan


def report(subject: CachingWorker, request_id: str) -> CacheReport:
    return subject.inbox.finished(request_id).cache_report


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_two_requests_for_one_state_are_both_answered_right(name: str) -> None:
    for cuts in ((0, 0), (2, 0), (1, 3)):
        subject = CachingWorker(name)
        serve(subject, greedy("first", random_prompt(50), max_tokens=6))
        rest(subject)
        before = known(subject, "first")
        forks = [
            before[: len(before) - cut] + random_prompt(4, str(index))
            for index, cut in enumerate(cuts)
        ]
        serve(subject, *(greedy(f"fork {index}", fork) for index, fork in enumerate(forks)))
        moved = [report(subject, f"fork {index}").moved_tokens for index in range(2)]
        assert sum(tokens > 0 for tokens in moved) == 1


def test_parked_states_are_not_recounted_with_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subject = CachingWorker()
    for index in range(6):
        serve(subject, greedy(f"parked {index}", random_prompt(40, str(index)), max_tokens=4))
    rest(subject)
    assert subject.cache.live.held.parked == 6
    counted: list[LiveState] = []

    def counting(states: Iterable[LiveState]) -> dict[int, int]:
        states = list(states)
        counted.extend(states)
        return all_bytes(states)

    monkeypatch.setattr(live_tier, "all_bytes", counting)
    serve(subject, greedy("another", random_prompt(40, "another"), max_tokens=4))
    rest(subject)
    # `serve` checks answers with other workers, whose states are counted too
    states = [chain.state for chain in parked(subject)]
    assert sum(state in states for state in counted) == 1


def with_corrupted_state() -> tuple[CachingWorker, LiveChain]:
    """A worker whose parked state of one request is corrupted."""
    subject = CachingWorker()
    serve(subject, greedy("first", random_prompt(100), max_tokens=12))
    rest(subject)
    (chain,) = parked(subject)
    spoil(chain)
    return subject, chain


def test_a_corrupted_parked_state_is_dropped_and_the_request_answered() -> None:
    subject, chain = with_corrupted_state()
    serve(subject, greedy("turn", (*known(subject, "first"), 3, 4)))
    rest(subject)
    assert chain not in parked(subject)


def test_a_corrupted_shared_state_delays_no_request() -> None:
    subject, chain = with_corrupted_state()
    serve(subject, greedy("fork", (*random_prompt(100)[:40], 3, 4, 5)))
    rest(subject)
    assert chain not in parked(subject)


def test_no_request_starts_from_a_corrupted_state() -> None:
    subject, _ = with_corrupted_state()
    before = known(subject, "first")
    serve(
        subject,
        *(greedy(f"turn {index}", before + random_prompt(5, str(index))) for index in range(3)),
    )
    assert all(report(subject, f"turn {index}").moved_tokens == 0 for index in (1, 2))


def test_a_failed_start_from_a_moved_state_falls_back_to_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = CachingWorker(folder=tmp_path)
    serve(subject, greedy("first", random_prompt(100), max_tokens=12))
    rest(subject)
    store = subject.store
    assert store is not None and store.flush()
    rest(subject)
    kept = subject.index.figures().kept_tokens
    assert kept == 111
    whole_open, opened = subject.engine.open, []

    def unfit(*args: Any, base: LiveBase | None, **more: Any) -> LiveState:
        opened.append(base)
        state = whole_open(*args, base=base, **more)
        if base is not None:
            subject.engine.close(args[0].request_id)
            raise SnapshotMismatch("it does not fit")
        return state

    monkeypatch.setattr(subject.engine, "open", unfit)
    serve(subject, greedy("turn", (*known(subject, "first"), 3, 4)))
    assert len(opened) == 2
    assert report(subject, "turn").disk_tokens == kept
    assert subject.index.figures().kept_tokens >= kept


def test_a_failed_step_without_copyable_state_costs_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FailsOnce(FailingOnce, RunningAhead):
        fails_at = 3

    def broken(*_: object) -> None:
        raise RuntimeError("it cannot be copied")

    subject = CachingWorker(engine=FailsOnce)
    monkeypatch.setattr(subject.cache.live, "copy_of", broken)
    serve(
        subject,
        greedy("short", random_prompt(20), max_tokens=1),
        greedy("long", random_prompt(40, "b"), max_tokens=9),
    )
    assert isinstance(subject.engine, FailsOnce)
    assert subject.engine.collected > subject.engine.fails_at, "no step has failed"


def test_forgetting_a_session_drops_its_parked_state() -> None:
    subject = CachingWorker()
    serve(subject, greedy("first", random_prompt(100), max_tokens=12, session_id="s"))
    rest(subject)
    turn = (*known(subject, "first"), 3, 4)
    subject.send(
        greedy("waits", turn),
        SessionCommand(operation="close", tenant="", session_id="s", forget=True),
    )
    subject.run_to_end()
    subject.check_answer("waits")
    assert report(subject, "waits").cached_tokens == 0
    rest(subject)
    assert len(parked(subject)) == 1


def test_a_session_is_forgotten_even_if_the_tree_lost_it_first() -> None:
    """Its blocks followed the middle of a removed block."""
    subject = CachingWorker()
    serve(subject, greedy("first", random_prompt(70), max_tokens=0, session_id="other"))
    fork = random_prompt(70)[:20] + random_prompt(60, "b")
    serve(subject, greedy("fork", fork, max_tokens=3, session_id="s"))
    rest(subject)
    index, tier = subject.index, subject.cache.live
    tier.end_chain(next(chain for chain in parked(subject) if chain.request_id == "first"))
    while (victim := index.ram.next_to_leave()) is not None:
        index.ram.evict(victim)
        if victim not in index._holders:
            index._remove_subtree(victim, CacheOutcome.EVICTED)
    index.check_invariants()
    assert index.figures().kept_tokens == 16  # the common tokens
    subject.send(SessionCommand(operation="close", tenant="", session_id="s", forget=True))
    serve(subject, greedy("again", (*fork, 1, 2)))
    assert report(subject, "again").cached_tokens <= 16


def test_a_moved_states_window_is_right_after_restoring_its_boundary() -> None:
    """A second request wants the same state and takes it over after the first has left."""
    subject = CachingWorker("gemma3_text")
    serve(subject, greedy("first", random_prompt(100), max_tokens=12))
    rest(subject)
    before = known(subject, "first")
    subject.send(
        greedy("gone", (*before, 1, 2)),
        greedy("turn", before + random_prompt(30, "b"), max_tokens=9),
    )
    subject.send(cancel("gone"))
    subject.run_to_end()
    subject.check_answer("turn")
    assert report(subject, "turn").moved_tokens > 0


def test_frozen_tokens_are_held_and_no_longer_reserved() -> None:
    """If counted twice, the memory of a lone sequence would never suffice for its growth."""
    subject = CachingWorker(has_measured_costs=True, budget_tokens=96, most_parked_bytes=0)
    serve(
        subject,
        greedy("grows", random_prompt(30), max_tokens=60),
        greedy("other", random_prompt(10, "b"), max_tokens=1),
    )
    assert len(subject.inbox.tokens("grows")) == 60


@pytest.mark.parametrize("engine", [FailingOnce, FailingAhead])
def test_a_failed_step_of_sharing_sequences_reserves_no_excess_memory(
    engine: type[FailingOnce],
) -> None:
    """Retried alone, they do not share: a sequence without room is prefilled when there is some."""
    subject = CachingWorker(engine=engine, has_measured_costs=True, budget_tokens=220)
    assert isinstance(subject.engine, FailingOnce)
    serve(subject, greedy("first", random_prompt(100), max_tokens=1))
    rest(subject)
    forks = [
        greedy(f"fork {index}", random_prompt(100) + random_prompt(4, str(index)), max_tokens=14)
        for index in range(3)
    ]
    subject.send(*forks)
    while min(len(subject.inbox.tokens(fork.request_id)) for fork in forks) < 2:
        subject.step()
    assert len(subject.scheduler._running) == 3
    subject.engine.fails_at = subject.engine.collected + 1
    subject.run_to_end()
    assert subject.engine.collected > subject.engine.fails_at
    for fork in forks:
        subject.check_answer(fork.request_id)


def test_with_a_fused_kernel_forks_copy_and_all_bytes_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = probed("llama")
    for name in ("shares", "reason"):
        monkeypatch.setattr(runner, name, getattr(runner, name))
    choose_sharing(runner, composes_attention=False)
    assert not runner.shares
    subject = CachingWorker(has_measured_costs=True)
    serve(subject, greedy("first", random_prompt(100), max_tokens=12))
    rest(subject)
    serve(subject, greedy("turn", (*known(subject, "first"), 1, 2, 3)))
    assert report(subject, "turn").moved_tokens == 111  # unshared tokens need no sharing
    subject.send(greedy("runs", (*known(subject, "turn"), 4, 5), max_tokens=30))
    while len(subject.inbox.tokens("runs")) < 5:
        subject.step()
    forks = [
        greedy(f"fork {index}", (*known(subject, "turn"), 6, index), max_tokens=9)
        for index in range(3)
    ]
    serve(subject, *forks)
    for fork in forks:
        found = report(subject, fork.request_id)
        assert (found.moved_tokens, found.shared_tokens, found.disk_tokens) == (0, 0, 0)
        assert found.ram_tokens >= len(known(subject, "turn")) - 1
    subject.run_to_end()
    subject.check_answer("runs")
    rest(subject)
    arrays = [
        array
        for chain in parked(subject)
        if chain.state
        for leaf in chain.state.leaves
        for array in leaf.arrays()
    ]
    held = {id(array): array.nbytes for array in arrays}
    assert subject.cache.live.held.parked_bytes == sum(held.values()) > 0
    assert len(held) < len(arrays), "while they are parked they hold their common beginning once"
    assert len(parked(subject)) == 4
