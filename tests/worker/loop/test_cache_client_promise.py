"""The cache costs no answer: whatever raises in it, requests are answered as without it.

Fake engine, fake cache, real loop.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.wire.commands import TELL_STATISTICS, Command
from holdfast.wire.events import CacheOutcome, FinishReason, WorkerStatistics
from holdfast.wire.sessions import SessionCommand
from tests.fakes.fake_cache import FakeCache
from tests.fakes.fake_engine import BLOCK, RAISES_ONCE, FakeEngine, expected_tokens
from tests.fakes.looped_worker import make_loop, request
from tests.fakes.script_inbox import ScriptInbox, cancel

METHODS = [
    "lookup",
    "advance",
    "snapshots",
    "store_snapshots",
    "forget",
    "take_forgotten",
    "distrust",
    "blame",
    "maintain",
    "close",
]
SHARED = tuple(range(1, 30))


def serve(
    *script: list[Command],
    cache: FakeCache,
    engine: FakeEngine | None = None,
    budget_tokens: int = 10_000,
) -> ScriptInbox:
    engine = engine or FakeEngine()
    inbox = ScriptInbox(script, in_turn=True)
    loop = make_loop(engine, inbox, budget_tokens=budget_tokens, cache=cache)  # type: ignore[arg-type]
    loop.run()
    inbox.check_protocol()
    loop.check_invariants()
    assert not inbox.open_requests()
    assert not engine.opened
    assert cache.is_closed
    return inbox


def test_the_second_request_starts_from_the_firsts_prefix() -> None:
    engine, cache = FakeEngine(), FakeCache()
    inbox = serve([request("a", *SHARED)], [request("b", *SHARED, 99)], cache=cache, engine=engine)
    assert engine.restored == [("b", len(SHARED) // BLOCK * BLOCK)]
    assert inbox.tokens("b") == expected_tokens(request("b", *SHARED, 99))
    assert cache.tended > 0


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_every_request_is_answered_fully_if_the_cache_raises(method: str, runs_ahead: bool) -> None:
    cache = FakeCache()
    serve([request("before", *SHARED)], cache=cache)
    cache.raises.add(method)
    asked = [request(name, *SHARED, index) for index, name in enumerate("abc")]
    asked.append(request("failing", *SHARED, RAISES_ONCE))
    forget = SessionCommand(operation="close", tenant="", session_id="s", forget=True)
    inbox = serve(
        [*asked, forget],
        [request("later", *SHARED)],
        cache=cache,
        engine=FakeEngine(runs_ahead=runs_ahead),
    )
    for each in (*asked, request("later", *SHARED)):
        assert inbox.tokens(each.request_id) == expected_tokens(each)
        assert inbox.finished(each.request_id).reason is FinishReason.LENGTH


def test_a_lookup_that_raises_is_reported_as_a_cache_failure() -> None:
    cache = FakeCache()
    cache.raises.add("lookup")
    inbox = serve([request("a", *SHARED)], cache=cache)
    assert inbox.finished("a").cache_report.outcome is CacheOutcome.FAILED


def test_a_rest_that_cannot_be_copied_costs_nothing() -> None:
    inbox = serve(
        [request("a", *SHARED)],
        [request("b", *SHARED)],
        cache=FakeCache(),
        engine=FakeEngine(rest_raises=True),
    )
    assert inbox.tokens("b") == expected_tokens(request("b", *SHARED))


def test_a_scored_prompt_is_neither_looked_up_nor_kept() -> None:
    cache = FakeCache()
    inbox = serve([request("a", *SHARED, want_prompt_logprobs=True)], cache=cache)
    assert (cache.lookups, cache.inserted) == ([], [])
    assert inbox.finished("a").cache_report.outcome is CacheOutcome.SCORED


def test_cached_tokens_are_counted_once_by_tier() -> None:
    inbox = serve(
        [request("a", *SHARED)], [request("b", *SHARED)], [TELL_STATISTICS], cache=FakeCache()
    )
    (told,) = [
        event for event in inbox.events if isinstance(event, WorkerStatistics) and event.in_answer
    ]
    assert told.cache is not None
    assert told.cached_tokens == told.cache.ram_tokens == inbox.finished("b").cached_tokens == 28
    assert told.cache.lookups == {"new_tokens": 2}


@given(
    prompts=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11), max_size=4),
    raises=st.sets(st.sampled_from(METHODS), max_size=3),
    budget_tokens=st.sampled_from([60, 90, 10_000]),
    runs_ahead=st.booleans(),
    batch=st.integers(1, 4),
)
def test_answers_are_the_same_with_and_without_a_cache(
    prompts: list[tuple[int, int]],
    cancelled: set[int],
    raises: set[str],
    budget_tokens: int,
    runs_ahead: bool,
    batch: int,
) -> None:
    asked = [
        request(f"r{index}", *SHARED[: 1 + shared], own)
        for index, (shared, own) in enumerate(prompts)
    ]
    script: list[list[Command]] = []
    for begin in range(0, len(asked), batch):
        script.append([*asked[begin : begin + batch]])
        script += [
            [cancel(f"r{index}")] for index in sorted(cancelled) if begin <= index < begin + batch
        ]
    cache, engine = FakeCache(), FakeEngine(runs_ahead=runs_ahead)
    cache.raises |= raises
    inbox = ScriptInbox(script)
    loop = make_loop(engine, inbox, budget_tokens=budget_tokens, cache=cache)  # type: ignore[arg-type]
    inbox._on_receive = loop.check_invariants
    loop.run()
    inbox.check_protocol()
    for each in asked:
        finished = [
            event for event in inbox.of(each.request_id) if type(event).__name__ == "Finished"
        ]
        if not finished or finished[0].reason is FinishReason.CANCELLED:
            continue
        assert inbox.tokens(each.request_id) == expected_tokens(each)
