"""Sessions through a whole worker: real engine, real memory, real store."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.messages.commands import Command
from holdfast.messages.sessions import PinState, SessionFailure
from holdfast.sessions.portable import Frame, write_session
from tests.fakes.remembering_worker import RememberingWorker, greedy
from tests.fakes.session_worker import answer, ask, ended, exported, info, prompt, serve, worker


def test_a_request_opens_its_session_and_the_next_turn_goes_on_in_it() -> None:
    first = prompt("first")
    inbox = serve(worker(), greedy("1", first, session_id="s"))
    turn = first + tuple(inbox.tokens("1")) + prompt("turn", 20)
    inbox = serve(
        worker(), greedy("1", first, session_id="s"), greedy("2", turn, session_id="s"),
        greedy("side", prompt("side", 50), session_id="s"), ask("get", "a"), ask("list", "b"),
    )  # fmt: skip
    session = info(inbox, "a")
    assert (session.requests, session.branches, session.tokens) == (3, 2, 55)
    assert session.kept_tokens == session.ram_tokens == 55
    assert answer(inbox, "b").sessions == (session,)


def test_what_a_session_keeps_is_shown_to_the_token() -> None:
    inbox = serve(
        worker(), greedy("1", prompt("first"), session_id="s", max_tokens=6), ask("get", "a"), ask("get", "b", tenant="other")
    )
    session = info(inbox, "a")
    assert session.tokens == session.kept_tokens == 305  # the last token of an answer is never read
    assert session.kept_bytes > 0
    assert answer(inbox, "b").failure is SessionFailure.NOT_FOUND


def test_sessions_are_there_after_a_restart_with_their_pins(tmp_path: Path) -> None:
    serve(
        worker(folder=tmp_path),
        ask("open", "o", tenant="t", pinned=True, metadata={"task": "x"}, ttl_seconds=None),
        greedy("1", prompt("first"), session_id="s", tenant="t"),
    )
    session = info(serve(worker(folder=tmp_path), ask("get", "a", tenant="t")), "a")
    assert (session.requests, session.kept_tokens, session.disk_tokens) == (1, 305, 305)
    assert (session.pinned, session.pin_state, session.metadata, session.expires_at) == (True, PinState.KEPT, {"task": "x"}, None)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_a_pinned_session_outlives_what_would_push_it_out(is_pinned: bool) -> None:
    one = prompt("first")
    alone = worker()
    serve(alone, greedy("1", one))
    budget = 3 * alone.library.statistics().ram.resident_bytes
    others = [greedy(f"other {number}", prompt(f"other {number}")) for number in range(5)]
    inbox = serve(
        worker(ram_bytes=budget),
        ask("open", "o", pinned=is_pinned),
        greedy("1", one, session_id="s"), *others, ask("get", "a"), greedy("again", one),
    )  # fmt: skip
    assert info(inbox, "a").kept_tokens == (305 if is_pinned else 0)
    assert inbox.finished("again").cached_tokens == (299 if is_pinned else 0)


def test_what_goes_beyond_the_quota_is_not_pinned_and_says_so() -> None:
    alone = worker()
    serve(alone, greedy("1", prompt("first")))
    whole = alone.library.statistics().ram.resident_bytes
    inbox = serve(
        worker(ram_bytes=int(whole * 1.9)),
        ask("open", "o", pinned=True),
        greedy("1", prompt("first"), session_id="s"), ask("get", "a"),
        ask("fork", "f", new_session_id="loose"),
        ask("update", "u", pinned=False), ask("get", "b"),
        ask("update", "again", pinned=True),
    )  # fmt: skip
    assert info(inbox, "a").pin_state is PinState.OVER_QUOTA
    assert info(inbox, "b").pin_state is PinState.NONE
    assert answer(inbox, "again").failure is SessionFailure.OVER_QUOTA


def test_a_fork_goes_on_alone_and_closing_the_first_takes_nothing_from_it() -> None:
    one = prompt("first")
    inbox = serve(
        worker(), greedy("1", one, session_id="s"),
        ask("fork", "f", new_session_id="fork"),
        ask("fork", "taken", new_session_id="fork"),
        greedy("2", (*one, 1, 2, 3), session_id="fork"),
        ask("close", "c", forget=True), ask("get", "gone"), ask("get", "fork", "fork"),
        ask("close", "d", "fork", forget=True), greedy("again", one),
    )  # fmt: skip
    assert info(inbox, "f").forked_from == "s"
    assert answer(inbox, "taken").failure is SessionFailure.EXISTS
    assert answer(inbox, "gone").failure is SessionFailure.NOT_FOUND
    assert info(inbox, "fork").kept_tokens == info(inbox, "fork").tokens > 300
    assert inbox.finished("again").cached_tokens == 0


def test_sessions_end_when_their_time_is_over() -> None:
    now = [1000.0]
    subject = worker(clock=lambda: now[0])
    subject.sessions.carry_out(ask("open", "o", ttl_seconds=5.0))
    now[0] += 4.9
    assert subject.sessions.carry_out(ask("get", "a")).failure is None  # type: ignore[union-attr]
    now[0] += 0.2
    assert subject.sessions.carry_out(ask("get", "b")).failure is SessionFailure.NOT_FOUND  # type: ignore[union-attr]


def test_the_session_used_longest_ago_makes_room() -> None:
    opens = [ask("open", str(number), str(number)) for number in range(5)]
    inbox = serve(worker(), *opens, ask("list", "l"))
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["4", "3", "2", "1"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("was_on_disk", [False, True])
def test_an_exported_session_goes_on_elsewhere_with_the_same_answers(name: str, was_on_disk: bool, tmp_path: Path) -> None:
    one, file = prompt(name), str(tmp_path / "session")
    before = serve(
        worker(name, tmp_path / "store"), greedy("1", one, session_id="s"), greedy("side", prompt("side", 40), session_id="s")
    )
    commands = [ask("export", "e", path=file)]
    if not was_on_disk:
        commands = [greedy("1", one), *commands]  # type: ignore[list-item]
    exported = serve(worker(name, tmp_path / "store"), *commands)
    assert info(exported, "e").branches == 2
    turn = one + tuple(before.tokens("1")) + prompt("turn", 5)
    inbox = serve(
        worker(name), ask("import", "i", "", tenant="somebody", path=file),
        ask("import", "twice", "", tenant="somebody", path=file),
        greedy("turn", turn, tenant="somebody"), greedy("stranger", turn, tenant="stranger"),
    )  # fmt: skip
    assert info(inbox, "i").session_id == "s"
    assert info(inbox, "i").branches == 2
    assert answer(inbox, "twice").failure is SessionFailure.EXISTS
    assert (inbox.finished("turn").cached_tokens, inbox.finished("stranger").cached_tokens) == (len(one) + 5, 0)
    assert inbox.tokens("turn") == inbox.tokens("stranger") == serve(worker(name), greedy("fresh", turn)).tokens("fresh")


def test_files_that_are_damaged_or_of_another_model_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    serve(
        worker(),
        greedy("1", prompt("first"), session_id="s"),
        ask("export", "e", path=str(path)),
    )
    whole = path.read_bytes()
    rng = random.Random("damage")
    damaged = [whole[:-1], whole[: len(whole) // 2], b"", b"no session at all, but long enough to be one" * 3]
    for _ in range(12):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
    imports: list[Command] = []
    for number, content in enumerate(damaged):
        (tmp_path / str(number)).write_bytes(content)
        imports.append(ask("import", str(number), "", path=str(tmp_path / str(number))))
    inbox = serve(worker(), *imports, ask("list", "l"), greedy("1", prompt("first")))
    assert {answer(inbox, str(number)).failure for number in range(len(damaged))} == {SessionFailure.BAD_FILE}
    assert answer(inbox, "l").sessions == ()
    assert inbox.finished("1").cached_tokens == 0
    other = serve(worker(fingerprint="other weights"), ask("import", "i", "", path=str(path)))
    assert answer(other, "i").failure is SessionFailure.OTHER_MODEL
    missing = serve(worker(), ask("import", "i", "", path=str(tmp_path / "nowhere")))
    assert answer(missing, "i").failure is SessionFailure.FAILED


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_a_made_up_file_harms_nobody_and_is_answered(name: str, tmp_path: Path) -> None:
    """The checksum is right, the contents are not: what a hostile or broken writer would send."""
    header, frames = exported(tmp_path, name)

    def with_meta(meta: bytes) -> list[Frame]:
        return [Frame(replace(frame.head, meta=meta), frame.parts) for frame in frames]

    def with_parts(change: Callable[[bytes], bytes]) -> list[Frame]:
        changed = []
        for frame in frames:
            parts = tuple(change(bytes(part)) for part in frame.parts)
            changed.append(Frame(replace(frame.head, part_bytes=tuple(map(len, parts))), parts))
        return changed

    metas = {bytes(frame.head.meta) for frame in frames}
    made_up = [
        with_meta(b""), with_meta(b"\xc1"), with_meta(b"\x80"), with_parts(lambda part: part[:-4]), with_parts(lambda part: b""),
        with_parts(lambda part: part + part), *[with_meta(meta) for meta in metas if len(metas) > 1],
        *[with_meta(meta.replace(b"\x02", b"\x7f").replace(b"\x10", b"\xff")) for meta in metas],
        [Frame(replace(frame.head, offset=3), frame.parts) for frame in frames],
    ]  # fmt: skip
    imports: list[Command] = []
    for number, each in enumerate(made_up):
        path = tmp_path / f"{number}"
        write_session(path, header, each)
        imports.append(ask("import", f"{number}", f"made up {number}", path=str(path)))
    inbox = serve(
        worker(name), greedy("busy", prompt("busy"), max_tokens=30), *imports,
        ask("import", "whole", "", path=str(tmp_path / "whole")),
        greedy("after", prompt("first")), ask("list", "l"),
    )  # fmt: skip
    failures = [answer(inbox, str(number)).failure for number in range(len(made_up))]
    assert set(failures) <= {SessionFailure.BAD_FILE, SessionFailure.FAILED}, failures
    assert info(inbox, "whole").kept_tokens == info(inbox, "whole").tokens > 300
    assert inbox.finished("after").cached_tokens == len(prompt("first")) - 1
    assert inbox.tokens("after") == serve(worker(name), greedy("fresh", prompt("first"))).tokens("fresh")
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["s"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_forgetting_leaves_nothing_behind_that_nobody_needs(name: str, tmp_path: Path) -> None:
    common = prompt("common", 280)
    branch_points = (100, 270)
    subject = worker(name, tmp_path)
    inbox = serve(
        subject, greedy("1", (*common, *prompt("a", 40)), session_id="a", branch_points=branch_points),
        greedy("2", (*common, *prompt("b", 40)), session_id="b", branch_points=branch_points),
        ask("close", "c", "a", forget=True), ask("get", "b", "b"),
        ask("close", "d", "b", forget=True), greedy("again", common),
    )  # fmt: skip
    assert info(inbox, "b").kept_tokens == info(inbox, "b").tokens
    assert inbox.finished("again").cached_tokens == 0


def test_the_places_from_which_a_next_turn_may_go_on_are_pinned_and_exported(tmp_path: Path) -> None:
    """A template that drops thoughts lets the next turn part from the last one behind its last message."""
    one = prompt("first")
    branch_point = len(one) - 3
    alone = worker("qwen3_next")
    serve(alone, greedy("1", one, branch_points=(branch_point,)))
    budget = 3 * alone.library.statistics().ram.resident_bytes
    turn = (*one[:branch_point], *prompt("turn", 20))
    others = [greedy(f"other {number}", prompt(f"other {number}")) for number in range(5)]
    path = str(tmp_path / "file")
    inbox = serve(
        worker("qwen3_next", ram_bytes=budget), ask("open", "o", pinned=True),
        greedy("1", one, session_id="s", branch_points=(branch_point,)), *others, greedy("turn", turn),
        ask("export", "e", path=path),
    )  # fmt: skip
    assert inbox.finished("turn").cached_tokens == branch_point
    there = serve(worker("qwen3_next"), ask("import", "i", "", path=path), greedy("turn", turn))
    assert there.finished("turn").cached_tokens == branch_point
    assert there.tokens("turn") == inbox.tokens("turn")


def test_fewer_sessions_than_there_are_records_of_can_be_lived_with(tmp_path: Path) -> None:
    requests = [greedy(str(number), prompt(str(number), 40), session_id=f"s{number}") for number in range(4)]
    serve(worker(folder=tmp_path), *requests)
    inbox = serve(
        worker(folder=tmp_path, most_sessions=2), ask("list", "l"),
        greedy("new", prompt("new", 40), session_id="n"),
        ask("open", "o", "o"), ask("list", "m", limit=1),
    )  # fmt: skip
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["s3", "s2"]
    assert info(inbox, "o").tokens == 0
    assert [session.session_id for session in answer(inbox, "m").sessions] == ["o"]


def test_a_session_that_another_worker_has_used_since_does_not_expire(tmp_path: Path) -> None:
    now = [1000.0]
    idle = worker(folder=tmp_path, clock=lambda: now[0])
    idle.sessions.carry_out(ask("open", "o", ttl_seconds=5.0))
    idle.sessions.tend()
    assert idle.store is not None
    idle.store.flush()
    now[0] += 4
    serve(worker(folder=tmp_path, clock=lambda: now[0]), greedy("1", prompt("first"), session_id="s"))
    now[0] += 4
    tend(idle)
    found = idle.sessions.carry_out(ask("get", "a"))
    assert found is not None
    assert found.failure is None
    now[0] += 2
    tend(idle)
    gone = idle.sessions.carry_out(ask("get", "b"))
    assert gone is not None
    assert gone.failure is SessionFailure.NOT_FOUND
    idle.memory.close()


def tend(subject: RememberingWorker) -> None:
    """Until the store has said what it was asked."""
    for _ in range(20):
        subject.sessions.tend()
        assert subject.store is not None
        subject.store.flush()


def test_what_cannot_be_kept_is_refused() -> None:
    subject = worker().sessions
    for command in (
        ask("open", "a", ""),
        ask("open", "a", "a/b"),
        ask("open", "a", "a", metadata={"k": "\ud800"}),
        ask("open", "a", "a", ttl_seconds=-1.0),
        ask("import", "a", "a/b", path="/nowhere"),
        ask("fork", "a", "a", new_session_id=""),
    ):
        found = subject.carry_out(command)
        assert found is not None
        assert found.failure is SessionFailure.INVALID


def test_a_session_that_does_not_fit_into_memory_is_not_taken_in_by_halves(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    subject = worker()
    serve(
        subject, greedy("1", prompt("first", 1000), session_id="s"),
        ask("export", "e", path=path),
    )  # fmt: skip
    small = worker(ram_bytes=subject.library.statistics().ram.resident_bytes // 2)
    inbox = serve(
        small,
        ask("import", "i", "", path=path),
        ask("list", "l"),
    )
    assert answer(inbox, "i").failure is SessionFailure.OVER_QUOTA
    assert answer(inbox, "l").sessions == ()


def test_a_request_that_was_preempted_counts_once() -> None:
    requests = [greedy(str(number), prompt(str(number), 60), max_tokens=60, session_id="s") for number in range(3)]
    subject = worker(budget_tokens=240)
    inbox = subject.serve([requests, [], [], [ask("get", "a")]])
    assert subject.scheduler.statistics().preemptions > 0
    after = subject.sessions.carry_out(ask("get", "b"))
    assert after is not None
    assert after.sessions[0].requests == 3
    assert answer(inbox, "a").failure in (None, SessionFailure.NOT_FOUND)


def test_more_transfers_than_may_be_are_put_off() -> None:
    subject = worker()
    subject.sessions.carry_out(ask("open", "o"))
    answers = [subject.sessions.carry_out(ask("import", str(number), "", path="/nowhere")) for number in range(6)]
    assert [found.failure for found in answers if found is not None] == [SessionFailure.BUSY] * 2
    assert len(ended(subject)) == 4
