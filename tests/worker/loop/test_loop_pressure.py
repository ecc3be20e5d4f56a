"""Under memory pressure, new sequences are quantized; under critical pressure, running ones too.
Answers equal those of the same sequence alone.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.machine.device_memory import Pressure
from holdfast.wire.commands import Command, MemoryPressure
from holdfast.wire.events import FinishReason, Rejected, WorkerStatistics
from holdfast.worker.prefix.lookup import Lookup
from tests.fakes.caching_worker import CachingWorker, greedy, one_after_the_other
from tests.fakes.pressed_worker import alone, lengths, prompt_of, quantized_in, worker
from tests.fakes.script_inbox import ScriptInbox
from tests.fakes.slow import slow

NORMAL, WARNING, CRITICAL = (MemoryPressure(pressure=each) for each in Pressure)
NAMES = [
    "llama",
    *slow("gemma2"),  # computes attention itself
    pytest.param("gemma3_text", marks=pytest.mark.slow),  # windows
    pytest.param("qwen3_next", marks=pytest.mark.slow),  # recurrent layers
]


def after_steps(count: int, *commands: Command) -> list[Sequence[Command]]:
    return [*[[]] * count, list(commands)]


def counted(inbox: ScriptInbox) -> WorkerStatistics:
    return [event for event in inbox.events if isinstance(event, WorkerStatistics)][-1]


@pytest.mark.parametrize("name", NAMES)
def test_quantized_running_sequences_answer_as_alone(name: str) -> None:
    made = worker(name, step_tokens=256)
    common = prompt_of("common", 1040)
    prompts = {
        "long": common + prompt_of("long", 400),
        "forked": common + prompt_of("forked", 290),
        "native": prompt_of("native", 1100),
        "short": prompt_of("short", 60),
        "late": prompt_of("late", 1390),
    }
    requests = {
        each: greedy(each, prompt, max_tokens=60, kv_bits="native" if each == "native" else "")
        for each, prompt in prompts.items()
    }
    late = requests.pop("late")

    def press() -> None:
        done = quantized_in(made)
        if lengths(made).get("late", 0) > 1100 and "late" not in done:
            made.memory.set_worker_pressure(Pressure.CRITICAL)  # in the middle of its prefill
        elif lengths(made).get("long", 0) > 1450 and not {"long", "forked"} <= done.keys():
            made.memory.set_worker_pressure(Pressure.CRITICAL)
        else:
            made.memory.set_worker_pressure(Pressure.NORMAL)

    script = [list(requests.values()), *after_steps(60, late)]
    inbox = made.serve(script, on_receive=press)
    quantized_at = quantized_in(made)
    assert quantized_at.keys() == {"long", "forked", "late"}
    assert quantized_at["late"] < len(prompts["late"])
    for each, prompt in prompts.items():
        wanted = alone(name, prompt, max_tokens=60, quantized_at=quantized_at.get(each))
        assert inbox.tokens(each) == wanted, (each, quantized_at)
    assert counted(inbox).quantized == len(quantized_at)


def test_tokens_computed_after_a_conversion_are_not_cached(tmp_path: Path) -> None:
    first = prompt_of("first", 1200)
    made = worker("llama", tmp_path, step_tokens=256)

    def press() -> None:
        is_late = lengths(made).get("first", 0) > 1250
        made.memory.set_worker_pressure(Pressure.CRITICAL if is_late else Pressure.NORMAL)

    inbox = made.serve([[greedy("first", first, max_tokens=80)]], on_receive=press)
    (quantized_at,) = quantized_in(made).values()
    answer = tuple(inbox.tokens("first"))
    turn = first + answer + prompt_of("turn", 50)
    again = worker("llama", tmp_path).serve(
        one_after_the_other(greedy("turn", turn, max_tokens=20))
    )
    assert again.tokens("turn") == alone("llama", turn, max_tokens=20)
    assert 1024 <= again.finished("turn").cached_tokens <= quantized_at


@pytest.mark.parametrize("reused", [100, 300, 600])
def test_other_requests_forms_do_not_change_an_answers_form(reused: int, tmp_path: Path) -> None:
    asked = prompt_of("asked", 600)
    prompt = (*asked[:reused], *prompt_of("other", 40))
    made = worker("llama", tmp_path)
    inbox = made.serve(
        one_after_the_other(greedy("eight", asked, kv_bits="8"), greedy("auto", prompt))
    )
    assert inbox.finished("auto").cached_tokens == 0
    assert inbox.tokens("auto") == alone("llama", prompt, max_tokens=6)


def test_new_sequences_are_quantized_only_under_pressure(
    tmp_path: Path,
) -> None:
    prompts = {each: prompt_of(each, 300) for each in ("before", "under", "fixed", "after")}
    made = worker("llama", tmp_path)
    inbox = made.serve(
        [
            [greedy("before", prompts["before"])],
            *after_steps(20, WARNING),
            [greedy("under", prompts["under"])],
            [greedy("fixed", prompts["fixed"], kv_bits="native")],
            *after_steps(20, NORMAL),
            [greedy("after", prompts["after"])],
        ]
    )
    for each in ("before", "fixed", "after"):
        assert inbox.tokens(each) == alone("llama", prompts[each], max_tokens=6)
    quantized = worker("llama", kv_bits="8").serve([[greedy("under", prompts["under"])]])
    assert inbox.tokens("under") == quantized.tokens("under")
    for each, kv_bits in (("under", "8"), ("fixed", "native"), ("after", "native")):
        chain = greedy("chain", prompts[each]).prompt_token_ids.packed
        assert made.cache.cached_tokens(chain, root=made.index.root(form=kv_bits)) >= 256, each


def test_under_critical_pressure_one_waiting_request_has_its_prefix_loaded(
    tmp_path: Path,
) -> None:
    prompts = {str(index): prompt_of(f"prefix {index}", 300) for index in range(4)}
    requests = [greedy(each, prompt, max_tokens=8) for each, prompt in prompts.items()]
    before = worker("llama", tmp_path).serve(one_after_the_other(*requests))
    made = worker("llama", tmp_path)
    lookups: list[Lookup] = []
    look_up = made.cache.lookup

    def noted(*args: Any, **more: Any) -> Lookup:
        lookups.append(look_up(*args, **more))
        return lookups[-1]

    made.cache.lookup = noted  # type: ignore[method-assign]
    held: list[int] = []

    def look() -> None:
        held.append(sum(bool(each.fetched or each.awaited) for each in lookups))

    inbox = made.serve([[CRITICAL], requests, *after_steps(20_000, NORMAL)], on_receive=look)
    for each in prompts:
        assert inbox.tokens(each) == before.tokens(each)
        assert inbox.finished(each).cached_tokens >= 256
    assert max(held) == 1


def test_a_quantized_sequence_reserves_less_memory() -> None:
    made = worker("llama", budget_tokens=2000, step_tokens=512)
    reserved: list[int] = []

    def press() -> None:
        if lengths(made).get("a", 0) > 1510:
            made.memory.set_worker_pressure(Pressure.CRITICAL)
        if made.scheduler.statistics().running:
            reserved.append(made.scheduler.statistics().reserved_bytes)

    made.serve([[greedy("a", prompt_of("a", 1500), max_tokens=40)]], on_receive=press)
    assert quantized_in(made)
    assert reserved[-1] < 0.55 * reserved[0], "codes, and two blocks as they were computed"


def test_running_sequences_are_never_converted_to_a_faulty_form() -> None:
    made = worker("llama", step_tokens=512)
    made.forms.test_form = lambda kv_bits: "its results are wrong"
    prompt = prompt_of("a", 1100)
    inbox = made.serve([[CRITICAL], [greedy("a", prompt, max_tokens=8)]])
    assert not quantized_in(made)
    assert inbox.tokens("a") == alone("llama", prompt, max_tokens=8)


def test_waiting_requests_that_do_not_all_fit_start_in_8_bits() -> None:
    prompts = [prompt_of(f"together {index}", 1200) for index in range(4)]
    answers: dict[str, list[list[int]]] = {}
    together: dict[str, int] = {}
    for kv_bits in ("auto", "native", "8"):
        budget_tokens = None if kv_bits == "8" else 2600
        made = worker("llama", budget_tokens=budget_tokens, max_running=8, step_tokens=512)
        running: list[int] = []
        requests = [
            greedy(str(index), prompt, kv_bits=kv_bits) for index, prompt in enumerate(prompts)
        ]

        def count(made: CachingWorker = made, running: list[int] = running) -> None:
            running.append(made.scheduler.statistics().running)

        inbox = made.serve([requests], on_receive=count)
        answers[kv_bits] = [inbox.tokens(request.request_id) for request in requests]
        together[kv_bits] = max(running)
    assert together == {"native": 2, "auto": 4, "8": 4}
    assert answers["auto"] == answers["8"]


@pytest.mark.parametrize(("cached", "form"), [(1024, "native"), (256, "8")])
def test_a_sequence_with_a_large_native_prefix_waits_for_room(cached: int, form: str) -> None:
    prefix = prompt_of("prefix", cached)
    made = worker("llama", budget_tokens=3200, most_parked_bytes=0)
    waiting = greedy("waiting", prefix + prompt_of("own", 1300 - cached), max_tokens=12)
    running = [
        greedy(each, prompt_of(each, 1200), max_tokens=40, kv_bits="native") for each in "ab"
    ]
    inbox = made.serve(
        [*one_after_the_other(greedy("before", prefix)), running, *after_steps(8, waiting)]
    )
    kept = made.cache.cached_tokens(waiting.prompt_token_ids.packed, root=made.index.root(form="8"))
    assert ("8" if kept >= 1024 else "native") == form
    assert inbox.finished("waiting").cached_tokens == (cached if form == "native" else 0)


def test_a_request_that_fits_only_in_8_bits_starts_in_8_bits() -> None:
    made = worker("llama", budget_tokens=1000, step_tokens=512)
    prompts = {"long": prompt_of("long", 1600), "native": prompt_of("long", 1600)}
    inbox = made.serve(
        [
            [greedy("long", prompts["long"])],
            [greedy("native", prompts["native"], kv_bits="native")],
            [greedy("longer", prompt_of("longer", 2000), max_tokens=90, kv_bits="auto")],
            [greedy("after", prompt_of("after", 300))],
        ]
    )
    assert inbox.finished("long").reason is FinishReason.LENGTH
    eight = worker("llama", kv_bits="8", step_tokens=512)
    wanted = eight.serve([[greedy("long", prompts["long"])]])
    assert inbox.tokens("long") == wanted.tokens("long")
    assert inbox.finished("after").reason is FinishReason.LENGTH
    refusals = {each.request_id: each for each in inbox.events if isinstance(each, Rejected)}
    costs = made.engine.measure_costs()
    assert refusals.keys() == {"native"}
    assert refusals["native"].needed_bytes == 1608 * costs.bytes_per_token


@pytest.mark.parametrize("seed", [0, *slow(1, 2, 3)])
def test_no_request_fails_under_any_pressure(
    seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(f"pressure {seed}")
    folder = tmp_path if seed % 2 else None
    made = worker("llama", folder, budget_tokens=4000)
    common = prompt_of(f"common {seed}", 1100)
    first = greedy("first", prompt_of(f"first {seed}", 1500), max_tokens=100)
    script = [[first], *after_steps(40, CRITICAL)]
    fixed: dict[str, tuple[int, ...]] = {}
    names = ["first"]
    for index in range(5):
        name = str(index)
        names.append(name)
        own = prompt_of(f"{seed} {index}", rng.randrange(20, 700))
        prompt = common[: rng.choice([0, 1100, 1100])] + own
        kv_bits = rng.choice(["", "", "auto", "native"])
        if kv_bits == "native":
            fixed[name] = prompt
        script.append([greedy(name, prompt, max_tokens=rng.randrange(1, 40), kv_bits=kv_bits)])
        script += after_steps(rng.randrange(12), rng.choice([NORMAL, WARNING, CRITICAL, CRITICAL]))
    inbox = made.serve([*script, *after_steps(30, NORMAL)])
    for name in names:
        assert inbox.finished(name).reason is FinishReason.LENGTH
    for name, prompt in fixed.items():
        tokens = inbox.tokens(name)
        assert tokens == alone("llama", prompt, max_tokens=len(tokens))
    warnings = [each.message for each in caplog.records if each.levelno > logging.INFO]
    assert not warnings, "nothing had to be repeated"
    assert quantized_in(made), "some sequences were quantized while they ran"
