"""State machine of conversions: native, 8-bit and automatic requests on one worker under changing
memory pressure, with failing conversions and steps. Every request is answered completely, with the
same tokens as alone when quantized at the same position.
"""

from __future__ import annotations

import logging
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from holdfast.machine.device_memory import Pressure
from holdfast.wire.commands import MemoryPressure, SequenceControl
from holdfast.wire.events import FinishReason
from holdfast.worker.engine.engine import Engine
from holdfast.worker.engine.plan import SpanResult
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.live import LiveState, StateBytes
from tests.fakes.caching_worker import CachingWorker, greedy, make_blocks_small, open_sequences
from tests.fakes.pressed_worker import answer_of, prompt_of, wide_in_small_blocks

picks = st.integers(0, 10**6)
failures = st.sampled_from([None, None, None, 0, 1])
# logged because of injected failures; all other warnings are faults
EXPECTED = (
    "could not be quantized",
    "restarts: a part of its KV is lost",
    "each span is tried alone",
    "prompts are now prefilled in chunks of at most",
)


class FaultyEngine(Engine):
    """Records when each sequence was opened and quantized, and fails when told to."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.quantized_at: dict[str, list[int]] = defaultdict(list)
        self.converted_when_opened: set[str] = set()  # opened again after a conversion
        self.opened_with: dict[str, set[KVBits]] = defaultdict(set)
        self.layers_before_failure: int | None = None
        self.fails_next = False

    def open(self, request: Any, **more: Any) -> LiveState:
        state = super().open(request, **more)
        self.opened_with[request.request_id].add(more["form"])
        if self.quantized_at[request.request_id]:
            self.converted_when_opened.add(request.request_id)
        return state

    def quantize(self, request_id: str) -> StateBytes:
        at = self._sequences[request_id].live.tokens
        left = self.layers_before_failure
        self.layers_before_failure = None
        release = FullKV.release

        def fail(layer: FullKV) -> None:
            nonlocal left
            if left == 0:
                raise RuntimeError("[malloc] Unable to allocate")
            left = None if left is None else left - 1
            release(layer)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FullKV, "release", fail)
            sizes = super().quantize(request_id)
        self.quantized_at[request_id].append(at)
        return sizes

    def collect(self, pending: Any) -> tuple[SpanResult, ...]:
        results = super().collect(pending)
        if self.fails_next:
            self.fails_next = False
            raise RuntimeError("the device failed in this step")
        return results


@cache
def lone_engine() -> Engine:
    return CachingWorker(wide_in_small_blocks("llama"), kv_bits="auto").engine


@cache
def answer_alone(
    prompt: tuple[int, ...], max_tokens: int, kv_bits: KVBits, quantized_at: int | None
) -> tuple[int, ...]:
    return tuple(
        answer_of(
            lone_engine(),
            prompt,
            max_tokens=max_tokens,
            kv_bits=kv_bits,
            quantized_at=quantized_at,
        )
    )


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        make_blocks_small(patch)
        yield


class Conversions(RuleBasedStateMachine):
    conversions = 0
    exact_answers = 0

    @initialize(budget_tokens=st.sampled_from([400, 100_000]), has_disk=st.booleans())
    def start(self, budget_tokens: int, has_disk: bool) -> None:
        self.folder = tempfile.TemporaryDirectory() if has_disk else None
        self.subject = CachingWorker(
            wide_in_small_blocks("llama"),
            None if self.folder is None else Path(self.folder.name),
            has_measured_costs=True,
            kv_bits="auto",
            engine=FaultyEngine,
            budget_tokens=budget_tokens,
            step_tokens=256,
        )
        assert isinstance(self.subject.engine, FaultyEngine)
        self.engine = self.subject.engine
        self.names: list[str] = []
        self.paused: set[str] = set()
        self.cancelled: set[str] = set()
        self.records: list[logging.LogRecord] = []
        self.handler = logging.Handler(logging.WARNING)
        self.handler.emit = self.records.append  # type: ignore[method-assign]
        logging.getLogger("holdfast").addHandler(self.handler)

    @rule(
        seed=st.sampled_from("aab"),
        common=st.sampled_from([0, 30, 100, 150, 150]),
        own=st.sampled_from([1, 3, 20, 90]),
        max_tokens=st.sampled_from([1, 6, 14]),
        kv_bits=st.sampled_from(["", "", "auto", "native", "8"]),
    )
    def ask(self, seed: str, common: int, own: int, max_tokens: int, kv_bits: Any) -> None:
        name = f"r{len(self.names)}"
        prompt = (*prompt_of(seed, 150)[:common], *prompt_of(str(len(self.names) % 4), own))
        self.subject.send(greedy(name, prompt, max_tokens=max_tokens, kv_bits=kv_bits))
        self.names.append(name)

    @rule(
        common=st.sampled_from([100, 150]),
        own=st.sampled_from([[3], [90], [5, 9]]),
        steps=st.integers(1, 6),
        layers=failures,
    )
    def ask_before_pressure(
        self, common: int, own: list[int], steps: int, layers: int | None
    ) -> None:
        """One or two automatic requests, which are native until memory is critically short."""
        self.press(Pressure.NORMAL, None)
        for each in own:
            self.ask("a", common, each, 14, "")
        self.run_steps(steps, fails=False)
        self.press(Pressure.CRITICAL, layers)
        self.run_steps(2, fails=False)

    @rule(
        pressure=st.sampled_from([Pressure.NORMAL, Pressure.CRITICAL, Pressure.CRITICAL]),
        layers=failures,
    )
    def press(self, pressure: Pressure, layers: int | None) -> None:
        """layers: how many layers the next conversion converts before it fails; None: it does not
        fail.
        """
        self.engine.layers_before_failure = layers
        self.subject.send(MemoryPressure(pressure=pressure))

    @precondition(lambda self: self.names)
    @rule(pick=picks, action=st.sampled_from(["cancel", "pause", "resume", "resume"]))
    def control(self, pick: int, action: Any) -> None:
        names = self.names[-4:]
        name = names[pick % len(names)]
        if action == "pause":
            self.paused.add(name)
        elif action == "resume":
            self.paused.discard(name)
        else:
            self.cancelled.add(name)
        self.subject.send(SequenceControl(action=action, request_id=name))

    @rule(steps=st.sampled_from([1, 2, 5, 12]), fails=st.sampled_from([False, False, True]))
    def run_steps(self, steps: int, fails: bool) -> None:
        self.engine.fails_next = fails
        for _ in range(steps):
            self.subject.step()

    def teardown(self) -> None:
        if not hasattr(self, "subject"):
            return
        subject = self.subject
        for name in self.paused:
            subject.send(SequenceControl(action="resume", request_id=name))
        subject.run_to_end()
        while subject.step():
            pass
        for name in self.names:
            self.check(name)
        assert open_sequences(subject.engine) == 0
        assert subject.scheduler.statistics().reserved_bytes == 0
        subject.end()
        subject.inbox.check_protocol()
        logging.getLogger("holdfast").removeHandler(self.handler)
        faults = [
            record.getMessage()
            for record in self.records
            if not any(each in record.getMessage() for each in EXPECTED)
        ]
        assert not faults
        if self.folder is not None:
            self.folder.cleanup()

    def check(self, name: str) -> None:
        """A request's tokens equal those alone. If it was computed again after its quantization,
        this holds only for the tokens before.
        """
        engine = self.engine
        request = self.subject.sent[name]
        prompt = tuple(request.prompt_token_ids)
        tokens = tuple(self.subject.inbox.tokens(name))
        reason = self.subject.inbox.finished(name).reason
        assert reason is FinishReason.LENGTH or (
            reason is FinishReason.CANCELLED and name in self.cancelled
        )
        if reason is FinishReason.LENGTH:
            assert len(tokens) == request.max_tokens
        if name not in engine.opened_with:  # cancelled before it started
            assert not tokens
            return
        (kv_bits,) = engine.opened_with[name]
        known = len(tokens)
        quantized_at = next(iter(engine.quantized_at[name]), None)
        if name in engine.converted_when_opened:
            assert quantized_at is not None
            known = min(known, max(0, quantized_at - len(prompt) + 1))
            quantized_at = None
        alone = answer_alone(prompt, request.max_tokens, kv_bits, quantized_at)
        assert tokens[:known] == alone[:known], (name, engine.quantized_at[name])
        type(self).conversions += bool(engine.quantized_at[name])
        type(self).exact_answers += known == len(tokens)


@pytest.mark.parametrize(
    ("examples", "steps"), [(4, 8), pytest.param(60, 30, marks=pytest.mark.slow)]
)
def test_conversions_and_failures_never_change_an_answer(examples: int, steps: int) -> None:
    Conversions.conversions = Conversions.exact_answers = 0
    run_state_machine_as_test(
        Conversions,
        settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None),
    )
    assert Conversions.exact_answers
    assert Conversions.conversions or examples < 60
