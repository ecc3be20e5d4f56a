"""Export and import of sessions, also while requests run; forged files are refused before anything
is imported.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import SessionFailure
from holdfast.store.inspect import clear_store
from holdfast.wire.commands import Command
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from holdfast.worker.sessions.session_file import write_session
from tests.fakes.caching_worker import greedy
from tests.fakes.payloads import Weight
from tests.fakes.session_worker import (
    answer,
    ask,
    ended,
    exported,
    info,
    prompt,
    serve,
    taken_apart,
    worker,
)


def test_a_file_is_refused_if_pins_leave_no_room(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama", tokens=1000)
    write_session(tmp_path / "file", manifest, blocks)
    nbytes = sum(size for _, size in manifest.blocks)
    subject = worker(ram_bytes=int(nbytes * 1.4), pinned_percent=90)
    inbox = subject.serve(
        [
            [ask("open", "o", "p", tenant="t", pinned=True)],
            [greedy("theirs", prompt("theirs", 800), session_id="p", tenant="t")],
            [ask("import", "i", "", path=str(tmp_path / "file"))],
            [ask("get", "g", "p", tenant="t")],
        ],
        in_turn=True,
    )
    assert answer(inbox, "i").failure is SessionFailure.NO_ROOM
    (kept,) = answer(inbox, "g").sessions
    assert kept.kept_tokens == kept.tokens == 805


def test_a_taken_name_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    manifest, blocks = exported(tmp_path, "llama")
    write_session(tmp_path / "file", manifest, blocks)
    inbox = worker().serve(
        [
            [ask("open", "o")],
            [ask("import", "i", "", path=str(tmp_path / "file"))],
            [greedy("mine", prompt("first"))],
        ],
        in_turn=True,
    )
    assert answer(inbox, "i").failure is SessionFailure.EXISTS
    assert inbox.finished("mine").cached_tokens == 0


def test_an_imported_session_is_exported_unchanged(tmp_path: Path) -> None:
    """Two branches that share a block, with windows as states."""
    first, again = tmp_path / "first", tmp_path / "again"
    common = prompt("common", 5)
    turns = [(*common, *prompt("a", 2)), (*common, *prompt("b", 1))]
    serve(
        worker("gemma3_text"),
        greedy("common", common, max_tokens=0, session_id="s"),
        *[greedy(str(number), turn, session_id="s") for number, turn in enumerate(turns)],
        ask("export", "e", path=str(first)),
    )
    inbox = serve(
        worker("gemma3_text"), ask("import", "i", "", path=str(first)), ask("export", "e", path=str(again)),
        *[greedy(str(number), turn) for number, turn in enumerate(turns)],
    )  # fmt: skip
    assert info(inbox, "i").branches == 2
    assert [inbox.finished(str(number)).cached_tokens for number in (0, 1)] == [
        len(turn) - 1 for turn in turns
    ]
    (manifest, blocks), (written, back) = taken_apart(first), taken_apart(again)
    assert replace(written, created_at=manifest.created_at, requests=manifest.requests) == manifest
    assert [each.block for each in back] == [each.block for each in blocks]
    assert [[bytes(part) for part in each.parts] for each in back] == [
        [bytes(part) for part in each.parts] for each in blocks
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize(
    ("was_on_disk", "most_parked_bytes"), [(False, 0), (False, None), (True, 0)]
)
def test_an_exported_session_continues_elsewhere_with_the_same_answers(
    name: str, was_on_disk: bool, most_parked_bytes: int | None, tmp_path: Path
) -> None:
    one, file = prompt(name), str(tmp_path / "session")
    before = serve(
        worker(name, tmp_path / "store"),
        greedy("1", one, session_id="s"),
        greedy("side", prompt("side", 40), session_id="s"),
    )
    commands = [ask("export", "e", path=file)]
    if not was_on_disk:
        commands = [greedy("1", one), *commands]  # type: ignore[list-item]
    exported = serve(
        worker(name, tmp_path / "store", most_parked_bytes=most_parked_bytes), *commands
    )
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
    assert (inbox.finished("turn").cached_tokens, inbox.finished("stranger").cached_tokens) == (
        len(one) + 5,
        0,
    )
    assert (
        inbox.tokens("turn")
        == inbox.tokens("stranger")
        == serve(worker(name), greedy("fresh", turn)).tokens("fresh")
    )


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    serve(
        worker(),
        greedy("1", prompt("first"), session_id="s"),
        ask("export", "e", path=str(path)),
    )
    whole = path.read_bytes()
    rng = random.Random("damage")
    damaged = [
        whole[:-1],
        whole[: len(whole) // 2],
        b"",
        b"no session at all, but long enough to be one" * 3,
    ]
    for _ in range(12):
        at = rng.randrange(len(whole))
        damaged.append(whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :])
    imports: list[Command] = []
    for number, content in enumerate(damaged):
        (tmp_path / str(number)).write_bytes(content)
        imports.append(ask("import", str(number), "", path=str(tmp_path / str(number))))
    inbox = serve(worker(), *imports, ask("list", "l"), greedy("1", prompt("first")))
    assert {answer(inbox, str(number)).failure for number in range(len(damaged))} == {
        SessionFailure.BAD_FILE
    }
    assert answer(inbox, "l").sessions == ()
    assert inbox.finished("1").cached_tokens == 0
    other = serve(worker(fingerprint="other weights"), ask("import", "i", "", path=str(path)))
    assert answer(other, "i").failure is SessionFailure.OTHER_MODEL
    missing = serve(worker(), ask("import", "i", "", path=str(tmp_path / "nowhere")))
    assert answer(missing, "i").failure is SessionFailure.FAILED


def test_states_for_possible_next_turns_are_pinned_and_exported(
    tmp_path: Path,
) -> None:
    """With a template that drops reasoning, the next turn diverges after the last message."""
    one = prompt("first", 100)
    branch_point = len(one) - 3
    alone = worker("qwen3_next")
    serve(alone, greedy("1", one, branch_points=(branch_point,)))
    budget = 3 * alone.index.figures().ram_bytes
    turn = (*one[:branch_point], *prompt("turn", 20))
    others = [greedy(f"other {number}", prompt(f"other {number}", 100)) for number in range(5)]
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


def test_a_session_larger_than_memory_is_not_imported_partially(tmp_path: Path) -> None:
    path = str(tmp_path / "file")
    subject = worker()
    serve(
        subject, greedy("1", prompt("first", 1000), session_id="s"),
        ask("export", "e", path=path),
    )  # fmt: skip
    small = worker(ram_bytes=subject.index.figures().ram_bytes // 2)
    inbox = serve(
        small,
        ask("import", "i", "", path=path),
        ask("list", "l"),
    )
    assert answer(inbox, "i").failure is SessionFailure.OVER_QUOTA
    assert answer(inbox, "l").sessions == ()


def test_excess_transfers_are_postponed() -> None:
    subject = worker()
    subject.sessions.carry_out(ask("open", "o"))
    answers = [
        subject.sessions.carry_out(ask("import", str(number), "", path="/nowhere"))
        for number in range(6)
    ]
    assert [found.failure for found in answers if found is not None] == [SessionFailure.BUSY] * 2
    assert len(ended(subject)) == 4


def test_an_export_between_steps_changes_neither(tmp_path: Path) -> None:
    _, alone = exported(tmp_path)
    busy = [
        greedy(f"busy {number}", prompt(f"busy {number}", 40), max_tokens=40) for number in range(3)
    ]
    path = tmp_path / "meanwhile"
    inbox = worker().serve(
        [
            [greedy("1", prompt("first"), session_id="s")],
            [*busy, ask("export", "e", path=str(path))],
        ],
        in_turn=True,
    )
    assert info(inbox, "e").tokens == 305
    assert [each.block for each in taken_apart(path)[1]] == [each.block for each in alone]
    for request in busy:
        assert inbox.tokens(request.request_id) == serve(worker(), request).tokens(
            request.request_id
        )


@pytest.mark.parametrize("forget", [False, True])
def test_a_session_closed_during_export_is_exported_whole_or_not(
    forget: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    inbox = worker().serve(
        [
            [greedy("1", prompt("first", 800), session_id="s")],
            [
                ask("export", "e", path=str(path)),
                ask("close", "c", forget=forget),
                greedy("busy", prompt("busy")),
            ],
        ],
        in_turn=True,
    )
    assert info(inbox, "c").session_id == "s"
    if forget:
        assert answer(inbox, "e").failure is SessionFailure.FAILED
        assert list(tmp_path.iterdir()) == []
    else:
        assert info(inbox, "e").tokens == taken_apart(path)[0].branches[0].tokens == 805
    assert inbox.tokens("busy") == serve(worker(), greedy("busy", prompt("busy"))).tokens("busy")


def test_of_two_imports_under_one_name_one_succeeds(
    tmp_path: Path,
) -> None:
    exported(tmp_path, tokens=1000)
    path = str(tmp_path / "whole")
    imports = [
        ask("import", "1", "", path=path),
        ask("import", "2", "", path=path),
        ask("import", "3", "other", path=path),
    ]
    inbox = worker().serve(
        [[*imports, greedy("busy", prompt("busy"))], [greedy("again", prompt("first", 1000))]],
        in_turn=True,
    )
    assert sorted(str(answer(inbox, call_id).failure) for call_id in "12") == [
        "None",
        str(SessionFailure.EXISTS),
    ]
    assert info(inbox, "3").kept_tokens == 1005
    assert inbox.finished("again").cached_tokens == 999
    assert inbox.tokens("busy") == serve(worker(), greedy("busy", prompt("busy"))).tokens("busy")


def test_a_worker_leaves_no_partial_file_and_no_thread(tmp_path: Path) -> None:
    subject = worker()
    serve(subject, greedy("1", prompt("first", 2000), session_id="s"))
    path = tmp_path / "out"
    assert subject.sessions.carry_out(ask("export", "e", path=str(path))) is None
    subject.sessions.close()
    assert not subject.sessions.is_busy
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-session"]
    subject.index.check_invariants()


def test_a_missing_folder_fails_only_the_export(tmp_path: Path) -> None:
    inbox = serve(
        worker(), greedy("1", prompt("first"), session_id="s"), ask("export", "e", path=str(tmp_path / "nowhere" / "out")),
        ask("get", "g"),
    )  # fmt: skip
    assert answer(inbox, "e").failure is SessionFailure.FAILED
    assert "No such file" in answer(inbox, "e").message
    assert info(inbox, "g").kept_tokens == 305


def test_blocks_stored_during_an_export_do_not_affect_it(
    tmp_path: Path,
) -> None:
    subject = worker(ram_bytes=1 << 18)
    serve(subject, greedy("1", prompt("first"), session_id="s"))
    path = tmp_path / "out"
    assert subject.sessions.carry_out(ask("export", "e", path=str(path))) is None
    index = subject.index
    assert (
        index.insert(
            Cursor(index.root()),
            pack_tokens(prompt("other", 10)),
            Weight(index.ram_budget_bytes - 1000),
        )
        is None
    )
    (ending,) = ended(subject)
    assert ending.failure is None, ending.message
    assert path.is_file()
    index.check_invariants()
    assert (
        index.insert(
            Cursor(index.root()),
            pack_tokens(prompt("other", 10)),
            Weight(index.ram_budget_bytes - 1000),
        )
        is not None
    )


def test_a_file_with_another_fingerprint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    serve(
        worker(fingerprint="2-" + "0" * 32),
        greedy("1", prompt("first"), session_id="s"),
        ask("export", "e", path=str(path)),
    )
    imported = serve(worker(), ask("import", "i", "", path=str(path)))
    assert answer(imported, "i").failure is SessionFailure.OTHER_MODEL
    assert "written by another version of Holdfast" in answer(imported, "i").message


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_after_a_store_was_cleared_the_remaining_session_is_exported(
    name: str, tmp_path: Path
) -> None:
    store, path = tmp_path / "store", tmp_path / "file"
    before, now = prompt("first"), prompt("second")
    serve(worker(name, store), greedy("1", before, session_id="s"))
    subject = worker(name, store)
    clear_store(store)
    inbox = serve(
        subject, greedy("2", now, session_id="s"), ask("export", "e", path=str(path)), greedy("again", before)
    )  # fmt: skip
    assert info(inbox, "e").kept_tokens == len(now) + 5
    (branch,) = taken_apart(path)[0].branches
    assert branch.tokens == len(now) + 5
    assert inbox.finished("again").cached_tokens == 0
    there = serve(worker(name), ask("import", "i", "", path=str(path)), greedy("2", now))
    assert there.finished("2").cached_tokens == len(now) - 1
    assert there.tokens("2") == inbox.tokens("2")


def test_a_session_without_cached_blocks_is_not_exported(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "file"
    serve(
        worker(folder=store),
        greedy("1", prompt("first"), session_id="s"),
        greedy("2", prompt("side"), session_id="s"),
    )
    subject = worker(folder=store)
    clear_store(store)
    inbox = serve(
        subject,
        ask("export", "e", path=str(path)),
        ask("get", "g"),
        ask("export", "again", path=str(path)),
    )
    for call_id in ("e", "again"):
        assert answer(inbox, call_id).failure is SessionFailure.NOT_KEPT
    assert info(inbox, "g").kept_tokens == 0
    assert not path.exists()
