from __future__ import annotations

from holdfast.config import SchedulerSettings
from holdfast.worker.scheduler.sequence import SequenceCosts
from tests.fakes.step_worker import StepWorker


def worker(*, budget_tokens: int, depth: int = 0) -> StepWorker:
    return StepWorker(
        settings=SchedulerSettings(expected_output_tokens=4, min_chunk_tokens=4, step_tokens=64),
        costs=SequenceCosts(
            kv_bytes_per_token=1, fixed_bytes_per_sequence=0, reserve_step_tokens=4
        ),
        budget_bytes=budget_tokens,
        depth=depth,
    )


def test_growth_without_pressure_preempts_no_sequence() -> None:
    run = worker(budget_tokens=1000)
    for name in "ab":
        run.submit(name, prompt_tokens=8, max_tokens=40)
    run.run_to_end()
    assert run.preempted == []
    assert run.growths > 0


def test_the_youngest_is_preempted_and_never_the_oldest() -> None:
    for depth in (0, 1):
        run = worker(budget_tokens=64, depth=depth)
        for name in "abc":
            run.submit(name, prompt_tokens=8, max_tokens=50)
        run.run_to_end()
        assert "c" in run.preempted
        assert "a" not in run.preempted
        assert [served.request_id for served in run.ended] == ["a", "b", "c"]
        assert all(served.generated_tokens == 50 for served in run.ended)
        assert run.scheduler.statistics().preemptions == len(run.preempted)


def test_a_preempted_sequence_prefills_its_drawn_tokens() -> None:
    run = worker(budget_tokens=64, depth=1)
    run.submit("old", prompt_tokens=8, max_tokens=56)
    young = run.submit("young", prompt_tokens=8, max_tokens=56)
    while "young" not in run.preempted:
        run.step()
    generated_at_preemption = young.generated_tokens
    while not young.runs:
        run.step()
    # The step running at the preemption has generated_tokens one more, which counts.
    assert young.known == 8 + young.generated_tokens
    assert generated_at_preemption <= young.generated_tokens <= generated_at_preemption + 1
    run.run_to_end()
    assert young.generated_tokens == 56


def test_a_pending_token_may_stop_a_preempted_sequence() -> None:
    run = worker(budget_tokens=64, depth=1)
    run.submit("old", prompt_tokens=8, max_tokens=56)
    young = run.submit("young", prompt_tokens=8, max_tokens=56)
    run.stops_at = lambda request_id, generated_tokens: (
        request_id == "young" and "young" in run.preempted
    )
    run.run_to_end()
    assert young.ends == ["stopped"]
    assert young.generated_tokens < 56


def test_the_youngest_stalls_with_its_kv_instead_of_preempting_itself() -> None:
    run = worker(budget_tokens=36)
    old = run.submit("old", prompt_tokens=8, max_tokens=12)  # 20 tokens at its end
    young = run.submit("young", prompt_tokens=8, max_tokens=24)
    run.run_to_end()
    assert run.preempted == []
    assert (old.generated_tokens, young.generated_tokens) == (12, 24)


def test_memory_awaited_by_a_running_sequence_admits_no_other() -> None:
    run = worker(budget_tokens=64, depth=1)
    for name in "abcdef":
        run.submit(name, prompt_tokens=8, max_tokens=50)
    for _ in range(400):
        decision = run.step()
        assert not (decision.preempted and decision.admitted)
    run.run_to_end()


def test_a_sequence_about_to_end_is_not_preempted() -> None:
    run = worker(budget_tokens=32, depth=1)
    run.submit("old", prompt_tokens=8, max_tokens=20)
    short = run.submit("short", prompt_tokens=8, max_tokens=4)
    run.run_to_end()
    assert run.preempted == []
    assert short.generated_tokens == 4
