from __future__ import annotations

import pytest

from holdfast.errors import SessionFailure, SessionRefused
from holdfast.worker.prefix.chain import Branch
from holdfast.worker.sessions.registry import SessionRegistry


def registry(most: int = 10) -> SessionRegistry:
    return SessionRegistry(most=most, ttl_seconds=100)


def refused(call: object) -> SessionFailure:
    with pytest.raises(SessionRefused) as caught:
        call()  # type: ignore[operator]
    return caught.value.failure


def test_session_ids_are_separate_for_each_tenant() -> None:
    subject = registry()
    mine, theirs = subject.open("s", tenant="a", now=0), subject.open("s", tenant="b", now=1)
    assert subject.get("s", tenant="a") is mine
    assert subject.of("b") == [theirs]
    assert refused(lambda: subject.get("s", tenant="c")) is SessionFailure.NOT_FOUND
    assert refused(lambda: subject.open("s", tenant="a", now=2)) is SessionFailure.EXISTS


def test_unused_sessions_expire() -> None:
    subject = registry()
    usual, short, endless = (
        subject.open("usual", tenant="", now=0),
        subject.open("short", tenant="", now=0, ttl_seconds=5),
        subject.open("endless", tenant="", now=0, ttl_seconds=None),
    )
    assert subject.expired(4.9) == []
    short.use(Branch(), now=4)
    assert subject.expired(8.9) == []
    assert subject.expired(9) == [short]
    assert subject.expired(100) == [usual, short]
    assert endless not in subject.expired(1e12)


def test_the_least_recently_used_unpinned_session_closes_first() -> None:
    subject = registry(most=2)
    pinned = subject.open("pinned", tenant="", now=0, pinned=True)
    assert subject.victims("") == []
    loose = subject.open("loose", tenant="", now=1)
    assert subject.victims("") == [loose]
    assert refused(lambda: subject.victims("", keep=loose)) is SessionFailure.TOO_MANY
    subject.close(loose)
    other = subject.open("other", tenant="", now=2)
    other.pinned = True
    assert refused(lambda: subject.victims("")) is SessionFailure.TOO_MANY
    assert pinned in list(subject)


def test_a_tenants_own_sessions_close_before_those_of_others() -> None:
    subject = registry(most=3)
    others = subject.open("o", tenant="other", now=0)
    mine = [subject.open(name, tenant="me", now=now) for now, name in enumerate("ab", start=1)]
    assert subject.victims("me") == [mine[0]]
    assert subject.victims("me", keep=mine[0]) == [mine[1]]
    assert subject.victims("new") == [others]
    assert subject.victims("me", sessions=3) == [*mine, others]


def test_excess_sessions_are_ended_as_far_as_possible() -> None:
    full = registry(most=9)
    sessions = [
        full.open(str(number), tenant="", now=number, pinned=number == 0) for number in range(4)
    ]
    smaller = registry(most=1)
    for session in sessions:
        smaller.put(session)
    assert smaller.victims("", sessions=0) == sessions[1:]
