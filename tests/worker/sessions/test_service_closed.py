"""A session that is closed or forgotten while one of its requests runs is gone, and stays gone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from holdfast.errors import SessionFailure
from holdfast.wire.commands import Command, ReadAhead, SequenceRequest
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.sessions.registry import MOST_BRANCHES
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.script_inbox import ScriptInbox, pause, resume
from tests.fakes.session_worker import answer, ask, info, prompt, serve, taken_apart, worker

PROMPT = prompt("secret", 300)
LONG = 20  # an answer with about 13 steps after those of its prompt
FIRST = greedy("1", PROMPT, max_tokens=LONG, session_id="s")
FORGET = ask("close", "gone", forget=True)
LISTED = ask("list", "listed")


def after(steps: int, *commands: Command) -> list[Sequence[Command]]:
    return [*[[]] * steps, commands]


def run(subject: CachingWorker, *commands: Command, steps: int) -> ScriptInbox:
    """Run a request of the session `s`, with commands after this many steps, until it ends."""
    return subject.serve([[FIRST], *after(steps, *commands), *after(120, LISTED)])


def blocks_on_disk(folder: Path) -> int:
    return len(list((folder / "blocks").rglob("*.block")))


@pytest.fixture(scope="module")
def expected() -> dict[str, list[int]]:
    return {
        name: serve(worker(name), greedy("1", PROMPT, max_tokens=LONG)).tokens("1")
        for name in ("llama", "gemma3_text", "qwen3_next")
    }


@pytest.mark.parametrize(
    ("name", "steps"),
    [("llama", 0), ("llama", 3), ("gemma3_text", 12), ("qwen3_next", 0), ("qwen3_next", 12)],
)
def test_a_session_forgotten_during_its_first_answer_leaves_nothing(
    tmp_path: Path, expected: dict[str, list[int]], steps: int, name: str
) -> None:
    subject = worker(name, tmp_path, most_parked_bytes=None)
    inbox = run(subject, FORGET, steps=steps)
    assert answer(inbox, "gone").failure is None
    assert inbox.tokens("1") == expected[name], "the answer goes on"
    assert answer(inbox, "listed").sessions == ()
    assert len(subject.index) == 0
    assert blocks_on_disk(tmp_path) == 0
    assert not list((tmp_path / "sessions").rglob("*.session"))
    again = serve(worker(name, tmp_path), ask("list", "later"), greedy("2", PROMPT))
    assert answer(again, "later").sessions == ()
    assert again.finished("2").cached_tokens == 0


@pytest.mark.parametrize("steps", [3, 12])
def test_a_session_closed_during_an_answer_stays_closed_but_cached(
    tmp_path: Path, expected: dict[str, list[int]], steps: int
) -> None:
    subject = worker("llama", tmp_path)
    inbox = run(subject, ask("close", "gone"), steps=steps)
    assert answer(inbox, "gone").failure is None
    assert inbox.tokens("1") == expected["llama"]
    assert answer(inbox, "listed").sessions == ()
    again = serve(worker("llama", tmp_path), ask("list", "later"), greedy("2", PROMPT))
    assert answer(again, "later").sessions == ()
    assert again.finished("2").cached_tokens == len(PROMPT) - 1


def test_a_session_forgotten_during_a_later_answer_is_gone(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_parked_bytes=None)
    other = prompt("other", 300)
    turn = (*PROMPT, *prompt("turn", 100))
    first = [greedy("1", PROMPT, session_id="s"), greedy("o", other, session_id="o")]
    second = greedy("2", turn, max_tokens=LONG, session_id="s")
    inbox = subject.serve([first, *after(60, second), *after(5, FORGET), *after(120, LISTED)])
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["o"]
    again = serve(worker("llama", tmp_path), greedy("3", turn), greedy("4", other))
    assert again.finished("3").cached_tokens == 0
    assert again.finished("4").cached_tokens == len(other) - 1


def test_only_the_session_of_its_tenant_and_adapter_is_closed(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path)
    inbox = run(subject, ask("close", "stranger", tenant="other", forget=True), steps=3)
    assert answer(inbox, "stranger").failure is SessionFailure.NOT_FOUND
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["s"]


def test_a_closed_session_is_not_prefilled_ahead(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path)
    ahead = greedy(
        "ahead",
        (*PROMPT, *prompt("next", 200)),
        max_tokens=0,
        session_id="s",
        read_ahead=ReadAhead(known_tokens=len(PROMPT)),
    )
    inbox = subject.serve([[FIRST], *after(5, FORGET), *after(120, ahead), *after(60, LISTED)])
    assert answer(inbox, "listed").sessions == ()
    assert len(subject.index) == 0


def test_a_request_waiting_for_a_forgotten_prefix_continues(tmp_path: Path) -> None:
    """The second request waits for the prefill of the first, which is then no longer cached."""
    subject = worker("llama", tmp_path, step_tokens=32)
    inbox = subject.serve([[FIRST], [greedy("2", PROMPT)], [], [FORGET], *[[]] * 150])
    assert inbox.tokens("2") == inbox.tokens("1")[:6]


def test_closing_an_unopened_session_closes_no_other(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_sessions=1)
    full = ask("open", "other", "other", pinned=True)  # so `s` is not opened
    inbox = subject.serve([[full], [FIRST], *after(5, FORGET), *after(100, LISTED)])
    assert answer(inbox, "gone").failure is None
    assert [each.session_id for each in answer(inbox, "listed").sessions] == ["other"]


def choices(*numbers: int) -> list[SequenceRequest]:
    """The choices of one answer of the session `s`."""
    return [
        SequenceRequest(
            request_id=f"1/{number}",
            prompt_token_ids=TokenIds.of(PROMPT),
            max_tokens=LONG,
            sampling=SamplingParams(temperature=1.0, seed=number),
            session_id="s",
            is_alternative=number > 0,
        )
        for number in numbers
    ]


@pytest.mark.parametrize(
    ("name", "steps", "most_parked_bytes"),
    [("llama", 0, None), ("llama", 30, 0), ("gemma3_text", 30, None), ("qwen3_next", 30, None)],
)
def test_a_session_forgotten_during_several_choices_leaves_none(
    tmp_path: Path, name: str, steps: int, most_parked_bytes: int | None
) -> None:
    """With two places for twelve choices: some have ended, some run, some wait."""
    subject = worker(name, tmp_path, most_parked_bytes=most_parked_bytes, max_running=2)
    inbox = subject.serve(
        [choices(*range(12)), *after(steps, FORGET), *after(150, LISTED, greedy("after", PROMPT))]
    )
    assert answer(inbox, "gone").failure is None
    assert answer(inbox, "listed").sessions == ()
    assert {len(inbox.tokens(f"1/{number}")) for number in range(12)} == {LONG}
    assert inbox.finished("after").cached_tokens == 0
    again = serve(worker(name, tmp_path), ask("list", "later"), greedy("2", PROMPT))
    assert answer(again, "later").sessions == ()


def test_a_paused_choice_of_a_forgotten_session_leaves_nothing(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_parked_bytes=None)
    inbox = subject.serve(
        [
            choices(0, 1),
            *after(10, pause("1/1")),
            *after(3, FORGET),
            *after(60, resume("1/1")),
            *after(60, LISTED),
        ]
    )
    assert answer(inbox, "gone").failure is None
    assert answer(inbox, "listed").sessions == ()
    assert len(subject.index) == 0
    assert blocks_on_disk(tmp_path) == 0


def test_a_session_closed_during_several_choices_stays_closed(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path)
    inbox = subject.serve(
        [choices(0, 1, 2), *after(10, ask("close", "gone")), *[[]] * 90, [LISTED]]
    )
    assert answer(inbox, "gone").failure is None
    assert answer(inbox, "listed").sessions == ()


def test_a_session_forgotten_after_several_choices_leaves_none(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_parked_bytes=None)
    inbox = subject.serve([choices(*range(12)), *after(300, ask("get", "got")), [FORGET]])
    assert info(inbox, "got").requests == 1
    assert info(inbox, "got").branches == 12
    assert len(subject.index) == 0
    assert blocks_on_disk(tmp_path) == 0


def test_the_end_of_a_choice_deletes_no_block(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, most_parked_bytes=None)
    inbox = subject.serve([choices(*range(12))])
    cached = len(PROMPT) + LONG - 1
    turn = (*PROMPT, *inbox.tokens("1/11"))
    again = serve(
        worker("llama", tmp_path),
        greedy("2", turn, session_id="s"),
        ask("get", "got"),
        ask("export", "exported", path=str(tmp_path / "exported")),
        FORGET,
        greedy("3", PROMPT),
    )
    assert again.finished("2").cached_tokens == cached
    assert info(again, "got").branches == 12
    assert again.finished("3").cached_tokens == 0
    manifest, _ = taken_apart(tmp_path / "exported")
    assert len(manifest.branches) == MOST_BRANCHES
    assert manifest.branches[0].tokens > cached


def test_the_first_choice_is_its_sessions_latest_branch(tmp_path: Path) -> None:
    subject = worker("llama", tmp_path, max_running=1)
    first, second = choices(0, 1)
    turn = msgspec.structs.replace(second, request_id="2", max_tokens=LONG + 20)
    inbox = subject.serve(
        [
            [turn, first],
            *after(160, ask("get", "got")),
            *after(5, ask("fork", "forked", new_session_id="f")),
        ]
    )
    assert info(inbox, "got").branches == 2
    assert info(inbox, "got").tokens == len(PROMPT) + LONG - 1
    assert info(inbox, "forked").tokens == len(PROMPT) + LONG - 1


def test_a_request_of_a_forgotten_session_that_waits_for_anothers_prefill_continues(
    tmp_path: Path,
) -> None:
    subject = worker("llama", tmp_path)
    waiting = greedy("2", (*PROMPT, 5), max_tokens=3, session_id="s")
    inbox = subject.serve([[greedy("1", PROMPT), waiting], [FORGET], *[[]] * 120])
    assert answer(inbox, "gone").failure is None
    assert inbox.finished("2").cache_report.waited_for_another
    assert inbox.tokens("2") == serve(worker("llama"), waiting).tokens("2")
