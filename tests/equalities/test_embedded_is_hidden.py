"""Embeddings equal mlx-lm's own hidden states: alone, in a batch, in chunks and from the cache."""

from __future__ import annotations

from concurrent.futures import Future
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from holdfast.store.block import StoredBlock
from holdfast.wire.events import CacheOutcome, FinishReason, WaitReason
from holdfast.wire.requests import Pooling
from holdfast.worker.engine.engine import Engine
from tests.fakes.caching_worker import (
    CachingWorker,
    RunningAhead,
    greedy,
    one_after_the_other,
    random_prompt,
)
from tests.fakes.poison import rewrite, with_value
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.slow import slow
from tests.fakes.tiny_models import kept_tiny

MODELS = [
    *(("llama", Engine), ("lfm2", RunningAhead), ("qwen3_next", Engine), ("gpt_oss", RunningAhead)),
    *slow(("llama", RunningAhead), ("deepseek_v3", Engine), ("gemma2", Engine)),
    *slow(*((name, Engine) for name in ("gpt_oss", "lfm2", "nemotron_h", "minicpm3"))),
]
PROMPTS = {
    "short": random_prompt(5),
    "long": random_prompt(80, "b"),
    "one": (7,),
    "longer": random_prompt(140, "c"),
}
POOLINGS: tuple[Pooling, ...] = ("mean", "last")


@cache
def hidden_states(name: str, prompt: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """The input of the head in mlx-lm's own model, in one pass. [tokens, hidden]"""
    model: Any = kept_tiny(name)
    inner = model.backbone if hasattr(model, "backbone") else model.model
    return np.array(inner(mx.array([prompt]))[0].astype(mx.float32))


def expected(name: str, prompt: tuple[int, ...], pooling: Pooling) -> np.ndarray[Any, Any]:
    states = hidden_states(name, prompt).astype(np.float64)
    pooled = states.mean(axis=0) if pooling == "mean" else states[-1]
    return np.asarray(pooled / np.linalg.norm(pooled))


def assert_embedded(
    inbox: ScriptInbox, request_id: str, name: str, prompt: tuple[int, ...], pooling: Pooling
) -> None:
    finished = inbox.finished(request_id)
    assert finished.reason is FinishReason.LENGTH
    found = np.frombuffer(finished.embedding, np.float32)
    np.testing.assert_allclose(found, expected(name, prompt, pooling), atol=1e-5, rtol=0)


def to_embed(request_id: str, prompt: tuple[int, ...], pooling: Pooling, **more: Any) -> Any:
    return greedy(request_id, prompt, max_tokens=0, pooling=pooling, is_kept=False, **more)


@pytest.mark.parametrize(("name", "engine"), MODELS)
def test_embeddings_equal_mlx_lms_hidden_states_in_any_batch(
    name: str, engine: type[Engine]
) -> None:
    wanted = {
        f"{place}/{pooling}": (prompt, pooling)
        for place, prompt in PROMPTS.items()
        for pooling in POOLINGS
    }
    answers = [greedy(f"answer {n}", random_prompt(20 + n, str(n))) for n in range(2)]
    requests = [to_embed(request_id, *each) for request_id, each in wanted.items()]
    subject = CachingWorker(name, engine=engine, max_running=10)
    crowd = subject.serve([[answers[0], *requests, answers[1]]])
    for request_id, each in wanted.items():
        assert_embedded(crowd, request_id, name, *each)
    alone = CachingWorker(name).serve(one_after_the_other(*answers))
    for answer in answers:
        assert crowd.tokens(answer.request_id) == alone.tokens(answer.request_id)


def test_a_preempted_embedding_restarts_its_sum() -> None:
    subject = CachingWorker(
        budget_tokens=232, expected_output_tokens=4, step_tokens=4, min_chunk_tokens=2
    )
    answer = greedy("answer", random_prompt(60), max_tokens=60)
    inbox = subject.serve([[answer, to_embed("mean", random_prompt(150, "b"), "mean")]])
    assert subject.scheduler.statistics().preemptions
    assert_embedded(inbox, "mean", "llama", random_prompt(150, "b"), "mean")


@pytest.mark.parametrize("pooling", POOLINGS)
def test_embeddings_reuse_cached_tokens_only_for_the_last_token(pooling: Pooling) -> None:
    prompt = random_prompt(150, "b")
    script = one_after_the_other(
        to_embed("first", prompt, pooling),
        greedy("read", prompt),
        to_embed("again", prompt, pooling),
    )
    inbox = CachingWorker().serve(script)
    reused = {each: inbox.finished(each).cached_tokens for each in ("first", "read", "again")}
    assert reused == {"first": 0, "read": 0, "again": 149 if pooling == "last" else 0}
    if pooling == "mean":
        assert inbox.finished("again").cache_report.outcome is CacheOutcome.SCORED
    for each in ("first", "again"):
        assert_embedded(inbox, each, "llama", prompt, pooling)


@pytest.mark.parametrize("engine", [Engine, RunningAhead])
def test_an_embedding_from_poisoned_blocks_is_prefilled_again(
    engine: type[Engine], tmp_path: Path
) -> None:
    prompt = random_prompt(300)
    CachingWorker(folder=tmp_path).serve(one_after_the_other(greedy("read", prompt)))
    assert rewrite(tmp_path, with_value(float("nan"))) > 0
    inbox = CachingWorker(folder=tmp_path, engine=engine).serve(
        one_after_the_other(to_embed("last", prompt, "last"), greedy("next", prompt))
    )
    assert_embedded(inbox, "last", "llama", prompt, "last")
    assert inbox.finished("last").cache_report.outcome is CacheOutcome.FAILED
    assert inbox.finished("next").reason is FinishReason.LENGTH
    assert inbox.finished("next").cache_report.outcome is CacheOutcome.UNREADABLE


@pytest.mark.parametrize("engine", [Engine, RunningAhead])
def test_an_embedding_does_not_start_from_blocks_that_failed_another_request(
    engine: type[Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an embedding waits for the disk, another request finds that the blocks are poisoned."""
    prompt = random_prompt(300)
    CachingWorker(folder=tmp_path).serve(one_after_the_other(greedy("read", prompt)))
    assert rewrite(tmp_path, with_value(float("nan"))) > 0
    subject = CachingWorker(folder=tmp_path, engine=engine)
    assert subject.store is not None
    never: Future[StoredBlock] = Future()
    with monkeypatch.context() as slow_disk:
        slow_disk.setattr(subject.store, "read", lambda key: never)
        subject.send(to_embed("last", prompt, "last"))
        assert subject.scheduler.waiting_for(WaitReason.DISK) == ["last"]
    subject.send(greedy("next", prompt))
    subject.run_to_end()
    subject.end()
    assert_embedded(subject.inbox, "last", "llama", prompt, "last")
    assert subject.inbox.finished("next").cache_report.outcome is CacheOutcome.FAILED
    assert subject.inbox.finished("last").cache_report.outcome is CacheOutcome.UNREADABLE
