"""The blocks of a waiting request may disappear before it starts: forgotten with a session, or lost
by the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.store.maintenance import StoreLimits
from holdfast.wire.events import CacheReport
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.prefix.lookup import Lookup
from tests.fakes.caching_worker import CachingWorker, greedy, make_blocks_small, random_prompt

NAMES = ["llama", "gemma3_text"]


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


def on_disk_only(name: str, folder: Path) -> CachingWorker:
    """One request of session `s` has ended: its blocks are on disk only."""
    subject = CachingWorker(name, folder=folder, ram_bytes=0, most_parked_bytes=0)
    subject.send(greedy("first", random_prompt(17), max_tokens=0, session_id="s"))
    finish(subject)
    assert subject.store is not None and subject.store.flush()
    finish(subject)
    return subject


def finish(subject: CachingWorker) -> None:
    subject.run_to_end()
    while subject.step():
        pass
    assert subject.scheduler.statistics().reserved_bytes == 0
    assert all(chain.is_parked for chain in subject.cache.live._chains)


@pytest.mark.parametrize("name", NAMES)
def test_closing_a_session_repeats_lookups_of_its_blocks(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = on_disk_only(name, tmp_path)
    turns = [greedy(seed, random_prompt(17) + random_prompt(5, seed)) for seed in "bc"]
    forget = SessionCommand(operation="close", tenant="", session_id="s", forget=True)
    subject.send(*turns, forget)
    finish(subject)
    for each in turns:
        subject.check_answer(each.request_id)
    assert subject.inbox.finished("b").cache_report.cached_tokens == 0
    assert not caplog.records
    # as if it had never been cached
    assert subject.index.figures().kept_tokens == 17 + 2 * 10
    subject.end()


@pytest.mark.parametrize("name", NAMES)
def test_a_request_that_holds_blocks_lost_on_disk_uses_them(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    subject = on_disk_only(name, tmp_path)
    subject.send(greedy("turn", random_prompt(17) + random_prompt(5, "b")))
    (waiting,) = subject.loop._ledger.live()
    assert waiting.start.lookup is not None
    for future in waiting.start.lookup.awaited.values():
        future.result()
    keys, in_hand = waiting.start.lookup.plan.keys, waiting.start.lookup.cached_tokens
    assert set(subject.index.disk_changed(lost=reversed(keys))) >= set(keys)
    finish(subject)
    subject.check_answer("turn")
    assert subject.inbox.finished("turn").cache_report.disk_tokens == in_hand >= 16
    assert not caplog.records
    subject.end()


@pytest.mark.parametrize("name", NAMES)
def test_a_sequence_that_cannot_be_opened_leaves_no_live_state(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = CachingWorker(name, most_parked_bytes=0)
    subject.send(greedy("first", random_prompt(17), max_tokens=0))
    finish(subject)
    whole, failures = subject.index.whole_blocks, [RuntimeError("the index fails")]

    def fails_once(pieces: object) -> object:
        if failures:
            raise failures.pop()
        return whole(pieces)  # type: ignore[arg-type]

    monkeypatch.setattr(subject.index, "whole_blocks", fails_once)
    subject.send(greedy("turn", random_prompt(17) + random_prompt(5, "b")))
    finish(subject)
    assert not failures
    subject.check_answer("turn")


def test_a_moved_state_is_freed_once_if_the_open_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = CachingWorker()
    subject.send(greedy("first", random_prompt(33), max_tokens=0))
    finish(subject)
    report, failures = Lookup.report, [RuntimeError("the report fails")]

    def fails_once(lookup: Lookup, **more: float) -> CacheReport:
        if failures:
            raise failures.pop()
        return report(lookup, **more)

    monkeypatch.setattr(Lookup, "report", fails_once)
    subject.send(greedy("turn", random_prompt(33) + random_prompt(5, "b")))
    finish(subject)
    assert not failures
    subject.check_answer("turn")
    assert not [record for record in caplog.records if "could not be freed" in record.message]
    subject.end()


def test_blocks_the_store_refused_are_written_before_the_worker_ends(
    tmp_path: Path,
) -> None:
    subject = CachingWorker(folder=tmp_path, limits=StoreLimits(queue_blocks=1))
    assert subject.store is not None
    is_free = threading.Event()

    def stand_still() -> None:
        is_free.wait()

    subject.store._mailbox.send(stand_still)
    subject.send(greedy("first", random_prompt(200), max_tokens=0))
    finish(subject)
    is_free.set()
    subject.end()
    again = CachingWorker(folder=tmp_path)
    assert again.index.figures().kept_tokens == 200
    again.end()


def test_a_lost_block_is_not_restored_from_a_chain_with_other_tokens(
    tmp_path: Path,
) -> None:
    """The answers to requests that share the first tokens of a block are right after it is lost."""
    first, fork = random_prompt(40), random_prompt(5) + random_prompt(35, "b")
    before = CachingWorker(folder=tmp_path)
    before.send(greedy("first", first))
    finish(before)
    before.end()
    subject = CachingWorker(folder=tmp_path, most_parked_bytes=0)
    keys = subject.index.planner.plan(
        pack_tokens(first), root=subject.index.root(), resumable_anywhere=True, limit=40
    ).keys
    assert set(subject.index.disk_changed(lost=keys[:1])) == {keys[0]}
    for name, prompt in (("fork", fork), ("again", first)):
        subject.send(greedy(name, prompt))
        finish(subject)
        subject.check_answer(name)
        assert subject.inbox.finished(name).cache_report.cached_tokens == 0
    assert keys[0] not in subject.index.missing
    subject.send(greedy("last", first))
    finish(subject)
    subject.check_answer("last")
    assert subject.inbox.finished("last").cache_report.cached_tokens >= 39
    subject.end()
