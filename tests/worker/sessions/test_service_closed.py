"""A session that is closed or forgotten while one of its requests runs is gone, and stays gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import SessionFailure
from holdfast.wire.commands import ReadAhead
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.session_worker import answer, ask, prompt, serve, worker

PROMPT = prompt("secret", 300)
LONG = 40
MODELS = ["llama", "gemma3_text", "qwen3_next"]


def run(subject: CachingWorker, *commands: object, after: int) -> ScriptInbox:
    """Run a request of the session `s`, with commands after this many steps, until it ends."""
    script = [
        [greedy("1", PROMPT, max_tokens=LONG, session_id="s")],
        *[[]] * after,
        list(commands),
        *[[]] * 120,
        [ask("list", "listed")],
    ]
    return subject.serve(script)  # type: ignore[arg-type]


def blocks_on_disk(folder: Path) -> int:
    return len(list((folder / "blocks").rglob("*.block")))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {
        name: serve(worker(name), greedy("1", PROMPT, max_tokens=LONG)).tokens("1")
        for name in MODELS
    }


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("after", [0, 3, 30])
def test_a_session_forgotten_during_its_first_answer_leaves_nothing(
    tmp_path: Path, expected: dict[str, list[int]], after: int, name: str
) -> None:
    subject = worker(name, tmp_path, most_parked_bytes=None)
    inbox = run(subject, ask("close", "gone", forget=True), after=after)
    assert answer(inbox, "gone").failure is None
    assert inbox.tokens("1") == expected[name], "the answer goes on"
    assert answer(inbox, "listed").sessions == ()
    assert len(subject.index) == 0
    assert blocks_on_disk(tmp_path) == 0
    assert not list((tmp_path / "sessions").rglob("*.session"))
    again = serve(worker(name, tmp_path), ask("list", "later"), greedy("2", PROMPT))
    assert answer(again, "later").sessions == ()
    assert again.finished("2").cached_tokens == 0


@pytest.mark.parametrize("after", [0, 3, 30])
def test_a_session_closed_during_an_answer_stays_closed_and_its_tokens_stay_cached(
    tmp_path: Path, expected: dict[str, list[int]], after: int
) -> None:
    subject = worker("llama", tmp_path)
    inbox = run(subject, ask("close", "gone"), after=after)
    assert answer(inbox, "gone").failure is None
    assert inbox.tokens("1") == expected["llama"]
    assert answer(inbox, "listed").sessions == ()
    again = serve(worker("llama", tmp_path), ask("list", "later"), greedy("2", PROMPT))
    assert answer(again, "later").sessions == ()
    assert again.finished("2").cached_tokens == len(PROMPT) - 1


def test_a_session_forgotten_during_a_later_answer_is_gone_completely(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_parked_bytes=None)
    other = prompt("other", 300)
    turn = (*PROMPT, *prompt("turn", 100))
    inbox = subject.serve(
        [
            [greedy("1", PROMPT, session_id="s"), greedy("o", other, session_id="o")],
            *[[]] * 60,
            [greedy("2", turn, max_tokens=LONG, session_id="s")],
            *[[]] * 5,
            [ask("close", "gone", forget=True)],
            *[[]] * 120,
            [ask("list", "listed")],
        ]
    )
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["o"]
    again = serve(worker("llama", tmp_path), greedy("3", turn), greedy("4", other))
    assert again.finished("3").cached_tokens == 0
    assert again.finished("4").cached_tokens == len(other) - 1


def test_only_the_session_of_this_tenant_and_adapter_is_closed(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path)
    inbox = run(
        subject,
        ask("close", "stranger", tenant="other", forget=True),
        after=3,
    )
    assert answer(inbox, "stranger").failure is SessionFailure.NOT_FOUND
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["s"]


def test_nothing_is_prefilled_ahead_for_a_session_that_was_closed(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path)
    ahead = greedy(
        "ahead",
        (*PROMPT, *prompt("next", 200)),
        max_tokens=0,
        session_id="s",
        read_ahead=ReadAhead(known_tokens=len(PROMPT)),
    )
    inbox = subject.serve(
        [
            [greedy("1", PROMPT, max_tokens=LONG, session_id="s")],
            *[[]] * 5,
            [ask("close", "gone", forget=True)],
            *[[]] * 120,
            [ahead],
            *[[]] * 60,
            [ask("list", "listed")],
        ]
    )
    assert answer(inbox, "listed").sessions == ()
    assert len(subject.index) == 0


def test_a_request_that_waits_for_the_same_prefix_is_not_left_waiting(tmp_path: Path) -> None:
    """The second request waits for the prefill of the first, which is then no longer cached."""
    subject = worker("llama", tmp_path, step_tokens=32)
    inbox = subject.serve(
        [
            [greedy("1", PROMPT, max_tokens=LONG, session_id="s")],
            [greedy("2", PROMPT)],
            [],
            [ask("close", "gone", forget=True)],
            *[[]] * 150,
        ]
    )
    assert inbox.tokens("2") == inbox.tokens("1")[:6]


def test_closing_a_session_that_is_not_open_yet_closes_no_other_one(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_sessions=1)
    inbox = subject.serve(
        [
            [ask("open", "other", "other", pinned=True)],  # so `s` is not opened
            [greedy("1", PROMPT, max_tokens=LONG, session_id="s")],
            *[[]] * 5,
            [ask("close", "gone", forget=True)],
            *[[]] * 100,
            [ask("list", "listed")],
        ]
    )
    assert answer(inbox, "gone").failure is None
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["other"]
