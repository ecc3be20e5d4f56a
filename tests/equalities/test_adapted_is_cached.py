"""KV is reused by later requests to the same adapter and never by others: from RAM, live states,
disk or a session file.
"""

from __future__ import annotations

import random
import tempfile
from functools import cache
from pathlib import Path

import pytest

from holdfast.errors import SessionFailure
from holdfast.wire.commands import ReadAhead, ReadAheadRun, SequenceRequest
from holdfast.wire.events import CacheOutcome, Rejected
from holdfast.wire.requests import TokenIds
from holdfast.wire.sessions import SessionAnswer, SessionCommand
from holdfast.worker.engine.layouts import Runner
from tests.fakes.adapters import adapted_runner, write_tiny_adapter
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE

NAMES = ("", "sql", "tone")
FINGERPRINTS = {"sql": "one", "tone": "two"}


@cache
def runner_of(name: str) -> Runner:
    keys = None if name != "gemma3_text" else ["self_attn.v_proj"]
    with tempfile.TemporaryDirectory() as root:
        folders = {
            adapter: write_tiny_adapter(Path(root) / adapter, name, seed=seed, keys=keys)
            for seed, adapter in enumerate(FINGERPRINTS)
        }
        return adapted_runner(name, folders)


def worker(runner: Runner, folder: Path | None = None, **more: object) -> CachingWorker:
    how = {"adapters": FINGERPRINTS, "max_running": 8, **more}
    return CachingWorker(runner, folder, **how)  # type: ignore[arg-type]


def prompt_of(seed: str, tokens: int = 90) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def asked(prompt: tuple[int, ...], label: str) -> list[SequenceRequest]:
    return [greedy(f"{label}{adapter}", prompt, adapter=adapter) for adapter in NAMES]


def cached(inbox: ScriptInbox, label: str) -> list[int]:
    return [inbox.finished(f"{label}{adapter}").cached_tokens for adapter in NAMES]


def drawn(inbox: ScriptInbox, label: str) -> list[list[int]]:
    return [inbox.tokens(f"{label}{adapter}") for adapter in NAMES]


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "mamba2", *slow("qwen3_next")])
def test_cached_equals_fresh_for_each_adapter_and_after_a_restart(
    name: str, tmp_path: Path
) -> None:
    runner, prompt = runner_of(name), prompt_of("a prompt", 300)
    fresh = [
        worker(runner).serve([[request]]).tokens(request.request_id)
        for request in asked(prompt, "fresh")
    ]
    assert len({tuple(tokens) for tokens in fresh}) == len(NAMES)
    store = tmp_path / "store"
    # first together, so that others' live states, waiting twins and blocks could be mistaken; then
    # one after another, from parked states; then from disk
    script = [asked(prompt, "together"), *([each] for each in asked(prompt, "again"))]
    before = worker(runner, store).serve(script, in_turn=True)
    assert cached(before, "together") == [0, 0, 0]
    assert cached(before, "again") == [299, 299, 299]
    after = worker(runner, store).serve([asked(prompt, "restarted")])
    assert cached(after, "restarted") == [299, 299, 299]
    for inbox, label in ((before, "together"), (before, "again"), (after, "restarted")):
        assert drawn(inbox, label) == fresh


def test_a_new_version_of_an_adapter_finds_nothing(tmp_path: Path) -> None:
    runner = runner_of("llama")
    prompt = prompt_of("a prompt")
    worker(runner, tmp_path / "store").serve([asked(prompt, "old")])
    changed = worker(runner, tmp_path / "store", adapters={**FINGERPRINTS, "tone": "three"})
    inbox = changed.serve([asked(prompt, "new")])
    assert cached(inbox, "new") == [89, 89, 0]
    assert inbox.finished("newtone").cache_report.outcome is CacheOutcome.NOTHING_STORED


def test_a_session_and_its_file_belong_to_one_adapter(tmp_path: Path) -> None:
    runner = runner_of("llama")
    prompt = prompt_of("a prompt")
    file = str(tmp_path / "mine.session")

    def command(operation: str, adapter: str, **more: str) -> SessionCommand:
        return SessionCommand(
            operation=operation,  # type: ignore[arg-type]
            call_id=f"{operation} {adapter}",
            tenant="",
            adapter=adapter,
            session_id="mine",
            **more,  # type: ignore[arg-type]
        )

    script = [
        [greedy("first", prompt, adapter="sql", session_id="mine")],
        [command("get", "")],
        [command("get", "sql")],
        [command("export", "sql", path=file)],
        [command("import", "", path=file)],
        [command("import", "tone", path=file)],
        [command("get", "other")],
    ]
    inbox = worker(runner).serve(script, in_turn=True)
    answers = {
        event.call_id: event.failure for event in inbox.events if isinstance(event, SessionAnswer)
    }
    assert answers == {
        "get ": SessionFailure.NOT_FOUND,
        "get sql": None,
        "export sql": None,
        "import ": SessionFailure.OTHER_MODEL,
        "import tone": SessionFailure.OTHER_MODEL,
        "get other": SessionFailure.NOT_FOUND,
    }
    again = worker(runner).serve(
        [[command("import", "sql", path=file)], asked(prompt, "imported")], in_turn=True
    )
    assert cached(again, "imported") == [0, 89, 0]


def test_a_prompt_prefilled_ahead_is_used_only_by_its_adapter() -> None:
    runner = runner_of("llama")
    prompt = prompt_of("a prompt")
    ahead = greedy(
        "ahead", prompt, max_tokens=0, adapter="sql", read_ahead=ReadAhead(known_tokens=0)
    )
    inbox = worker(runner).serve([[ahead], asked(prompt, "asked")], in_turn=True)
    assert cached(inbox, "asked") == [0, 89, 0]
    reports = [inbox.finished(f"asked{adapter}").cache_report for adapter in NAMES]
    assert [report.read_ahead_tokens for report in reports] == [0, 89, 0]


def test_a_worker_learns_of_another_workers_runs_by_adapter() -> None:
    runner = runner_of("llama")
    prompt = prompt_of("a prompt")
    run = ReadAheadRun(tenant="", adapter="tone", token_ids=TokenIds.of(prompt), start=0)
    script = [asked(prompt, "first"), [run], asked(prompt, "asked")]
    inbox = worker(runner).serve(script, in_turn=True)
    reports = [inbox.finished(f"asked{adapter}").cache_report for adapter in NAMES]
    assert [report.read_ahead_tokens for report in reports] == [0, 0, 89]


def test_an_unknown_adapter_is_rejected_with_the_known_ones() -> None:
    request = greedy("a", prompt_of("a prompt"), adapter="other")
    inbox = worker(runner_of("llama")).serve([[request]])
    (rejected,) = inbox.of("a")
    assert isinstance(rejected, Rejected)
    assert rejected.kind == "invalid"
    assert rejected.message == "the loaded model has no adapter 'other'; available: sql, tone"
