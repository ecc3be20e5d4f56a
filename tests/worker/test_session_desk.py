"""Sessions through a whole worker: real engine, real memory, real store."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from holdfast.messages import Command
from holdfast.session_messages import (
    CloseSession,
    ExportSession,
    ForkSession,
    GetSession,
    ImportSession,
    ListSessions,
    OpenSession,
    PinState,
    SessionAnswer,
    SessionFailure,
    SessionInfo,
    UpdateSession,
)
from tests.equalities.test_batched_is_alone import probed
from tests.fakes.remembering_worker import RememberingWorker, greedy
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.tiny_models import VOCAB_SIZE


def worker(name: str = "llama", folder: Path | None = None, **more: object) -> RememberingWorker:
    return RememberingWorker(probed(name).runner, vocab_size=VOCAB_SIZE, folder=folder, **more)  # type: ignore[arg-type]


def prompt(seed: str, tokens: int = 300) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def serve(subject: RememberingWorker, *commands: Command) -> ScriptInbox:
    """One command after the other, each when the one before it has come to its end."""
    return subject.serve([[command] for command in commands], in_turn=True)


def answer(inbox: ScriptInbox, call_id: str) -> SessionAnswer:
    (found,) = [event for event in inbox.events if isinstance(event, SessionAnswer) and event.call_id == call_id]
    return found


def info(inbox: ScriptInbox, call_id: str) -> SessionInfo:
    found = answer(inbox, call_id)
    assert found.failure is None, found.message
    (session,) = found.sessions
    return session


def get(call_id: str, session_id: str = "s", tenant: str = "") -> GetSession:
    return GetSession(call_id=call_id, tenant=tenant, session_id=session_id)


def test_a_request_opens_its_session_and_the_next_turn_goes_on_in_it() -> None:
    first = prompt("first")
    inbox = serve(worker(), greedy("1", first, session_id="s"))
    turn = first + tuple(inbox.tokens("1")) + prompt("turn", 20)
    inbox = serve(
        worker(), greedy("1", first, session_id="s"), greedy("2", turn, session_id="s"),
        greedy("side", prompt("side", 50), session_id="s"), get("a"), ListSessions(call_id="b", tenant=""),
    )  # fmt: skip
    session = info(inbox, "a")
    assert (session.requests, session.branches, session.tokens) == (3, 2, 55)
    assert session.kept_tokens == session.ram_tokens == 55
    assert answer(inbox, "b").sessions == (session,)


def test_what_a_session_keeps_is_told_to_the_token() -> None:
    inbox = serve(worker(), greedy("1", prompt("first"), session_id="s", max_tokens=6), get("a"), get("b", tenant="other"))
    session = info(inbox, "a")
    assert session.tokens == session.kept_tokens == 305  # the last token of an answer is never read
    assert session.kept_bytes > 0
    assert answer(inbox, "b").failure is SessionFailure.NOT_FOUND


def test_sessions_are_there_after_a_restart_with_their_pins(tmp_path: Path) -> None:
    serve(
        worker(folder=tmp_path),
        OpenSession(call_id="o", tenant="t", session_id="s", pinned=True, metadata={"task": "x"}, ttl_seconds=None),
        greedy("1", prompt("first"), session_id="s", tenant="t"),
    )
    session = info(serve(worker(folder=tmp_path), get("a", tenant="t")), "a")
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
        OpenSession(call_id="o", tenant="", session_id="s", pinned=is_pinned),
        greedy("1", one, session_id="s"), *others, get("a"), greedy("again", one),
    )  # fmt: skip
    assert info(inbox, "a").kept_tokens == (305 if is_pinned else 0)
    assert inbox.finished("again").cached_tokens == (299 if is_pinned else 0)


def test_what_goes_beyond_the_quota_is_not_pinned_and_says_so() -> None:
    alone = worker()
    serve(alone, greedy("1", prompt("first")))
    whole = alone.library.statistics().ram.resident_bytes
    inbox = serve(
        worker(ram_bytes=int(whole * 1.9)),
        OpenSession(call_id="o", tenant="", session_id="s", pinned=True),
        greedy("1", prompt("first"), session_id="s"), get("a"),
        ForkSession(call_id="f", tenant="", session_id="s", new_session_id="loose"),
        UpdateSession(call_id="u", tenant="", session_id="s", pinned=False), get("b"),
        UpdateSession(call_id="again", tenant="", session_id="s", pinned=True),
    )  # fmt: skip
    assert info(inbox, "a").pin_state is PinState.OVER_QUOTA
    assert info(inbox, "b").pin_state is PinState.NONE
    assert answer(inbox, "again").failure is SessionFailure.OVER_QUOTA


def test_a_fork_goes_on_alone_and_closing_the_first_takes_nothing_from_it() -> None:
    one = prompt("first")
    inbox = serve(
        worker(), greedy("1", one, session_id="s"),
        ForkSession(call_id="f", tenant="", session_id="s", new_session_id="fork"),
        ForkSession(call_id="taken", tenant="", session_id="s", new_session_id="fork"),
        greedy("2", (*one, 1, 2, 3), session_id="fork"),
        CloseSession(call_id="c", tenant="", session_id="s", forget=True), get("gone"), get("fork", "fork"),
        CloseSession(call_id="d", tenant="", session_id="fork", forget=True), greedy("again", one),
    )  # fmt: skip
    assert info(inbox, "f").forked_from == "s"
    assert answer(inbox, "taken").failure is SessionFailure.EXISTS
    assert answer(inbox, "gone").failure is SessionFailure.NOT_FOUND
    assert info(inbox, "fork").kept_tokens == info(inbox, "fork").tokens > 300
    assert inbox.finished("again").cached_tokens == 0


def test_sessions_end_when_their_time_is_over() -> None:
    now = [1000.0]
    subject = worker(clock=lambda: now[0])
    subject.sessions.carry_out(OpenSession(call_id="o", tenant="", session_id="s", ttl_seconds=5.0))
    now[0] += 4.9
    assert subject.sessions.carry_out(get("a")).failure is None  # type: ignore[union-attr]
    now[0] += 0.2
    assert subject.sessions.carry_out(get("b")).failure is SessionFailure.NOT_FOUND  # type: ignore[union-attr]


def test_the_session_used_longest_ago_makes_room() -> None:
    opens = [OpenSession(call_id=str(number), tenant="", session_id=str(number)) for number in range(5)]
    inbox = serve(worker(), *opens, ListSessions(call_id="l", tenant=""))
    assert [session.session_id for session in answer(inbox, "l").sessions] == ["4", "3", "2", "1"]


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize("was_on_disk", [False, True])
def test_an_exported_session_goes_on_elsewhere_with_the_same_answers(name: str, was_on_disk: bool, tmp_path: Path) -> None:
    one, file = prompt(name), str(tmp_path / "session")
    before = serve(
        worker(name, tmp_path / "store"), greedy("1", one, session_id="s"), greedy("side", prompt("side", 40), session_id="s")
    )
    commands = [ExportSession(call_id="e", tenant="", session_id="s", path=file)]
    if not was_on_disk:
        commands = [greedy("1", one), *commands]  # type: ignore[list-item]
    exported = serve(worker(name, tmp_path / "store"), *commands)
    assert info(exported, "e").branches == 2
    turn = one + tuple(before.tokens("1")) + prompt("turn", 5)
    inbox = serve(
        worker(name), ImportSession(call_id="i", tenant="somebody", path=file),
        ImportSession(call_id="twice", tenant="somebody", path=file),
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
        ExportSession(call_id="e", tenant="", session_id="s", path=str(path)),
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
        imports.append(ImportSession(call_id=str(number), tenant="", path=str(tmp_path / str(number))))
    inbox = serve(worker(), *imports, ListSessions(call_id="l", tenant=""), greedy("1", prompt("first")))
    assert {answer(inbox, str(number)).failure for number in range(len(damaged))} == {SessionFailure.BAD_FILE}
    assert answer(inbox, "l").sessions == ()
    assert inbox.finished("1").cached_tokens == 0
    other = serve(worker(fingerprint="other weights"), ImportSession(call_id="i", tenant="", path=str(path)))
    assert answer(other, "i").failure is SessionFailure.OTHER_MODEL
    missing = serve(worker(), ImportSession(call_id="i", tenant="", path=str(tmp_path / "nowhere")))
    assert answer(missing, "i").failure is SessionFailure.FAILED
