"""Sessions through a whole worker: real engine, real memory, real store."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from pathlib import Path

import pytest

from holdfast.errors import SessionFailure
from holdfast.store.block import BlockKey
from holdfast.wire.sessions import SessionCommand
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.failing_disk import failing_disk
from tests.fakes.session_worker import answer, ask, info, prompt, serve, worker


class Clock:
    """The time, moved by hand."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def begun(folder: Path, clock: Clock) -> CachingWorker:
    """A worker that knows what others have recorded."""
    subject = worker(folder=folder, clock=clock)
    assert subject.store is not None
    subject.store.flush()
    return subject


def failure(subject: CachingWorker, command: SessionCommand) -> SessionFailure | None:
    """The failure of a command that the service answers without the loop; None if it succeeds."""
    found = subject.sessions.carry_out(command)
    assert found is not None
    return found.failure


FIRST = greedy("1", prompt("first"), session_id="s")
SIDE = greedy("2", prompt("side", 200), session_id="s")


def test_a_request_opens_its_session_and_the_next_turn_continues_it() -> None:
    inbox = serve(worker(), FIRST, ask("get", "first"), ask("get", "stranger", tenant="other"))
    session = info(inbox, "first")
    assert session.tokens == session.kept_tokens == 305  # the last token of an answer is never read
    assert session.kept_bytes > 0
    assert answer(inbox, "stranger").failure is SessionFailure.NOT_FOUND
    turn = greedy("2", prompt("first") + tuple(inbox.tokens("1")) + (5,) * 20, session_id="s")
    side = greedy("side", prompt("side", 50), session_id="s")
    inbox = serve(worker(), FIRST, turn, side, ask("get", "a"), ask("list", "b"))
    session = info(inbox, "a")
    assert (session.requests, session.branches, session.tokens) == (3, 2, 55)
    assert session.kept_tokens == session.ram_tokens == 55
    assert answer(inbox, "b").sessions == (session,)


@pytest.mark.parametrize("after", [0, 12])
def test_a_session_exists_during_its_first_answer(after: int, tmp_path: Path) -> None:
    first = greedy("1", prompt("first"), max_tokens=20, session_id="s", tenant="t")
    during = [
        ask("get", "begun", tenant="t"),
        ask("list", "listed", tenant="t"),
        ask("get", "other"),
        ask("update", "named", tenant="t", metadata={"task": "x"}, ttl_seconds=None),
    ]
    script = [[first], *[[]] * after, during, *[[]] * 120, [ask("get", "ended", tenant="t")]]
    inbox = worker(folder=tmp_path).serve(script)  # type: ignore[arg-type]
    begun = info(inbox, "begun")
    assert (begun.requests, begun.branches) == (0, 0)
    assert answer(inbox, "listed").sessions == (begun,)
    assert answer(inbox, "other").failure is SessionFailure.NOT_FOUND
    assert info(inbox, "named").metadata == {"task": "x"}
    ended = info(inbox, "ended")
    assert (ended.requests, ended.branches, ended.metadata) == (1, 1, {"task": "x"})
    assert (ended.created_at, ended.expires_at) == (begun.created_at, None)
    again = info(serve(worker(folder=tmp_path), ask("get", "a", tenant="t")), "a")
    assert again.metadata == {"task": "x"}


def test_a_session_is_recorded_before_its_first_answer_ends(tmp_path: Path) -> None:
    subject = worker(folder=tmp_path)
    subject.sessions.request_accepted("s", tenant="t")
    subject.sessions.close()
    subject.cache.close()
    again = info(serve(worker(folder=tmp_path), ask("get", "a", tenant="t")), "a")
    assert (again.session_id, again.requests) == ("s", 0)


def test_sessions_and_pins_survive_a_restart(tmp_path: Path) -> None:
    first = greedy("1", prompt("first"), session_id="s", tenant="t")
    opening = ask("open", "o", tenant="t", pinned=True, metadata={"task": "x"}, ttl_seconds=None)
    serve(worker(folder=tmp_path), opening, first)
    session = info(serve(worker(folder=tmp_path), ask("get", "a", tenant="t")), "a")
    assert (session.requests, session.kept_tokens, session.disk_tokens) == (1, 305, 305)
    assert (session.pinned, session.pin_state) == (True, "kept")
    assert (session.metadata, session.expires_at) == ({"task": "x"}, None)


def test_a_fork_is_independent_of_its_original() -> None:
    inbox = serve(
        worker(),
        FIRST,
        ask("fork", "f", new_session_id="fork"),
        ask("fork", "taken", new_session_id="fork"),
        greedy("2", (*prompt("first"), 1, 2, 3), session_id="fork"),
        *(ask("close", "c", forget=True), ask("get", "gone"), ask("get", "fork", "fork")),
        *(ask("close", "d", "fork", forget=True), greedy("again", prompt("first"))),
    )
    assert info(inbox, "f").forked_from == "s"
    assert answer(inbox, "taken").failure is SessionFailure.EXISTS
    assert answer(inbox, "gone").failure is SessionFailure.NOT_FOUND
    assert info(inbox, "fork").kept_tokens == info(inbox, "fork").tokens > 300
    assert inbox.finished("again").cached_tokens == 0


def test_sessions_end_when_they_expire() -> None:
    clock = Clock()
    subject = worker(clock=clock)
    subject.sessions.carry_out(ask("open", "o", ttl_seconds=5.0))
    clock.now += 4.9
    assert failure(subject, ask("get")) is None
    clock.now += 0.2
    assert failure(subject, ask("get")) is SessionFailure.NOT_FOUND


def test_the_least_recently_used_session_makes_room() -> None:
    opens = [ask("open", str(number), str(number)) for number in range(5)]
    inbox = serve(worker(), *opens, ask("list", "l"))
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["4", "3", "2", "1"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_forgetting_removes_everything_not_needed_elsewhere(name: str, tmp_path: Path) -> None:
    common = prompt("common", 280)
    both = [
        greedy(each, (*common, *prompt(each, 40)), session_id=each, branch_points=(100, 270))
        for each in "ab"
    ]
    inbox = serve(
        worker(name, tmp_path),
        *both,
        *(ask("close", "c", "a", forget=True), ask("get", "b", "b")),
        *(ask("close", "d", "b", forget=True), greedy("again", common)),
    )
    assert info(inbox, "b").kept_tokens == info(inbox, "b").tokens
    assert inbox.finished("again").cached_tokens == 0


def test_a_worker_may_allow_fewer_sessions_than_are_recorded(tmp_path: Path) -> None:
    names = ["s0", "s1", "s2", "s3"]
    requests = [greedy(name, prompt(name, 40), session_id=name) for name in [*names, "new"]]
    serve(worker(folder=tmp_path), *requests[:4])
    inbox = serve(
        worker(folder=tmp_path, most_sessions=2),
        *(ask("list", "l"), requests[4], ask("open", "o", "o"), ask("list", "m", limit=1)),
    )
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["s3", "s2"]
    assert info(inbox, "o").tokens == 0
    assert [session.session_id for session in answer(inbox, "m").sessions] == ["o"]


def test_a_session_used_by_another_worker_does_not_expire(tmp_path: Path) -> None:
    clock = Clock()
    idle = worker(folder=tmp_path, clock=clock)
    idle.sessions.carry_out(ask("open", "o", ttl_seconds=5.0))
    idle.sessions.maintain()
    assert idle.store is not None
    idle.store.flush()
    clock.now += 4
    serve(worker(folder=tmp_path, clock=clock), FIRST)
    clock.now += 4
    tend(idle)
    assert failure(idle, ask("get")) is None
    clock.now += 2
    tend(idle)
    assert failure(idle, ask("get")) is SessionFailure.NOT_FOUND
    idle.cache.close()


def tend(subject: CachingWorker) -> None:
    """Advance the service until the store has answered."""
    for _ in range(20):
        subject.sessions.maintain()
        assert subject.store is not None
        subject.store.flush()


def test_invalid_commands_are_refused() -> None:
    subject = worker()
    for command in (
        ask("open", "a", ""),
        ask("open", "a", "a/b"),
        ask("open", "a", "a", metadata={"k": "\ud800"}),
        ask("open", "a", "a", ttl_seconds=-1.0),
        ask("import", "a", "a/b", path="/nowhere"),
        ask("fork", "a", "a", new_session_id=""),
    ):
        assert failure(subject, command) is SessionFailure.INVALID


def test_a_request_that_was_preempted_counts_once() -> None:
    requests = [greedy(each, prompt(each, 60), max_tokens=60, session_id="s") for each in "abc"]
    subject = worker(budget_tokens=240)
    inbox = subject.serve([requests, [], [], [ask("get", "a")]])
    assert subject.scheduler.statistics().preemptions > 0
    after = subject.sessions.carry_out(ask("get", "b"))
    assert after is not None
    assert after.sessions[0].requests == 3
    assert answer(inbox, "a").failure in (None, SessionFailure.NOT_FOUND)


def test_forgotten_blocks_are_gone_before_their_sessions_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the worker dies in between, the session remains, and the next worker can forget it."""
    subject, done = worker(folder=tmp_path), list[str]()
    store = subject.store
    assert store is not None
    remove, remove_record = store.remove, store.remove_record

    def removing(keys: Iterable[BlockKey]) -> None:
        done.append("blocks")
        remove(keys)

    def removing_record(name: str) -> None:
        done.append("record")
        remove_record(name)

    monkeypatch.setattr(store, "remove", removing)
    monkeypatch.setattr(store, "remove_record", removing_record)
    serve(subject, FIRST, ask("close", "c", forget=True))
    assert (done[0], done[-1]) == ("blocks", "record")


def test_a_clock_jumping_ahead_deletes_no_session(tmp_path: Path) -> None:
    clock = Clock()
    serve(worker(folder=tmp_path, clock=clock), FIRST)
    clock.now += 400 * 86400.0
    for _ in range(2):
        inbox = serve(begun(tmp_path, clock), ask("get", "ahead"))
        assert info(inbox, "ahead").kept_tokens == 305
    clock.now -= 400 * 86400.0 - 90
    inbox = serve(worker(folder=tmp_path, clock=clock), ask("get", "right"))
    assert info(inbox, "right").expires_at is not None
    clock.now += 20
    inbox = serve(begun(tmp_path, clock), ask("get", "later"))
    assert answer(inbox, "later").failure is SessionFailure.NOT_FOUND


def test_using_a_wrong_clock_does_not_make_it_trusted_later(tmp_path: Path) -> None:
    clock = Clock()
    serve(worker(folder=tmp_path, clock=clock), ask("open", "o", "old"))
    clock.now += 400 * 86400.0
    for name in ("first", "second"):
        subject = begun(tmp_path, clock)
        inbox = serve(subject, ask("open", "o", name, ttl_seconds=None), ask("list", "all"))
        assert "old" in {each.session_id for each in answer(inbox, "all").sessions}
        clock.now += 1800
    subject = begun(tmp_path, clock)
    listed = answer(serve(subject, ask("list", "all")), "all").sessions
    assert {each.session_id for each in listed} == {"first", "second"}, "the clock is the same"


def test_a_session_used_after_a_long_pause_is_not_expired(tmp_path: Path) -> None:
    clock = Clock()
    serve(worker(folder=tmp_path, clock=clock), ask("open", "o", ttl_seconds=None))
    clock.now += 40 * 86400.0
    inbox = serve(
        worker(folder=tmp_path, clock=clock),
        greedy("1", prompt("a"), session_id="used"),
        ask("get", "used", session_id="used"),
    )
    session = info(inbox, "used")
    assert (session.created_at, session.last_used_at) == (clock.now, clock.now)
    clock.now += 90  # of 100 s that a session lives
    inbox = serve(worker(folder=tmp_path, clock=clock), ask("get", "a", session_id="used"))
    assert info(inbox, "a").session_id == "used"


NAME_IT = ask("update", pinned=True, metadata={"title": "The parser"})


@pytest.mark.parametrize(
    ("operation", "is_used"), [("open", False), ("open", True), ("list", True)]
)
def test_a_record_unreadable_at_the_start_is_not_replaced(
    tmp_path: Path, operation: str, is_used: bool
) -> None:
    clock = Clock()
    serve(worker(folder=tmp_path, clock=clock), FIRST, NAME_IT)
    with failing_disk(tmp_path) as disk:
        disk.fail(operation, errno.EMFILE, times=1, only="sessions")
        subject = worker(folder=tmp_path, clock=clock)
        assert disk.failed == 1
        serve(subject, *([SIDE] if is_used else []))
    inbox = serve(worker(folder=tmp_path, clock=clock), ask("get", "after"))
    session = info(inbox, "after")
    assert (session.pinned, session.metadata) == (True, {"title": "The parser"})
    assert session.branches == 1 + is_used


def test_a_record_readable_later_is_merged_with_newer_changes(tmp_path: Path) -> None:
    clock = Clock()
    serve(worker(folder=tmp_path, clock=clock), FIRST, NAME_IT)
    with failing_disk(tmp_path) as disk:
        disk.fail("open", errno.EIO, times=1, only=".session")
        subject = worker(folder=tmp_path, clock=clock)

        def later() -> None:
            clock.now += 1.0

        script = [[SIDE], *[[]] * 60, [ask("get", "joined")]]
        inbox = subject.serve(script, on_receive=later)  # type: ignore[arg-type]
    session = info(inbox, "joined")
    assert (session.pinned, session.branches, session.requests) == (True, 2, 2)
    assert session.metadata == {"title": "The parser"}
    inbox = serve(worker(folder=tmp_path, clock=clock), ask("get", "after"))
    assert info(inbox, "after").branches == 2
