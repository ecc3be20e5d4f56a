"""Steps of a real engine on a tiny model: right tokens, and a deliberate slow-down that the
comparison finds.
"""

from __future__ import annotations

import pytest

from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.engine.probe import choose_layout
from holdfast.worker.kv.bits import KVBits
from holdfast.worker.kv.live import LiveBase
from holdfast_bench import engine_steps
from holdfast_bench.compare import changes_between
from holdfast_bench.engine_steps import (
    CHUNK_TOKENS,
    BareForward,
    EngineSteps,
    ReadingSteps,
    Stepper,
    WithoutKernel,
    alternate,
    parked,
    requests_of,
)
from holdfast_bench.results import Results
from tests.fakes.tiny_grammars import END, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny, make_tiny

PROMPTS = [[5, 17, 3, 99, 42, 7], [11, 12, 13, 14, 15, 16]]


class TimedEngine(Engine):
    """An engine whose steps take 1 ms of a clock that only it moves."""

    step_seconds = 0.001
    clock_seconds = 0.0

    def dispatch(self, plan: StepPlan) -> PendingStep:
        TimedEngine.clock_seconds += self.step_seconds
        return super().dispatch(plan)

    @classmethod
    def perf_counter(cls) -> float:
        return TimedEngine.clock_seconds

    @classmethod
    def process_time(cls) -> float:
        return TimedEngine.clock_seconds


class SlowerEngine(TimedEngine):
    step_seconds = 0.0011


def measured(engine_class: type[Engine]) -> tuple[Results, dict[str, list[list[int]]]]:
    model = kept_tiny("qwen3")
    engine = engine_class(choose_layout(model, vocab_size=VOCAB_SIZE), vocab_size=VOCAB_SIZE)
    steppers = {
        "engine": EngineSteps(engine, requests_of(PROMPTS, max_tokens=58)),
        "bare": BareForward(model, PROMPTS, pipelined=False),
        "bare, pipelined": BareForward(model, PROMPTS, pipelined=True),
    }
    case, tokens = alternate("2 streams", steppers, rounds=5, steps=1, noise_rounds=1)
    return Results(kind="engine", cases=[case]), tokens


def test_the_engine_draws_what_the_bare_forward_draws() -> None:
    results, tokens = measured(Engine)
    assert tokens["engine"] == tokens["bare"] == tokens["bare, pipelined"]
    assert [len(row) for row in tokens["engine"]] == [5, 5]
    assert all(len(each.pooled("step_seconds")) == 5 for each in results.cases[0].contenders)


def test_a_slower_step_is_caught_by_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "time", TimedEngine)
    before, after = measured(TimedEngine)[0], measured(SlowerEngine)[0]
    (change,) = [
        change for change in changes_between(before, after) if change.metric == "step_seconds"
    ]
    assert (change.before, change.after) == pytest.approx((0.001, 0.0011))
    assert change.verdict == "worse"


@pytest.mark.parametrize("pipelined", [False, True])
def test_constrained_streams_run_beside_plain_ones_and_obey_their_grammar(pipelined: bool) -> None:
    runner = choose_layout(kept_tiny("qwen3"), vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE, constraints=tiny_constraints())
    grammars = {"plain": "", "constrained": "start: /[ab]+/\n"}
    steppers: dict[str, Stepper] = {
        name: EngineSteps(
            engine,
            requests_of(PROMPTS, max_tokens=40, name=name, temperature=1.0, grammar=grammar),
            pipelined=pipelined,
        )
        for name, grammar in grammars.items()
    }
    _, tokens = alternate("2 streams", steppers, rounds=3, steps=2, noise_rounds=1)
    assert {token for row in tokens["constrained"] for token in row} <= {ord("a"), ord("b"), END}
    assert not {token for row in tokens["plain"] for token in row} <= {ord("a"), ord("b"), END}


@pytest.mark.parametrize("kv_bits", ["native", "8"])
def test_a_parked_prefix_is_decoded_behind_and_read_on(kv_bits: KVBits) -> None:
    runner = choose_layout(make_tiny("qwen3", head_dim=64), vocab_size=VOCAB_SIZE)
    engine = Engine(runner, vocab_size=VOCAB_SIZE)
    form = engine.measure_costs().form
    assert form is not None
    runner.learn_form(form)
    prompt = [token % 90 for token in range(3 * CHUNK_TOKENS)]
    begun = CHUNK_TOKENS + 44
    state = parked(engine, prompt[:CHUNK_TOKENS], kv_bits=kv_bits)
    tokens = {}
    for use in ("shared", "copied"):
        base = LiveBase(state=state, tokens=CHUNK_TOKENS, use=use)
        requests = requests_of([prompt[:begun]] * 2, max_tokens=20, name=use)
        steps = EngineSteps(engine, requests, kv_bits=kv_bits, base=base)
        tokens[use] = steps.advance(3) + WithoutKernel(steps).advance(3)
    fresh = EngineSteps(
        engine, requests_of([prompt[:begun]] * 2, max_tokens=20, name="fresh"), kv_bits=kv_bits
    )
    assert tokens["shared"] == tokens["copied"] == fresh.advance(3) + fresh.advance(3)
    (request,) = requests_of([prompt], max_tokens=1, name="read")
    reading = ReadingSteps(engine, request, kv_bits=kv_bits, base=base)
    reading.advance(1)
    with pytest.raises(AssertionError, match="too short"):
        reading.advance(1)
    reading.close()
