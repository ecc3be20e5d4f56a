"""Running sequences are quantized together or not, and conversions fail: no token is lost or sent
twice.
"""

from __future__ import annotations

import pytest

from holdfast.machine.device_memory import Pressure
from holdfast.wire.events import FinishReason
from holdfast.worker.kv.full import FullKV
from holdfast.worker.kv.quantized import QuantizedKV
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.pressed_worker import alone, lengths, prompt_of, quantized_in, worker


def press_from(made: CachingWorker, name: str, tokens: int) -> None:
    """Memory is critically short as soon as a sequence has this many tokens."""
    is_late = lengths(made).get(name, 0) >= tokens
    made.memory.set_worker_pressure(Pressure.CRITICAL if is_late else Pressure.NORMAL)


@pytest.mark.parametrize("done", [0, 1])
def test_after_a_failed_conversion_the_answer_continues(
    done: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    take_over = QuantizedKV.take_over
    tries: list[int] = []

    def fail(layer: QuantizedKV, native: FullKV) -> None:
        tries.append(native.tokens)
        if len(tries) > done:
            raise RuntimeError("[malloc] Unable to allocate")
        take_over(layer, native)

    monkeypatch.setattr(QuantizedKV, "take_over", fail)
    made = worker("llama", step_tokens=512)
    prompt = prompt_of("a", 1100)
    inbox = made.serve(
        [[greedy("a", prompt, max_tokens=12)]], on_receive=lambda: press_from(made, "a", 1105)
    )
    assert inbox.finished("a").reason is FinishReason.LENGTH
    assert inbox.tokens("a") == alone("llama", prompt, max_tokens=12)
    assert len(tries) == done + 1, "the sequence stays native"
    assert ("restarts" in caplog.text) is bool(done)
    assert made.scheduler.statistics().reserved_bytes == 0


def test_sequences_that_share_most_tokens_are_quantized_together() -> None:
    made = worker("llama", step_tokens=512)
    common = prompt_of("common", 2200)
    seen: set[frozenset[str]] = set()

    def press() -> None:
        press_from(made, "b", 2205)
        seen.add(frozenset(quantized_in(made)))

    requests = [greedy(each, (*common, *prompt_of(each, 4)), max_tokens=12) for each in "ab"]
    made.serve([requests], on_receive=press)
    assert seen == {frozenset(), frozenset("ab")}


def test_a_prefix_kept_by_a_native_sequence_is_not_quantized() -> None:
    made = worker("llama", step_tokens=512)
    common = prompt_of("common", 1500)
    made.serve(
        [
            [
                greedy("native", (*common, 1), max_tokens=20, kv_bits="native"),
                greedy("auto", (*common, 2), max_tokens=12),
            ]
        ],
        on_receive=lambda: press_from(made, "auto", 1503),
    )
    assert not quantized_in(made)
