from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.prefix.chain import Branch, ChainBlock, ChainState
from holdfast.worker.sessions.registry import (
    MOST_ALTERNATIVES,
    MOST_BRANCHES,
    Session,
    decode_record,
    encode_record,
)


def branch(*blocks: str, last: int = 4, state: ChainState | None = None) -> Branch:
    """Blocks of four tokens by name; of the last one only `last` tokens."""
    steps = [ChainBlock(name.encode(), 4, 4 * (index + 1)) for index, name in enumerate(blocks)]
    if steps:
        steps[-1] = ChainBlock(steps[-1].key, last, steps[-1].end - 4 + last)
    return Branch(blocks=tuple(steps), states=() if state is None else (state,))


def session() -> Session:
    return Session(session_id="s", tenant="", created_at=0, last_used_at=0, ttl_seconds=10)


def test_a_longer_chain_replaces_its_prefix() -> None:
    subject = session()
    subject.use(branch("a", "b", last=2), now=1)
    subject.use(branch("a", "b", "c"), now=2)
    assert subject.branches == (branch("a", "b", "c"),)
    assert (subject.requests, subject.last_used_at, subject.expires_at) == (2, 2, 12)


def test_a_repeated_prefix_loses_nothing() -> None:
    subject = session()
    subject.use(branch("a", "b", "c"), now=1)
    subject.use(branch("x"), now=2)
    subject.use(branch("a", "b", last=1), now=3)
    assert subject.branches == (branch("a", "b", "c"), branch("x"))


def test_old_side_conversations_come_last_and_stay_known_to_forget() -> None:
    subject = session()
    most = MOST_BRANCHES + MOST_ALTERNATIVES
    sides = [branch("a", f"side {number}") for number in range(most + 2)]
    for number, side in enumerate(sides[: MOST_BRANCHES + 2]):
        subject.use(side, now=number)
    assert subject.branches == (*sides[MOST_BRANCHES + 1 : 1 : -1], sides[0], sides[1])
    for side in sides[MOST_BRANCHES + 2 :]:
        subject.use(side, now=most)
    assert set(subject.branches) == set(sides[2:])


def test_a_request_that_stores_nothing_counts_as_a_use() -> None:
    subject = session()
    subject.use(branch("a"), now=1)
    subject.use(Branch(), now=2)
    assert (subject.branches, subject.requests, subject.last_used_at) == ((branch("a"),), 2, 2)


def test_the_limit_of_branches_drops_no_alternative() -> None:
    subject = session()
    alternatives = [branch("p", f"choice {number}") for number in range(MOST_BRANCHES + 1)]
    for each in alternatives:
        subject.add_alternative(each, now=1)
    for number in range(MOST_BRANCHES + 1):
        subject.use(branch("a", f"side {number}"), now=2)
    assert len(subject.branches) == MOST_BRANCHES + 1 + len(alternatives)
    assert set(alternatives) < set(subject.branches)
    assert subject.branches[0] == branch("a", f"side {MOST_BRANCHES}")
    assert decode_record(encode_record(subject)) == subject


def test_a_turn_that_continues_an_alternative_replaces_it() -> None:
    subject = session()
    subject.use(branch("p", "first"), now=1)
    subject.add_alternative(branch("p", "second"), now=1)
    subject.add_alternative(branch("p", "third"), now=1)
    subject.use(branch("p", "second", "turn"), now=2)
    assert subject.branches == (
        branch("p", "second", "turn"),
        branch("p", "first"),
        branch("p", "third"),
    )
    for number in range(MOST_BRANCHES):
        subject.use(branch("a", f"side {number}"), now=3)
    assert subject.branches[MOST_BRANCHES:] == (
        branch("p", "third"),
        branch("p", "first"),
        branch("p", "second", "turn"),
    )


def test_the_oldest_alternatives_are_dropped() -> None:
    subject = session()
    for number in range(MOST_ALTERNATIVES + 1):
        subject.add_alternative(branch("p", f"choice {number}"), now=1)
    assert len(subject.branches) == MOST_ALTERNATIVES
    assert branch("p", "choice 0") not in subject.branches


def test_an_alternative_that_stores_nothing_is_no_branch() -> None:
    subject = session()
    subject.add_alternative(Branch(), now=2)
    assert (subject.branches, subject.last_used_at) == ((), 2)


def test_resuming_a_session_drops_no_alternative() -> None:
    recorded, begun = session(), session()
    for number in range(MOST_BRANCHES):
        recorded.use(branch("a", f"old {number}"), now=1)
        begun.use(branch("a", f"new {number}"), now=2)
    recorded.add_alternative(branch("a", "old choice"), now=1)
    begun.add_alternative(branch("a", "new choice"), now=2)
    recorded.merge(begun)
    assert recorded.branches == (
        *begun.branches[:MOST_BRANCHES],
        branch("a", "old choice"),
        branch("a", "new choice"),
        *(branch("a", f"old {number}") for number in range(MOST_BRANCHES)),
    )
    recorded.use(branch("a", "next"), now=3)
    assert {branch("a", "old choice"), branch("a", "new choice")} < set(recorded.branches)


chains = st.lists(st.sampled_from("ab"), max_size=4).map(lambda names: branch(*names))


@given(st.lists(chains, max_size=12))
def test_no_branch_is_a_prefix_of_another(used: list[Branch]) -> None:
    subject = session()
    for now, each in enumerate(used):
        subject.use(each, now=now)
        for one in subject.branches:
            assert not any(one is not other and one.extends(other) for other in subject.branches)
        assert not each.blocks or subject.branches[0].extends(each)


def test_a_session_survives_its_record() -> None:
    subject = session()
    subject.metadata["task"] = "tests"
    subject.use(branch("a", "b", state=ChainState(b"state", 8)), now=1)
    assert decode_record(encode_record(subject)) == subject


def test_record_names_distinguish_tenants_and_ids() -> None:
    names = {
        Session(
            session_id=session_id, tenant=tenant, created_at=0, last_used_at=0, ttl_seconds=None
        ).record_name
        for tenant, session_id in [("", "ab"), ("a", "b"), ("ab", ""), ("a/b", "c"), ("a", "b/c")]
    }
    assert len(names) == 5


def test_a_record_of_an_earlier_version_is_readable() -> None:
    found = decode_record((Path(__file__).parent / "data" / "written_before.record").read_bytes())
    assert (found.session_id, found.tenant, found.pinned, found.ttl_seconds) == (
        "written before",
        "t",
        True,
        3600.0,
    )
    assert (found.requests, found.metadata) == (2, {"agent": "one"})
    assert sorted(each.tokens for each in found.branches) == [7, 8]
    assert found.record_name == "b5760d13612ea2ffadc65cb70e45c8a6"


@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", msgspec.msgpack.encode((1, session())), msgspec.msgpack.encode((2, {"a": 1}))],
)
def test_records_of_other_formats_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="session"):
        decode_record(data)
