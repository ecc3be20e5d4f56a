from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest

from holdfast.wire.cache_map import CacheMap, CacheMapQuestion, CachePart
from holdfast.worker.engine.fingerprint import Fingerprints
from holdfast.worker.prefix.cache_map import (
    KEPT_SECONDS,
    MOST_BLOCKS,
    MOST_KEPT,
    MOST_PARTS,
    CacheUser,
    RecentMaps,
    cache_map,
)
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.prefix.index import PrefixIndex
from tests.fakes.caching_worker import greedy
from tests.fakes.chains import keep_checkpoint, read_chain
from tests.fakes.disk_side import FakeDisk
from tests.fakes.payloads import Weight
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.session_worker import prompt, serve, worker

HEAD = [1, 2, 3, 4, 5, 6, 7, 8]


def library(*, budget: int = 10_000_000, disk: FakeDisk | None = None) -> PrefixIndex:
    return PrefixIndex(fingerprint="model", ram_budget_bytes=budget, disk=disk)


def shown(
    index: PrefixIndex,
    *users: CacheUser,
    tenant: str = "",
    sees_all: bool = False,
    adapters: Mapping[str, str] | None = None,
) -> CacheMap:
    question = CacheMapQuestion(tenant=tenant, sees_all=sees_all)
    fingerprints = Fingerprints("model", adapters or {})
    return cache_map(index, question, fingerprints=fingerprints, users=users, chains=())


def user(index: PrefixIndex, name: str, *chains: list[int], tenant: str = "") -> CacheUser:
    branches = [
        index.branch(pack_tokens(chain), root=index.root(tenant=tenant)) for chain in chains
    ]
    return CacheUser(name, tenant, branches)


def shape(part: CachePart) -> tuple[int | None, int, int, int]:
    return part.parent, part.start, part.tokens, part.below_tokens


def test_blocks_without_a_fork_between_them_are_one_part() -> None:
    index = library()
    read_chain(index, HEAD)
    (part,) = shown(index).parts
    assert shape(part) == (None, 0, 8, 0)
    assert (part.blocks, part.bytes) == (2, 8)


def test_a_fork_within_a_block_ends_the_shared_part_there() -> None:
    index = library()
    read_chain(index, [*HEAD, 9, 9, 9])
    read_chain(index, [*HEAD[:6], 50])
    head, longer, shorter = shown(index).parts
    assert shape(head) == (None, 0, 6, 6)
    assert shape(longer) == (0, 6, 5, 0)
    assert shape(shorter) == (0, 6, 1, 0)
    assert sum(part.bytes for part in (head, longer, shorter)) == 12


def test_each_part_says_where_its_tokens_are() -> None:
    disk = FakeDisk()
    index = library(budget=8, disk=disk)
    read_chain(index, HEAD, disk=disk)
    index.disk_changed(stored=disk.write().stored)
    read_chain(index, [*HEAD, 9, 9, 9, 9], disk=disk)  # RAM is full
    (part,) = shown(index).parts
    assert (part.live_tokens, part.ram_tokens, part.disk_tokens) == (0, 8, 4)
    assert (part.tokens, part.saved_tokens) == (12, 12)


def test_the_bytes_of_saved_states_count() -> None:
    index = library()
    read_chain(index, HEAD)
    keep_checkpoint(index, HEAD[:6], nbytes=100)
    (part,) = shown(index).parts
    assert part.bytes == 108


def test_each_part_names_its_sessions_by_last_use() -> None:
    index = library()
    one, other = [*HEAD, 10, 11], [*HEAD, 20, 21]
    read_chain(index, one)
    read_chain(index, other)
    found = shown(index, user(index, "late", one), user(index, "early", other, HEAD))
    assert [part.sessions for part in found.parts] == [("late", "early"), ("late",), ("early",)]
    assert [part.session_count for part in found.parts] == [2, 1, 1]


def test_session_names_are_limited_but_all_are_counted() -> None:
    index = library()
    read_chain(index, HEAD)
    (part,) = shown(index, *(user(index, str(number), HEAD) for number in range(9))).parts
    assert part.sessions == tuple("012345")
    assert part.session_count == 9


def test_a_tenant_sees_only_its_own_trees() -> None:
    index = library()
    read_chain(index, HEAD, tenant="one")
    read_chain(index, [*HEAD, 9, 9], tenant="other")
    own = shown(index, user(index, "s", HEAD, tenant="other"), tenant="one")
    assert [(tree.is_own, tree.tokens) for tree in own.trees] == [(True, 8)]
    assert all(part.sessions == () for part in own.parts)
    everything = shown(index, user(index, "s", HEAD, tenant="other"), tenant="one", sees_all=True)
    assert sorted((tree.is_own, tree.form, tree.tokens) for tree in everything.trees) == [
        (False, "native", 10),
        (True, "native", 8),
    ]


def test_the_trees_of_adapters_belong_to_their_tenant() -> None:
    index = library()
    adapters = {"sql": "aa", "tone": "bb"}
    for tokens, tenant in enumerate(("one", "aa/one", "bb/other", "old/other"), start=1):
        read_chain(index, [tokens] * 4 * tokens, tenant=tenant)
    users = [user(index, "s", HEAD, tenant=name) for name in ("aa/one", "bb/other", "old/other")]
    own = shown(index, *users, tenant="one", adapters=adapters)
    expected = [(True, "", 4), (True, "sql", 8)]
    assert sorted((tree.is_own, tree.adapter, tree.tokens) for tree in own.trees) == expected
    found = shown(index, *users, tenant="one", sees_all=True, adapters=adapters)
    assert sorted((tree.is_own, tree.adapter, tree.tokens) for tree in found.trees) == [
        (False, "", 16),  # of an earlier version of an adapter
        (False, "tone", 12),
        *expected,
    ]


def test_the_largest_branches_are_listed_and_the_others_counted() -> None:
    index = library()
    for branch in range(MOST_PARTS + 20):
        read_chain(index, [*HEAD, 100 + branch, *range(2 + branch % 7)])
    found = shown(index)
    assert len(found.parts) == MOST_PARTS
    head = found.parts[0]
    assert head.hidden_parts == 21
    listed = sum(part.tokens for part in found.parts)
    assert listed + head.hidden_tokens == found.trees[0].tokens
    assert len(msgspec.json.encode(found)) < 100_000


def test_a_very_large_cache_is_visited_partially() -> None:
    index = library()
    cursor = Cursor(index.root())
    for token in range(MOST_BLOCKS + 10):
        index.insert(cursor, pack_tokens([token]), Weight(1))
    found = shown(index)
    assert not found.is_complete
    assert found.blocks == MOST_BLOCKS


def of_tenants(count: int) -> PrefixIndex:
    """Each tenant has cached one block."""
    index = library()
    for tenant in range(count):
        index.insert(Cursor(index.root(tenant=f"tenant {tenant}")), pack_tokens(HEAD), Weight(8))
    return index


def lines_run(index: PrefixIndex, *, limit: int) -> int:
    """The lines of the module executed for an admin's question; more than the limit fail."""
    code = cache_map.__code__.co_filename
    lines = 0

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != code:
            return None
        lines += 1
        assert lines < limit
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        shown(index, sees_all=True)
    finally:
        sys.settrace(before)
    return lines


def test_the_work_grows_linearly_with_the_tenants() -> None:
    few = lines_run(of_tenants(1000), limit=10**6)
    assert lines_run(of_tenants(10_000), limit=11 * few)


def test_of_very_many_trees_some_are_listed_and_others_counted() -> None:
    index = of_tenants(MOST_PARTS + 60)
    read_chain(index, [*HEAD, 9, 9], tenant="mine")
    found = shown(index, tenant="mine", sees_all=True)
    assert len(found.trees) == MOST_PARTS
    assert found.hidden_trees == 61
    assert [tree.is_own for tree in found.trees].count(True) == 1
    assert {part.tree for part in found.parts} == set(range(MOST_PARTS))
    own = [part for part in found.parts if found.trees[part.tree].is_own]
    assert [part.tokens for part in own] == [10]


def test_a_tree_without_a_listed_part_is_listed_if_possible() -> None:
    index = library()
    for branch in range(MOST_PARTS + 20):
        read_chain(index, [*HEAD, 100 + branch, 1, 1, 1])
    read_chain(index, [1], tenant="small")
    found = shown(index, sees_all=True)
    assert (len(found.trees), found.hidden_trees) == (2, 0)
    assert sorted(tree.hidden_parts for tree in found.trees) == [0, 1]


def test_more_trees_than_can_be_visited_are_counted() -> None:
    found = shown(of_tenants(MOST_BLOCKS + 5), sees_all=True)
    assert (len(found.trees), found.blocks) == (MOST_PARTS, MOST_BLOCKS)
    assert found.hidden_trees == MOST_BLOCKS + 5 - MOST_PARTS
    assert not found.is_complete


class Maker:
    """Makes maps, and counts them."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self, question: CacheMapQuestion) -> CacheMap:
        self.made += 1
        return CacheMap(call_id=question.call_id, blocks=self.made)


def test_a_question_repeated_immediately_gets_the_same_map() -> None:
    now, make = 100.0, Maker()
    recent = RecentMaps(clock=lambda: now)
    for call_id in ("a", "b"):
        question = CacheMapQuestion(tenant="t", call_id=call_id)
        assert recent.answer(question, make) == CacheMap(call_id=call_id, blocks=1)
    now += KEPT_SECONDS
    assert recent.answer(CacheMapQuestion(tenant="t"), make).blocks == 2


def test_a_map_is_reused_only_for_permitted_callers() -> None:
    make = Maker()
    recent = RecentMaps(clock=lambda: 0.0)
    questions = [
        CacheMapQuestion(tenant="t", sees_all=True),
        CacheMapQuestion(tenant="t"),
        CacheMapQuestion(tenant="u"),
    ]
    assert [recent.answer(question, make).blocks for question in questions] == [1, 2, 3]


def test_the_number_of_kept_maps_is_limited() -> None:
    make = Maker()
    recent = RecentMaps(clock=lambda: 0.0)
    for tenant in range(MOST_KEPT + 1):
        recent.answer(CacheMapQuestion(tenant=str(tenant)), make)
    assert recent.answer(CacheMapQuestion(tenant="1"), make).blocks == 2
    assert recent.answer(CacheMapQuestion(tenant="0"), make).blocks == MOST_KEPT + 2


def test_a_worker_survives_a_map_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subject = worker(folder=tmp_path)

    def broken() -> list[CacheUser]:
        raise RuntimeError("a session is damaged")

    monkeypatch.setattr(subject.sessions, "users", broken)
    inbox = serve(
        subject,
        CacheMapQuestion(tenant="", call_id="m"),
        greedy("1", prompt("first"), session_id="s"),
    )
    assert map_of(inbox) == CacheMap(call_id="m", is_complete=False)
    assert "a session is damaged" in caplog.text


def test_a_worker_answers_with_its_live_states_and_sessions(tmp_path: Path) -> None:
    subject = worker(folder=tmp_path, most_parked_bytes=None)
    first, second = prompt("first"), prompt("second", 40)
    inbox = serve(
        subject,
        greedy("1", first, session_id="s"),
        greedy("2", (*first[:256], *second), session_id="t"),
        CacheMapQuestion(tenant="", call_id="m"),
    )
    found = map_of(inbox)
    assert [(part.parent, part.start) for part in found.parts] == [(None, 0), (0, 256), (0, 256)]
    assert [set(part.sessions) for part in found.parts] == [{"s", "t"}, {"s"}, {"t"}]
    assert found.parts[0].live_tokens == 256
    assert found.trees[0].tokens == sum(part.tokens for part in found.parts)


def map_of(inbox: ScriptInbox) -> CacheMap:
    (found,) = [event for event in inbox.events if isinstance(event, CacheMap)]
    return found
