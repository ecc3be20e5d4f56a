"""Equalities two and three through the whole worker: the cache changes no answer, and no token is
prefilled twice.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.wire.events import CacheOutcome
from holdfast.worker.kv.layer import SnapshotMismatch
from holdfast.worker.prefix import cache
from tests.fakes.architectures import KEEPABLE, RESUMES_ANYWHERE, each_of
from tests.fakes.caching_worker import CachingWorker, greedy, make_blocks_small, one_after_the_other
from tests.fakes.script_inbox import ScriptInbox, cancel
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE


def worker(name: str, folder: Path | None = None, **more: object) -> CachingWorker:
    return CachingWorker(name, folder, **more)  # type: ignore[arg-type]


def random_prompt(rng: random.Random, tokens: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCAB_SIZE - 8) for _ in range(tokens))


def fresh(name: str, prompt: tuple[int, ...], **more: int) -> list[int]:
    return worker(name).serve([[greedy("fresh", prompt, **more)]]).tokens("fresh")


def cached(inbox: ScriptInbox, *names: str) -> list[int]:
    return [inbox.finished(name).cached_tokens for name in names]


@pytest.mark.parametrize("name", each_of(KEEPABLE))
def test_equal_extended_and_diverging_prompts_are_answered_as_fresh(name: str) -> None:
    rng = random.Random(name)
    first = random_prompt(rng, 60)
    answer = tuple(fresh(name, first))
    turn = first + answer + random_prompt(rng, 12)
    fork = first[:35] + random_prompt(rng, 20)
    prompts = {"first": first, "exact": first, "turn": turn, "fork": fork}
    requests = [greedy(each, prompt) for each, prompt in prompts.items()]
    inbox = worker(name).serve(one_after_the_other(*requests))
    assert inbox.tokens("exact") == inbox.tokens("first") == list(answer)
    assert inbox.tokens("turn") == fresh(name, turn)
    assert inbox.tokens("fork") == fresh(name, fork)
    assert cached(inbox, "first", "exact") == [0, 59]
    # the last token of an answer is never prefilled, because nothing follows it
    assert cached(inbox, "turn")[0] == len(first) + len(answer) - 1
    assert cached(inbox, "fork")[0] in ((35,) if name in RESUMES_ANYWHERE else (0, 35))


@pytest.mark.parametrize(
    "name", ["llama", "gemma3_text", "qwen3_next", *slow("deepseek_v3", "mamba2")]
)
def test_a_restart_loses_nothing(name: str, tmp_path: Path) -> None:
    rng = random.Random(f"{name} restart")
    prompt = random_prompt(rng, 300)
    before = worker(name, tmp_path).serve([[greedy("before", prompt)]])
    turn = prompt + tuple(before.tokens("before")) + random_prompt(rng, 5)
    after = worker(name, tmp_path).serve(
        one_after_the_other(greedy("again", prompt), greedy("turn", turn))
    )
    assert after.tokens("again") == before.tokens("before")
    assert cached(after, "again", "turn") == [299, 305]
    assert after.tokens("turn") == fresh(name, turn)


def test_tokens_prefilled_by_an_aborted_request_are_reused(tmp_path: Path) -> None:
    rng = random.Random("abort")
    prompt = random_prompt(rng, 600)
    script = [[greedy("aborted", prompt)], *[[]] * 5, [cancel("aborted")], *[[]] * 3]
    for folder in (None, tmp_path):
        subject = worker("llama", folder)
        inbox = subject.serve([*script, [greedy("again", prompt)]])
        assert inbox.tokens("again") == fresh("llama", prompt)
        assert cached(inbox, "again")[0] >= 256
    inbox = worker("llama", tmp_path).serve([[greedy("restarted", prompt)]])
    assert cached(inbox, "restarted") == [599]


@pytest.mark.parametrize(
    ("name", "blocks"), [("llama", "whole"), ("llama", "small"), ("qwen3_next", "small")]
)
def test_concurrent_requests_prefill_their_common_prefix_once(
    name: str, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if blocks == "small":
        make_blocks_small(monkeypatch)
    rng = random.Random(f"{name} together")
    # it ends at a boundary, so that both kinds of models can share it completely
    common = random_prompt(rng, cache.BOUNDARY_TOKENS)
    prompts = [common + random_prompt(rng, 10) for _ in range(3)]
    inbox = worker(name).serve(
        [[greedy(str(index), prompt) for index, prompt in enumerate(prompts)]]
    )
    for index, prompt in enumerate(prompts):
        assert inbox.tokens(str(index)) == fresh(name, prompt)
    assert sorted(cached(inbox, *map(str, range(3)))) == [0, len(common), len(common)]


def test_waiters_continue_alone_if_their_reader_is_cancelled() -> None:
    rng = random.Random("cancelled reader")
    common = random_prompt(rng, 600)
    prompts = [common + random_prompt(rng, 10) for _ in range(3)]
    together = [greedy(str(index), prompt) for index, prompt in enumerate(prompts)]
    inbox = worker("llama").serve([together, [], [], [cancel("0")]])
    for index in (1, 2):
        assert inbox.tokens(str(index)) == fresh("llama", prompts[index])


def test_tenants_and_models_share_nothing(tmp_path: Path) -> None:
    rng = random.Random("tenants")
    prompt = random_prompt(rng, 100)
    tenants = {"a": "a", "b": "b", "a again": "a"}
    requests = [greedy(name, prompt, tenant=tenant) for name, tenant in tenants.items()]
    inbox = worker("llama", tmp_path).serve(one_after_the_other(*requests))
    assert cached(inbox, "a", "b", "a again") == [0, 0, 99]
    of_same_geometry = worker("llama", tmp_path, fingerprint="other weights")
    other = of_same_geometry.serve([[greedy("c", prompt, tenant="a")]])
    assert cached(other, "c") == [0]


@pytest.mark.parametrize("name", ["llama", "qwen3_next"])
def test_preemption_keeps_prefilled_tokens(name: str) -> None:
    rng = random.Random(f"{name} preempted")
    prompts = [random_prompt(rng, 40) for _ in range(3)]
    subject = worker(name, budget_tokens=130)
    inbox = subject.serve(
        [[greedy(str(index), prompt, max_tokens=30) for index, prompt in enumerate(prompts)]]
    )
    assert subject.scheduler.statistics().preemptions > 0
    for index, prompt in enumerate(prompts):
        assert inbox.tokens(str(index)) == fresh(name, prompt, max_tokens=30)


def test_without_a_ram_budget_answers_and_the_disk_still_work(tmp_path: Path) -> None:
    rng = random.Random("small")
    prompt = random_prompt(rng, 300)
    inbox = worker("llama", tmp_path, ram_bytes=1).serve(
        one_after_the_other(greedy("a", prompt), greedy("b", prompt))
    )
    assert inbox.tokens("a") == inbox.tokens("b") == fresh("llama", prompt)


@pytest.mark.parametrize(
    ("name", "where"), [("llama", "engine"), ("llama", "memory"), ("qwen3_next", "engine")]
)
def test_blocks_that_cannot_be_restored_are_prefilled_again(
    name: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(f"{name} unfit")
    prompt = random_prompt(rng, 100)
    subject = worker(name)
    whole_open = subject.engine.open

    def unfit(*_: object, base: object, snapshots: list[object], **more: Any) -> int:
        if base is not None or snapshots:
            raise SnapshotMismatch("it does not fit")
        return whole_open(*_, **more)

    def broken(_: object) -> list[object]:
        raise SnapshotMismatch("it is not there")

    if where == "engine":
        monkeypatch.setattr(subject.engine, "open", unfit)
    first, second = greedy("first", prompt), greedy("second", prompt)
    busy = greedy("busy", random_prompt(rng, 50), max_tokens=30)
    script = [[first], *[[]] * 12, [busy], [], [], [second], [], [greedy("third", prompt)]]
    if where == "memory":
        real = subject.cache.snapshots
        monkeypatch.setattr(
            subject.cache,
            "snapshots",
            lambda lookup: broken(lookup) if lookup.cached_tokens else real(lookup),
        )
    inbox = subject.serve(script)
    for each in ("first", "second", "third"):
        assert inbox.tokens(each) == fresh(name, prompt)
    assert inbox.tokens("busy") == fresh(name, busy.prompt_token_ids, max_tokens=30)
    assert cached(inbox, "second", "third") == [0, 0]
    assert inbox.finished("second").cache_report.outcome is CacheOutcome.FAILED
