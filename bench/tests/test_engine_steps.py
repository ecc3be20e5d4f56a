"""Steps of a real engine on a tiny model: right tokens, and a deliberate slow-down that the
comparison finds.
"""

from __future__ import annotations

import time

import pytest

from holdfast.worker.engine.engine import Engine, PendingStep
from holdfast.worker.engine.plan import StepPlan
from holdfast.worker.engine.probe import choose_layout
from holdfast_bench.compare import changes_between
from holdfast_bench.engine_steps import BareForward, EngineSteps, Stepper, alternate, requests_of
from holdfast_bench.results import Results
from tests.fakes.tiny_grammars import END, tiny_constraints
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

PROMPTS = [[5, 17, 3, 99, 42, 7], [11, 12, 13, 14, 15, 16]]


class SleepyEngine(Engine):
    """An engine that somebody put a sleep into."""

    def dispatch(self, plan: StepPlan) -> PendingStep:
        time.sleep(0.025)
        return super().dispatch(plan)


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


def test_a_sleep_in_the_step_is_caught_by_the_comparison() -> None:
    before, after = measured(Engine)[0], measured(SleepyEngine)[0]
    (change,) = [
        change for change in changes_between(before, after) if change.metric == "step_seconds"
    ]
    assert change.after - change.before > 0.005
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
