"""The cache report of a request, through a whole worker with a tiny model."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from holdfast.wire.commands import TELL_STATISTICS, Command
from holdfast.wire.events import (
    CacheFigures,
    CacheOutcome,
    CacheReport,
    Divergence,
    PrefillFinished,
    TokensGenerated,
    WorkerStatistics,
)
from holdfast.worker.loop.cache_client import CacheClient
from tests.fakes.caching_worker import CachingWorker, greedy, one_after_the_other, random_prompt
from tests.fakes.script_inbox import ScriptInbox, cancel
from tests.fakes.tiny_models import VOCAB_SIZE


def in_turn(subject: CachingWorker, *commands: Command) -> ScriptInbox:
    return subject.serve([[command] for command in commands], in_turn=True)


def report(inbox: ScriptInbox, name: str) -> CacheReport:
    """The report of the PrefillFinished event, which equals that of Finished."""
    (started,) = [event for event in inbox.of(name) if isinstance(event, PrefillFinished)]
    assert started.cache_report == inbox.finished(name).cache_report
    return started.cache_report


def figures(inbox: ScriptInbox) -> CacheFigures:
    answers = [
        event for event in inbox.events if isinstance(event, WorkerStatistics) and event.in_answer
    ]
    assert answers[-1].cache is not None
    return answers[-1].cache


def test_after_a_commit_at_rest_waiting_requests_are_admitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str | float] = []
    flush, receive = CacheClient.flush, ScriptInbox.receive

    def flushing(client: CacheClient) -> bool:
        has_committed = flush(client)
        if has_committed:
            seen.append("committed")
        return has_committed

    def receiving(inbox: ScriptInbox, *, timeout_seconds: float) -> list[Command]:
        seen.append(timeout_seconds)
        return receive(inbox, timeout_seconds=timeout_seconds)

    monkeypatch.setattr(CacheClient, "flush", flushing)
    monkeypatch.setattr(ScriptInbox, "receive", receiving)
    CachingWorker().serve(
        one_after_the_other(greedy("a", random_prompt(90)), greedy("b", random_prompt(90, "b")))
    )
    behind = [later for earlier, later in itertools.pairwise(seen) if earlier == "committed"]
    assert behind
    assert set(behind) == {0.0}, "a request that waited for room would have waited on"


def test_the_cache_report_comes_right_before_the_first_token() -> None:
    first = random_prompt(90)
    inbox = in_turn(CachingWorker(), greedy("first", first), greedy("exact", first))
    kinds = [type(event) for event in inbox.of("exact")]
    assert kinds.index(PrefillFinished) == kinds.index(TokensGenerated) - 1
    assert report(inbox, "first").outcome is CacheOutcome.NOTHING_STORED
    assert (report(inbox, "exact").outcome, report(inbox, "exact").ram_tokens) == (
        CacheOutcome.COMPLETE,
        89,
    )


def test_later_and_diverging_turns_get_the_reason_for_a_miss() -> None:
    first = random_prompt(90)
    other = (first[50] + 1) % (VOCAB_SIZE - 8)
    fork = (*first[:50], other, *random_prompt(20, "b"))
    inbox = in_turn(
        CachingWorker(),
        greedy("first", first),
        greedy("turn", first + random_prompt(9)),
        greedy("fork", fork),
    )
    assert report(inbox, "turn").cached_tokens == 90
    # of the cached answer
    assert report(inbox, "turn").outcome in (CacheOutcome.DIVERGED, CacheOutcome.NEW_TOKENS)
    assert report(inbox, "fork").cached_tokens == 50
    assert report(inbox, "fork").divergence == Divergence(
        position=50, stored_token_id=first[50], prompt_token_id=other
    )


def test_tokens_from_disk_are_reported_with_their_restore_time(tmp_path: Path) -> None:
    CachingWorker(folder=tmp_path).serve([[greedy("before", random_prompt(300))]])
    inbox = in_turn(
        CachingWorker(folder=tmp_path),
        greedy("disk", random_prompt(300)),
        greedy("ram", random_prompt(300)),
    )
    assert (report(inbox, "disk").ram_tokens, report(inbox, "disk").disk_tokens) == (0, 299)
    assert report(inbox, "disk").restore_seconds > 0
    assert (report(inbox, "ram").ram_tokens, report(inbox, "ram").disk_tokens) == (299, 0)


def test_requests_starting_from_the_same_disk_blocks_hold_them_once(tmp_path: Path) -> None:
    shared = random_prompt(300)
    asked = [greedy(name, shared + random_prompt(20, name)) for name in "abc"]
    CachingWorker(folder=tmp_path).serve([[greedy("before", shared)]])
    inbox = CachingWorker(folder=tmp_path).serve([asked])
    alone = [in_turn(CachingWorker(), each) for each in asked]
    assert [inbox.tokens(each.request_id) for each in asked] == [
        one.tokens(each.request_id) for one, each in zip(alone, asked, strict=True)
    ]
    told = [report(inbox, each.request_id) for each in asked]
    assert sorted((each.disk_tokens, each.shared_tokens) for each in told) == [
        (0, 300),
        (0, 300),
        (300, 0),
    ]


def test_a_diverging_agent_takes_nothing_from_a_parked_one() -> None:
    shared, own = random_prompt(1000), {name: random_prompt(40, name) for name in "ab"}
    first = [greedy(name, shared + own[name]) for name in "ab"]
    alone = {
        each.request_id: in_turn(CachingWorker(), each).tokens(each.request_id) for each in first
    }
    turns = [greedy(f"{name}2", (*shared, *own[name], *alone[name], 1, 2, 3)) for name in "ab"]
    inbox = in_turn(CachingWorker(), *first, *turns)
    assert [report(inbox, name).shared_tokens for name in ("b", "a2", "b2")] == [1000, 0, 0]
    assert [report(inbox, name).moved_tokens for name in ("b", "a2", "b2")] == [0, 1045, 1045]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_without_room_in_ram_all_blocks_come_from_disk(tmp_path: Path, name: str) -> None:
    alone = in_turn(CachingWorker(name), greedy("again", random_prompt(300)))
    CachingWorker(name, tmp_path, ram_bytes=0).serve([[greedy("before", random_prompt(300))]])
    subject = CachingWorker(name, tmp_path, ram_bytes=0, most_parked_bytes=0)
    inbox = in_turn(
        subject, greedy("again", random_prompt(300)), greedy("and again", random_prompt(300))
    )
    for request in ("again", "and again"):
        assert (report(inbox, request).ram_tokens, report(inbox, request).disk_tokens) == (0, 299)
        assert inbox.tokens(request) == alone.tokens("again")
    assert subject.index.figures().ram_bytes == 0


def test_a_model_with_boundaries_reports_unusable_tokens() -> None:
    first = random_prompt(90)
    # a live window can rewind some tokens
    subject = CachingWorker("gemma3_text", most_parked_bytes=0)
    inbox = in_turn(subject, greedy("first", first), greedy("fork", (*first[:70], 3, 1, 4)))
    told = report(inbox, "fork")
    assert (told.outcome, told.cached_tokens, told.unused_tokens) == (
        CacheOutcome.NO_BOUNDARY,
        0,
        70,
    )
    assert told.divergence == Divergence(position=70, stored_token_id=first[70], prompt_token_id=3)


def test_a_request_that_waited_for_another_reports_the_time() -> None:
    shared = random_prompt(600)
    inbox = CachingWorker().serve(
        [[greedy("reader", shared), greedy("behind", shared), TELL_STATISTICS]]
    )
    told = report(inbox, "behind")
    assert told.waited_for_another
    assert told.waited_seconds > 0
    assert told.cached_tokens == 599
    assert not report(inbox, "reader").waited_for_another
    assert (figures(inbox).waits, figures(inbox).waiting) == (1, 1)


def test_two_tenants_share_nothing(tmp_path: Path) -> None:
    both = [
        greedy("mine", random_prompt(300), tenant="me"),
        greedy("theirs", random_prompt(300), tenant="them"),
    ]
    inbox = CachingWorker(folder=tmp_path).serve(
        [both]
    )  # immediately: not even by waiting for each other
    assert [report(inbox, name).outcome for name in ("mine", "theirs")] == [
        CacheOutcome.NOTHING_STORED
    ] * 2
    again = in_turn(
        CachingWorker(folder=tmp_path),
        *both,
        greedy("nobody's", random_prompt(300)),
        TELL_STATISTICS,
    )
    assert [report(again, name).cached_tokens for name in ("mine", "theirs", "nobody's")] == [
        299,
        299,
        0,
    ]
    assert figures(again).tenants == 3


def test_a_scored_prompt_explains_why_nothing_was_reused() -> None:
    scored = greedy("scored", random_prompt(90), want_prompt_logprobs=True)
    inbox = in_turn(CachingWorker(), greedy("first", random_prompt(90)), scored)
    assert report(inbox, "scored").outcome is CacheOutcome.SCORED


def test_a_preempted_request_counts_only_tokens_that_others_prefilled() -> None:
    long, longer = random_prompt(100), random_prompt(100, "b")
    subject = CachingWorker(budget_tokens=232, expected_output_tokens=4)
    inbox = subject.serve([[greedy("a", long, max_tokens=60), greedy("b", longer, max_tokens=60)]])
    assert subject.scheduler.statistics().preemptions
    assert [report(inbox, name).cached_tokens for name in ("a", "b")] == [0, 0]


def test_figures_count_lookups_and_tokens_by_tier(tmp_path: Path) -> None:
    CachingWorker(folder=tmp_path).serve([[greedy("before", random_prompt(300))]])
    requests = [
        greedy("disk", random_prompt(300)),
        greedy("ram", random_prompt(300)),
        greedy("new", random_prompt(30, "b")),
    ]
    told = figures(in_turn(CachingWorker(folder=tmp_path), *requests, TELL_STATISTICS))
    assert (told.disk_tokens, told.ram_tokens) == (299, 299)
    assert told.lookups == {"complete": 2, "diverged": 1}
    assert told.lookup_seconds is not None
    assert sum(told.lookup_seconds.counts) == 3
    assert told.restore_seconds is not None
    assert sum(told.restore_seconds.counts) == 2
    assert told.ram_bytes > 0
    assert told.store is not None
    assert told.store.mode == "writing"
    assert told.store.stored_bytes > 0
    assert told.store.read_bytes > 0


def test_a_request_cancelled_before_its_start_has_reused_nothing() -> None:
    inbox = CachingWorker().serve([[greedy("a", random_prompt(90)), cancel("a")]])
    assert inbox.finished("a").cache_report == CacheReport()
