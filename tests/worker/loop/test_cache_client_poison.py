"""Non-finite state fails an answer at most once.

Through a whole worker with a tiny model and a real store.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from msgspec.structs import replace

from holdfast.wire.commands import SHUT_DOWN, Command, SequenceRequest
from holdfast.wire.events import CacheOutcome, FinishReason, WaitReason
from holdfast.wire.requests import SamplingParams, TokenIds
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.layouts import Runner
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.live import Snapshot
from holdfast.worker.prefix.lookup import LiveChain
from tests.fakes.caching_worker import (
    CachingWorker,
    RunningAhead,
    answer_alone,
    greedy,
    open_sequences,
    random_prompt,
)
from tests.fakes.poison import rewrite, with_value, with_values
from tests.fakes.script_inbox import ScriptInbox, cancel, pause, resume
from tests.fakes.slow import slow
from tests.fakes.tiny_models import VOCAB_SIZE, make_tiny

NAN, INFINITY = math.nan, math.inf
ENGINES = [RunningAhead, *slow(Engine)]
EMBEDDED: dict[str, Any] = {"pooling": "last"}
SCORED: dict[str, Any] = {"want_prompt_logprobs": True, "scored_from": 299}


@pytest.fixture(autouse=True)
def no_errors(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.INFO, "holdfast"):
        yield
    # not `records`, which belong to the end of the fixture here
    records = caplog.get_records("call")
    assert [
        record.getMessage()
        for record in records
        if record.levelno > logging.WARNING or record.exc_info
    ] == []


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def in_turn(subject: CachingWorker, *requests: SequenceRequest) -> ScriptInbox:
    return subject.serve([[request] for request in requests], in_turn=True)


def fresh_answer(request: SequenceRequest, name: str = "llama") -> list[int]:
    return CachingWorker(name).serve([[request]]).tokens(request.request_id)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "kv"),
        ("gemma3_text", "state"),
        ("qwen3_next", "state"),
        *slow(
            ("deepseek_v3", "kv"),
            ("falcon_h1", "kv"),
            ("gemma3_text", "kv"),
            ("gpt_oss", "state"),
            ("qwen3_next", "kv"),
            ("rwkv7", "state"),
            ("falcon_h1", "state"),
        ),
    ],
)
def test_poisoned_blocks_are_detected_once_and_forgotten(
    name: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    asked = greedy("a", random_prompt(300))
    right = in_turn(CachingWorker(name, tmp_path), asked).tokens("a")
    assert rewrite(tmp_path, with_value(NAN), kind=kind) > 0
    inbox = in_turn(
        CachingWorker(name, tmp_path),
        asked,
        greedy("b", random_prompt(300)),
        greedy("turn", random_prompt(320)[:310]),
    )
    assert inbox.tokens("a") == inbox.tokens("b") == right
    assert len(warnings(caplog)) == 1
    assert "a restarts from nothing" in warnings(caplog)[0]
    assert (inbox.finished("a").cached_tokens, inbox.finished("a").cache_report.outcome) == (
        0,
        CacheOutcome.FAILED,
    )
    assert inbox.finished("b").cached_tokens == 299
    after = in_turn(CachingWorker(name, tmp_path), asked)
    assert (after.tokens("a"), after.finished("a").cached_tokens) == (right, 299)
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("value", [INFINITY, 3e38])
def test_blocks_that_lead_to_nan_are_forgotten(
    value: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Finite values can lead to NaN too: a fresh prefill then shows that the blocks were at fault."""
    asked = greedy("a", random_prompt(300))
    right = in_turn(CachingWorker(folder=tmp_path), asked).tokens("a")
    rewrite(tmp_path, with_values(value))
    inbox = in_turn(
        CachingWorker(folder=tmp_path),
        asked,
        greedy("b", random_prompt(300)),
        greedy("c", random_prompt(300)),
    )
    assert [inbox.tokens(each) for each in "abc"] == [right] * 3
    assert inbox.finished("c").cached_tokens == 299
    assert len(warnings(caplog)) == 1


def test_only_descendants_of_poisoned_blocks_are_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = random_prompt(700)
    in_turn(
        CachingWorker(folder=tmp_path),
        greedy("a", long),
        greedy("fork", long[:256] + random_prompt(200, "fork")),
    )
    hit: list[int] = []

    def second_block(parts: Sequence[bytes]) -> tuple[bytes, ...]:
        hit.append(1)
        return with_value(NAN)(parts) if len(hit) == 2 else tuple(parts)

    rewrite(tmp_path, second_block)
    inbox = in_turn(CachingWorker(folder=tmp_path), greedy("a", long), greedy("again", long))
    assert inbox.tokens("a") == inbox.tokens("again") == fresh_answer(greedy("a", long))
    assert inbox.finished("again").cached_tokens == 699
    fork = in_turn(
        CachingWorker(folder=tmp_path), greedy("fork", long[:256] + random_prompt(200, "fork"))
    )
    assert fork.finished("fork").cached_tokens >= 256
    assert len(warnings(caplog)) == 1


@pytest.mark.parametrize("engine", ENGINES)
def test_concurrent_requests_over_poisoned_blocks_are_answered_right(
    engine: type[Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = random_prompt(400)
    in_turn(CachingWorker(folder=tmp_path), greedy("first", shared))
    rewrite(tmp_path, with_value(NAN))
    asked = [
        greedy(f"r{number}", shared + random_prompt(20, str(number)), max_tokens=12)
        for number in range(6)
    ]
    inbox = CachingWorker(folder=tmp_path, engine=engine).serve([asked])
    for each in asked:
        alone = answer_alone("llama", tuple(each.prompt_token_ids), each.max_tokens)
        assert tuple(inbox.tokens(each.request_id)) == alone
    # the maximum of running ones; waiting ones have been looked up again
    assert 1 <= len(warnings(caplog)) <= 4


@pytest.mark.parametrize(
    ("what", "engine"),
    [(EMBEDDED, RunningAhead), (SCORED, Engine), *slow((EMBEDDED, Engine), (SCORED, RunningAhead))],
)
def test_a_prefill_only_prompt_is_right_after_poison(
    what: dict[str, Any], engine: type[Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It samples nothing, so the failing step is the last one planned for it."""
    asked = replace(greedy("a", random_prompt(300), max_tokens=0), is_kept=False, **what)
    right = in_turn(CachingWorker(folder=tmp_path), greedy("first", random_prompt(300)), asked)
    assert right.finished("a").cached_tokens >= 256
    rewrite(tmp_path, with_value(NAN))
    found = in_turn(CachingWorker(folder=tmp_path, engine=engine), asked)
    found.check_protocol()
    assert (found.finished("a").reason, found.finished("a").cached_tokens) == (
        FinishReason.LENGTH,
        0,
    )
    one, other = (
        np.frombuffer(inbox.finished("a").embedding, np.float32) for inbox in (found, right)
    )
    assert np.allclose(one, other, atol=1e-5)
    assert len(warnings(caplog)) == 1


def spoil(subject: CachingWorker, request_id: str) -> None:
    """The effect of damaged memory on a running sequence."""
    layers: Any = subject.engine._sequences[request_id].live.layers
    for leaf in layers:
        for array in leaf.arrays():
            array[...] = NAN


def fed(subject: CachingWorker, request_id: str) -> int:
    sequence = subject.engine._sequences.get(request_id)
    return 0 if sequence is None else sequence.live.tokens


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        ("llama", RunningAhead),
        ("qwen3_next", Engine),
        *slow(("llama", Engine), ("qwen3_next", RunningAhead)),
    ],
)
def test_sent_tokens_stay_and_the_answer_continues_from_them(
    name: str, engine: type[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    sampling = SamplingParams(temperature=0.8, seed=5, presence_penalty=0.5)
    asked = SequenceRequest(
        request_id="a",
        prompt_token_ids=TokenIds.of(random_prompt(90)),
        max_tokens=20,
        sampling=sampling,
    )
    right = fresh_answer(asked, name)
    subject = CachingWorker(name, engine=engine)
    spoiled: list[int] = []

    def spoil_once() -> None:
        if fed(subject, "a") >= 97 and not spoiled:
            spoiled.append(1)
            spoil(subject, "a")

    inbox = subject.serve(
        [[greedy("before", random_prompt(90))], [asked]], in_turn=True, on_receive=spoil_once
    )
    assert inbox.tokens("a") == right
    assert inbox.finished("a").reason is FinishReason.LENGTH
    assert len(warnings(caplog)) == 1


def test_a_paused_sequence_that_fails_after_a_live_state_stays_paused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject = CachingWorker(engine=RunningAhead)
    subject.send(greedy("before", random_prompt(90)))
    subject.run_to_end()
    subject.send(greedy("a", random_prompt(90) + random_prompt(5, "a"), max_tokens=20))
    while fed(subject, "a") < 97:
        subject.step()
    (sequence,) = subject.loop._ledger.live()
    assert sequence.start.may_blame_live
    spoil(subject, "a")
    subject.step()  # dispatches a step that will fail
    subject.send(pause("a"))
    while subject.step():
        pass
    assert len(warnings(caplog)) == 1
    assert sequence.attempts == 1
    assert sequence.scheduled.waits_for is WaitReason.READER
    assert not sequence.is_open
    subject.send(resume("a"))
    subject.run_to_end()
    subject.check_answer("a")
    subject.end()


BAD = VOCAB_SIZE - 2


@cache
def untied(name: str) -> tuple[Any, Runner]:
    """A model whose output weights are separate from its input, so that one token can be corrupted;
    with its layout.
    """
    model = make_tiny(name, tie_word_embeddings=False)
    return model, choose_layout(model, vocab_size=VOCAB_SIZE)


@contextmanager
def nan_in(part: Any, row: int) -> Iterator[None]:
    sound = part.weight
    bad = mx.array(sound)
    bad[row] = NAN
    part.weight = bad  # another array, because a view of the transposed weight may be kept
    yield
    part.weight = sound


@pytest.mark.parametrize("name", ["llama", "qwen3_next", *slow("gpt_oss")])
def test_a_prompt_with_nan_logits_fails_and_caches_nothing(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, runner = untied(name)
    subject = CachingWorker(runner)
    good = random_prompt(300)
    with nan_in(model.model.embed_tokens, BAD):
        inbox = in_turn(
            subject,
            greedy("good", good),
            greedy("bad", (*good, BAD)),
            greedy("again", good),
            greedy("alone", (BAD, 1, 2)),
        )
    assert [inbox.finished(each).reason for each in ("good", "bad", "again", "alone")] == [
        FinishReason.LENGTH, FinishReason.FAILED, FinishReason.LENGTH, FinishReason.FAILED,
    ]  # fmt: skip
    assert inbox.tokens("again") == inbox.tokens("good")
    # blocks that others depend on stay: they were not at fault
    assert inbox.finished("again").cached_tokens == 299
    assert [sum(name in text for text in warnings(caplog)) for name in ("bad", "alone")] == [
        3,
        1,
    ]  # live, restored, afresh; afresh
    assert BAD not in tokens_kept(subject)


def tokens_kept(subject: CachingWorker) -> set[int]:
    found: set[int] = set()
    for key in subject.index.tree:
        if subject.index.tree.has_node(key):
            packed = subject.index.tree.node(key).packed
            found.update(
                int.from_bytes(packed[at : at + 4], "little") for at in range(0, len(packed), 4)
            )
    return found


@pytest.mark.parametrize(
    ("engine", "steps"),
    [
        (Engine, 7),
        (RunningAhead, 6),
        *slow(*((Engine, steps) for steps in (5, 6, 8))),
        *slow(*((RunningAhead, steps) for steps in (5, 7, 8))),
    ],
)
def test_a_failed_row_cancelled_in_its_step_is_not_cached(engine: type[Engine], steps: int) -> None:
    model, runner = untied("llama")
    subject = CachingWorker(runner, engine=engine)
    script = [[greedy("a", (*random_prompt(300), BAD))], *[[]] * steps, [cancel("a")]]
    with nan_in(model.lm_head, 0):  # the state is sound, but the row fails
        inbox = subject.serve(script)
    if inbox.finished("a").reason is FinishReason.FAILED:
        assert tokens_kept(subject) == set()
    else:
        assert BAD not in tokens_kept(subject)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("llama", SHUT_DOWN),
        ("qwen3_next", cancel("a")),
        *slow(("llama", cancel("a")), ("qwen3_next", SHUT_DOWN)),
    ],
)
def test_non_finite_state_is_not_cached_after_finite_output(
    name: str, end: Command, tmp_path: Path
) -> None:
    subject, steps = CachingWorker(name, tmp_path), [0]

    def spoil_at_the_end() -> None:
        steps[0] += 1
        if steps[0] == 9:
            assert fed(subject, "a") > 90
            spoil(subject, "a")

    subject.serve(
        [[greedy("a", random_prompt(90), max_tokens=50)], *[[]] * 7, [end]],
        on_receive=spoil_at_the_end,
    )
    kept = subject.index.figures().kept_tokens
    inbox = in_turn(CachingWorker(name, tmp_path), greedy("a", random_prompt(90)))
    assert (kept, inbox.finished("a").cached_tokens) == (
        90 if name == "llama" else 89,
        89,
    )  # only tokens of the prompt


@pytest.mark.parametrize("engine", ENGINES)
def test_a_twin_of_a_failed_prefill_prefills_itself(
    engine: type[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    shared = random_prompt(600)
    subject, spoiled = CachingWorker(engine=engine), [0]

    def spoil_the_reader() -> None:
        if fed(subject, "reader") >= 300 and not spoiled[0]:
            spoiled[0] = 1
            spoil(subject, "reader")

    behind = greedy("behind", shared + random_prompt(9, "b"))
    inbox = subject.serve([[greedy("reader", shared), behind]], on_receive=spoil_the_reader)
    assert inbox.finished("reader").reason is FinishReason.FAILED
    assert inbox.tokens("behind") == fresh_answer(behind)
    assert len(warnings(caplog)) == 1


def of_another_form(subject: CachingWorker) -> None:
    """Replace kept blocks in RAM by blocks of equal size with one array fewer, like those of
    another model.
    """
    payloads = subject.index.ram._payloads
    whole = max(
        (len(payload.arrays) for payload in payloads.values() if isinstance(payload, Snapshot)),
        default=0,
    )
    for key, payload in payloads.items():
        assert isinstance(payload, Snapshot)
        if len(payload.arrays) == whole and whole % 2 == 0:
            arrays = (*payload.arrays[:-2], mx.concatenate(payload.arrays[-2:], axis=2))
            mx.eval(arrays)
            payloads[key] = Snapshot(
                start=payload.start,
                tokens=payload.tokens,
                arrays=arrays,
            )


def test_a_failed_restore_at_admission_is_prefilled_and_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    subject, spoiled = CachingWorker(max_queued=1, max_running=1, most_parked_bytes=0), [0]

    def spoil_what_is_kept() -> None:
        if len(subject.index.ram) and not spoiled[0] and not open_sequences(subject.engine):
            spoiled[0] = 1
            of_another_form(subject)

    # b fills the queue
    asked = [greedy("a", random_prompt(300)), greedy("b", random_prompt(300, "b"))]
    inbox = subject.serve(
        [[greedy("first", random_prompt(300))], [], asked, [greedy("c", random_prompt(300))]],
        in_turn=True,
        on_receive=spoil_what_is_kept,
    )
    assert spoiled == [1]
    assert inbox.tokens("a") == inbox.tokens("c") == inbox.tokens("first")
    assert inbox.tokens("b") == fresh_answer(greedy("b", random_prompt(300, "b")))
    assert (inbox.finished("a").cached_tokens, inbox.finished("c").cached_tokens) == (0, 299)
    assert len(warnings(caplog)) == 1


def test_a_request_admitted_while_its_blocks_fail_restarts_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A pause makes its place, and the step that detects it is collected between its admission and
    its start.
    """
    shared, spoiled = random_prompt(400), [0]
    paused = greedy("paused", random_prompt(60, "paused"), max_tokens=100)
    asked = [
        greedy(name, shared + random_prompt(20, name), max_tokens=12)
        for name in ("finds out", "let in")
    ]
    right = {each.request_id: fresh_answer(each) for each in (paused, *asked)}
    subject = CachingWorker(engine=RunningAhead, max_running=2, most_parked_bytes=0)

    def spoil_what_is_kept() -> None:
        if len(subject.index.ram) and not spoiled[0] and not open_sequences(subject.engine):
            spoiled[0] = 1
            payloads: Any = subject.index.ram._payloads.values()
            for payload in payloads:
                for array in payload.arrays:
                    array[...] = NAN
                    mx.eval(array)

    script: list[list[Command]] = [[greedy("first", shared)], *[[]] * 20, [paused], [], [*asked]]
    script += [[pause("paused")], *[[]] * 40, [resume("paused")]]
    inbox = subject.serve(script, on_receive=spoil_what_is_kept)
    assert spoiled == [1]
    assert {request_id: inbox.tokens(request_id) for request_id in right} == right
    assert subject.scheduler.statistics().preemptions == 1
    assert len(warnings(caplog)) == 2


def test_a_failed_restore_after_a_preemption_continues_the_answer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        greedy("a", random_prompt(100), max_tokens=60),
        greedy("b", random_prompt(100, "b"), max_tokens=60),
    ]
    right = {each.request_id: fresh_answer(each) for each in asked}
    subject, spoiled = (
        CachingWorker(budget_tokens=232, expected_output_tokens=4, most_parked_bytes=0),
        [0],
    )
    leave = subject.cache.live.end_chain

    def end_and_spoil(live: LiveChain) -> None:
        leave(live)
        if len(subject.index.ram) and not spoiled[0]:
            spoiled[0] = 1
            of_another_form(subject)

    monkeypatch.setattr(subject.cache.live, "end_chain", end_and_spoil)
    inbox = subject.serve([asked])
    assert subject.scheduler.statistics().preemptions
    assert {each.request_id: inbox.tokens(each.request_id) for each in asked} == right
    assert 1 <= len(warnings(caplog)) <= 2
