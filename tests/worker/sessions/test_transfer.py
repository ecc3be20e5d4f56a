"""Export and import of sessions, also while requests run; unusable files are refused before
anything is imported.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import SessionFailure
from holdfast.store.inspect import clear_store
from holdfast.wire.sessions import SessionCommand
from holdfast.worker.prefix.chain import Cursor, pack_tokens
from tests.fakes.caching_worker import greedy
from tests.fakes.payloads import Weight
from tests.fakes.script_inbox import ScriptInbox
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

FIRST = greedy("1", prompt("first"), session_id="s")
BUSY = greedy("busy", prompt("busy"))


def to_import(path: Path, call_id: str = "i", session_id: str = "", **more: str) -> SessionCommand:
    return ask("import", call_id, session_id, path=str(path), **more)


def to_export(path: Path, call_id: str = "e") -> SessionCommand:
    return ask("export", call_id, path=str(path))


def assert_busy_unharmed(inbox: ScriptInbox) -> None:
    assert inbox.tokens("busy") == serve(worker(), BUSY).tokens("busy")


def test_a_file_is_refused_if_pins_leave_no_room(tmp_path: Path) -> None:
    manifest, _ = exported(tmp_path, tokens=1000)
    nbytes = sum(size for _, size in manifest.blocks)
    inbox = serve(
        worker(ram_bytes=int(nbytes * 1.4), pinned_percent=90),
        ask("open", "o", "p", tenant="t", pinned=True),
        greedy("theirs", prompt("theirs", 800), session_id="p", tenant="t"),
        to_import(tmp_path / "whole"),
        ask("get", "g", "p", tenant="t"),
    )
    assert answer(inbox, "i").failure is SessionFailure.NO_ROOM
    assert info(inbox, "g").kept_tokens == info(inbox, "g").tokens == 805


def test_a_taken_name_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    exported(tmp_path)
    mine = greedy("mine", prompt("first"))
    inbox = serve(worker(), ask("open", "o"), to_import(tmp_path / "whole"), mine)
    assert answer(inbox, "i").failure is SessionFailure.EXISTS
    assert inbox.finished("mine").cached_tokens == 0


def test_an_imported_session_is_exported_unchanged(tmp_path: Path) -> None:
    """Two branches that share a block, with windows as states."""
    first, again = tmp_path / "first", tmp_path / "again"
    common = prompt("common", 5)
    turns = {"a": (*common, *prompt("a", 2)), "b": (*common, *prompt("b", 1))}
    serve(
        worker("gemma3_text"),
        greedy("common", common, max_tokens=0, session_id="s"),
        *[greedy(name, turn, session_id="s") for name, turn in turns.items()],
        to_export(first),
    )
    asked = [greedy(name, turn) for name, turn in turns.items()]
    inbox = serve(worker("gemma3_text"), to_import(first), to_export(again), *asked)
    assert info(inbox, "i").branches == 2
    for name, turn in turns.items():
        assert inbox.finished(name).cached_tokens == len(turn) - 1
    (manifest, blocks), (written, back) = taken_apart(first), taken_apart(again)
    assert replace(written, created_at=manifest.created_at, requests=manifest.requests) == manifest
    for one, other in zip(back, blocks, strict=True):
        assert one.block == other.block
        assert [*map(bytes, one.parts)] == [*map(bytes, other.parts)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
@pytest.mark.parametrize(
    ("was_on_disk", "most_parked_bytes"), [(False, 0), (False, None), (True, 0)]
)
def test_an_exported_session_continues_elsewhere_with_the_same_answers(
    name: str, was_on_disk: bool, most_parked_bytes: int | None, tmp_path: Path
) -> None:
    one, file, store = prompt(name), tmp_path / "session", tmp_path / "store"
    request = greedy("1", one, session_id="s")
    side = greedy("side", prompt("side", 40), session_id="s")
    before = serve(worker(name, store), request, side)
    known = [] if was_on_disk else [greedy("1", one)]
    subject = worker(name, store, most_parked_bytes=most_parked_bytes)
    assert info(serve(subject, *known, to_export(file)), "e").branches == 2
    turn = one + tuple(before.tokens("1")) + prompt("turn", 5)
    inbox = serve(
        worker(name),
        to_import(file, tenant="somebody"),
        to_import(file, "twice", tenant="somebody"),
        greedy("turn", turn, tenant="somebody"),
        greedy("stranger", turn, tenant="stranger"),
    )
    assert (info(inbox, "i").session_id, info(inbox, "i").branches) == ("s", 2)
    assert answer(inbox, "twice").failure is SessionFailure.EXISTS
    assert inbox.finished("turn").cached_tokens == len(one) + 5
    assert inbox.finished("stranger").cached_tokens == 0
    fresh = serve(worker(name), greedy("fresh", turn)).tokens("fresh")
    assert inbox.tokens("turn") == inbox.tokens("stranger") == fresh


def test_unusable_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    exported(tmp_path)
    whole = (tmp_path / "whole").read_bytes()
    (tmp_path / "damaged").write_bytes(whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:])
    serve(worker(fingerprint="2-" + "0" * 32), FIRST, to_export(tmp_path / "old"))
    imports = {name: to_import(tmp_path / name, name) for name in ("damaged", "nowhere", "old")}
    inbox = serve(worker(), *imports.values(), ask("list", "l"), FIRST)
    assert [answer(inbox, name).failure for name in imports] == [
        SessionFailure.BAD_FILE,
        SessionFailure.FAILED,
        SessionFailure.OTHER_MODEL,
    ]
    assert "written by another version of Holdfast" in answer(inbox, "old").message
    assert answer(inbox, "l").sessions == ()
    assert inbox.finished("1").cached_tokens == 0
    other = serve(worker(fingerprint="other weights"), to_import(tmp_path / "whole"))
    assert answer(other, "i").failure is SessionFailure.OTHER_MODEL


def test_states_for_possible_next_turns_are_pinned_and_exported(tmp_path: Path) -> None:
    """With a template that drops reasoning, the next turn diverges after the last message."""
    one, path = prompt("first", 100), tmp_path / "file"
    at = len(one) - 3
    alone = worker("qwen3_next")
    serve(alone, greedy("1", one, branch_points=(at,)))
    turn = greedy("turn", (*one[:at], *prompt("turn", 20)))
    others = [greedy(f"other {number}", prompt(f"other {number}", 100)) for number in range(5)]
    inbox = serve(
        worker("qwen3_next", ram_bytes=3 * alone.index.figures().ram_bytes),
        ask("open", "o", pinned=True),
        greedy("1", one, session_id="s", branch_points=(at,)),
        *(*others, turn, to_export(path)),
    )
    there = serve(worker("qwen3_next"), to_import(path), turn)
    assert inbox.finished("turn").cached_tokens == there.finished("turn").cached_tokens == at
    assert there.tokens("turn") == inbox.tokens("turn")


def test_a_session_larger_than_memory_is_not_imported_partially(tmp_path: Path) -> None:
    path, subject = tmp_path / "file", worker()
    serve(subject, greedy("1", prompt("first", 1000), session_id="s"), to_export(path))
    small = worker(ram_bytes=subject.index.figures().ram_bytes // 2)
    inbox = serve(small, to_import(path), ask("list", "l"))
    assert answer(inbox, "i").failure is SessionFailure.OVER_QUOTA
    assert answer(inbox, "l").sessions == ()


def test_excess_transfers_are_postponed() -> None:
    subject = worker()
    subject.sessions.carry_out(ask("open", "o"))
    imports = [to_import(Path("/nowhere"), str(number)) for number in range(6)]
    answers = [subject.sessions.carry_out(each) for each in imports]
    assert [found.failure for found in answers if found is not None] == [SessionFailure.BUSY] * 2
    assert len(ended(subject)) == 4


def test_an_export_between_steps_changes_neither(tmp_path: Path) -> None:
    _, alone = exported(tmp_path)
    path = tmp_path / "meanwhile"
    busy = [greedy(name, prompt(name, 40), max_tokens=40) for name in ("busy 1", "busy 2")]
    inbox = worker().serve([[FIRST], [*busy, to_export(path)]], in_turn=True)
    assert info(inbox, "e").tokens == 305
    assert [each.block for each in taken_apart(path)[1]] == [each.block for each in alone]
    for each in busy:
        name = each.request_id
        assert inbox.tokens(name) == serve(worker(), each).tokens(name)


@pytest.mark.parametrize("forget", [False, True])
def test_a_session_closed_during_export_is_exported_whole_or_not(
    forget: bool, tmp_path: Path
) -> None:
    path = tmp_path / "out"
    first = greedy("1", prompt("first", 800), session_id="s")
    together = [to_export(path), ask("close", "c", forget=forget), BUSY]
    inbox = worker().serve([[first], together], in_turn=True)
    assert info(inbox, "c").session_id == "s"
    if forget:
        assert answer(inbox, "e").failure is SessionFailure.FAILED
        assert list(tmp_path.iterdir()) == []
    else:
        assert info(inbox, "e").tokens == taken_apart(path)[0].branches[0].tokens == 805
    assert_busy_unharmed(inbox)


def test_of_two_imports_under_one_name_one_succeeds(tmp_path: Path) -> None:
    exported(tmp_path, tokens=1000)
    names = {"1": "", "2": "", "3": "other"}
    imports = [to_import(tmp_path / "whole", call_id, name) for call_id, name in names.items()]
    again = greedy("again", prompt("first", 1000))
    inbox = worker().serve([[*imports, BUSY], [again]], in_turn=True)
    assert {answer(inbox, call_id).failure for call_id in "12"} == {None, SessionFailure.EXISTS}
    assert info(inbox, "3").kept_tokens == 1005
    assert inbox.finished("again").cached_tokens == 999
    assert_busy_unharmed(inbox)


def test_a_worker_leaves_no_partial_file_and_no_thread(tmp_path: Path) -> None:
    subject = worker()
    serve(subject, greedy("1", prompt("first", 2000), session_id="s"))
    assert subject.sessions.carry_out(to_export(tmp_path / "out")) is None
    subject.sessions.close()
    assert not subject.sessions.is_busy
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "holdfast-session"]
    subject.index.check_invariants()


def test_a_missing_folder_fails_only_the_export(tmp_path: Path) -> None:
    inbox = serve(worker(), FIRST, to_export(tmp_path / "nowhere" / "out"), ask("get", "g"))
    assert answer(inbox, "e").failure is SessionFailure.FAILED
    assert "No such file" in answer(inbox, "e").message
    assert info(inbox, "g").kept_tokens == 305


def test_blocks_stored_during_an_export_do_not_affect_it(tmp_path: Path) -> None:
    subject = worker(ram_bytes=1 << 18)
    serve(subject, FIRST)
    path, index = tmp_path / "out", subject.index

    def insert_a_large_block() -> object:
        tokens, weight = pack_tokens(prompt("other", 10)), Weight(index.ram.budget_bytes - 1000)
        return index.insert(Cursor(index.root()), tokens, weight)

    assert subject.sessions.carry_out(to_export(path)) is None
    assert insert_a_large_block() is None
    (ending,) = ended(subject)
    assert ending.failure is None, ending.message
    assert path.is_file()
    index.check_invariants()
    assert insert_a_large_block() is not None


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_after_a_store_was_cleared_the_remaining_session_is_exported(
    name: str, tmp_path: Path
) -> None:
    store, path, now = tmp_path / "store", tmp_path / "file", prompt("second")
    serve(worker(name, store), FIRST)
    subject = worker(name, store)
    clear_store(store)
    second, again = greedy("2", now, session_id="s"), greedy("again", prompt("first"))
    inbox = serve(subject, second, to_export(path), again)
    (branch,) = taken_apart(path)[0].branches
    assert info(inbox, "e").kept_tokens == branch.tokens == len(now) + 5
    assert inbox.finished("again").cached_tokens == 0
    there = serve(worker(name), to_import(path), greedy("2", now))
    assert there.finished("2").cached_tokens == len(now) - 1
    assert there.tokens("2") == inbox.tokens("2")


def test_a_session_without_cached_blocks_is_not_exported(tmp_path: Path) -> None:
    store, path = tmp_path / "store", tmp_path / "file"
    serve(worker(folder=store), FIRST, greedy("2", prompt("side"), session_id="s"))
    subject = worker(folder=store)
    clear_store(store)
    inbox = serve(subject, to_export(path), ask("get", "g"), to_export(path, "again"))
    for call_id in ("e", "again"):
        assert answer(inbox, call_id).failure is SessionFailure.NOT_KEPT
    assert info(inbox, "g").kept_tokens == 0
    assert not path.exists()
