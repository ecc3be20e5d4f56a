"""Which session pins which blocks, and the quota, over the blocks of a worker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import SessionFailure
from holdfast.worker.prefix.chain import pack_tokens
from holdfast.worker.sessions.registry import Session, SessionPins
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.session_worker import answer, ask, info, prompt, serve, worker

COMMON = prompt("common", 256)
CHAINS = {"a": (*COMMON, *prompt("a", 60)), "b": (*COMMON, *prompt("b", 90)), "c": prompt("c", 120)}


@pytest.fixture(scope="module")
def reader() -> CachingWorker:
    subject = worker()
    serve(subject, *[greedy(name, chain, max_tokens=1) for name, chain in CHAINS.items()])
    return subject


def session(
    reader: CachingWorker, name: str, chains: Iterable[str], *, pinned: bool = True
) -> Session:
    root = reader.index.root()
    branches = tuple(reader.index.branch(pack_tokens(CHAINS[chain]), root=root) for chain in chains)
    times: dict[str, Any] = {"created_at": 0, "last_used_at": 0, "ttl_seconds": None}
    return Session(session_id=name, tenant="", pinned=pinned, branches=branches, **times)


def size(reader: CachingWorker, *chains: str) -> int:
    keys = {
        key
        for chain in chains
        for key in reader.index.branch(pack_tokens(CHAINS[chain]), root=reader.index.root()).keys
    }
    return sum(map(reader.index.size_of, keys))


def pins_of(reader: CachingWorker, *, quota_bytes: int) -> SessionPins:
    return SessionPins(reader.cache, quota_bytes=lambda: quota_bytes)


def test_blocks_shared_by_two_sessions_count_once(reader: CachingWorker) -> None:
    subject = pins_of(reader, quota_bytes=1 << 30)
    one, other = session(reader, "one", "a"), session(reader, "other", "b")
    subject.sync(one)
    subject.sync(other)
    assert subject.pinned_bytes == size(reader, "a", "b") < size(reader, "a") + size(reader, "b")
    subject.drop(one)
    assert subject.pinned_bytes == size(reader, "b")
    subject.drop(other)
    subject.drop(other)
    assert subject.pinned_bytes == 0
    subject.check_invariants()


def test_a_session_beyond_the_quota_is_pinned_partially(reader: CachingWorker) -> None:
    subject = pins_of(reader, quota_bytes=size(reader, "a", "b") - 1)
    one, other = session(reader, "one", "a"), session(reader, "other", "b")
    subject.sync(one)
    assert not subject.fits(other)
    subject.sync(other)
    assert (subject.state_of(one), subject.state_of(other)) == ("kept", "over_quota")
    assert size(reader, "a") <= subject.pinned_bytes < size(reader, "a", "b")
    one.pinned = False
    subject.sync(one)
    assert subject.fits(other)
    subject.sync(other)
    assert (subject.state_of(one), subject.state_of(other)) == ("none", "kept")
    assert subject.pinned_bytes == size(reader, "b")
    subject.drop(other)


def test_blocks_pinned_by_another_session_cost_nothing(reader: CachingWorker) -> None:
    subject = pins_of(reader, quota_bytes=size(reader, "a"))
    one, twin, third = (
        session(reader, *each) for each in (("one", "a"), ("twin", "a"), ("3", "c"))
    )
    subject.sync(one)
    assert subject.fits(twin)
    assert not subject.fits(third)
    subject.sync(twin)
    assert (subject.state_of(twin), subject.pinned_bytes) == ("kept", size(reader, "a"))
    for each in (one, twin):
        subject.drop(each)


def test_a_session_that_moved_on_unpins_its_old_blocks(reader: CachingWorker) -> None:
    subject = pins_of(reader, quota_bytes=1 << 30)
    moving = session(reader, "s", "ac")
    subject.sync(moving)
    moving.branches = moving.branches[1:]
    subject.sync(moving)
    assert subject.pinned_bytes == size(reader, "c")
    subject.drop(moving)


steps = st.lists(
    st.tuples(st.sampled_from("pqr"), st.sets(st.sampled_from(sorted(CHAINS))), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(steps=steps, share=st.integers(0, 120))
def test_the_quota_holds_and_nothing_stays_pinned(
    steps: list[tuple[str, set[str], bool]], share: int, reader: CachingWorker
) -> None:
    quota_bytes = size(reader, *CHAINS) * share // 100
    subject = pins_of(reader, quota_bytes=quota_bytes)
    known: dict[str, Session] = {}
    for name, chains, pinned in steps:
        known[name] = session(reader, name, sorted(chains), pinned=pinned)
        subject.sync(known[name])
        assert subject.pinned_bytes <= quota_bytes
        subject.check_invariants()
    for each in known.values():
        whole = subject.state_of(each) == "kept"
        assert not whole or subject.fits(each)
        subject.drop(each)
    assert subject.pinned_bytes == 0
    reader.index.check_invariants()


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_session_survives_eviction_pressure(is_pinned: bool) -> None:
    one = prompt("first")
    alone = worker()
    serve(alone, greedy("1", one))
    budget = 3 * alone.index.figures().ram_bytes
    others = [greedy(f"other {number}", prompt(f"other {number}")) for number in range(5)]
    inbox = serve(
        worker(ram_bytes=budget),
        ask("open", "o", pinned=is_pinned),
        greedy("1", one, session_id="s"), *others, ask("get", "a"), greedy("again", one),
    )  # fmt: skip
    assert info(inbox, "a").kept_tokens == (305 if is_pinned else 0)
    assert inbox.finished("again").cached_tokens == (299 if is_pinned else 0)


def test_a_session_reports_blocks_beyond_the_quota_as_unpinned() -> None:
    alone = worker()
    serve(alone, greedy("1", prompt("first")))
    whole = alone.index.figures().ram_bytes
    inbox = serve(
        worker(ram_bytes=int(whole * 1.9)),
        ask("open", "o", pinned=True),
        greedy("1", prompt("first"), session_id="s"), ask("get", "a"),
        ask("fork", "f", new_session_id="loose"),
        ask("update", "u", pinned=False), ask("get", "b"),
        ask("update", "again", pinned=True),
    )  # fmt: skip
    assert info(inbox, "a").pin_state == "over_quota"
    assert info(inbox, "b").pin_state == "none"
    assert answer(inbox, "again").failure is SessionFailure.OVER_QUOTA
