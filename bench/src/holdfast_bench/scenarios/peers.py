"""Compares Holdfast, `mlx_lm.server` and llama.cpp with the same random weights.

The cases are those of other scenarios, on models that all three servers can load.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast_bench.memory_use import sampled_memory
from holdfast_bench.models import FOUR_BIT
from holdfast_bench.results import Sample
from holdfast_bench.scenario import NOT_STARTED_HERE, Case, Scale, Scenario, Trial
from holdfast_bench.scenarios import overhead, prefill, streams

_STREAMS = 8
_MODEL, _SMALL_MODEL = "llama-95m", "llama-6m"


def _cases(scale: Scale) -> Sequence[Case]:
    is_quick = scale == "quick"
    one_stream = {
        "streams": 1,
        "kind": "short",
        "prompt_tokens": [50],
        "max_tokens": 50 if is_quick else 200,
    }
    lengths = streams.ragged_tokens(_STREAMS)
    ragged = {
        "streams": _STREAMS,
        "kind": "ragged",
        "prompt_tokens": [length // 5 for length in lengths] if is_quick else lengths,
        "max_tokens": 16 if is_quick else 64,
    }
    one_token = {"max_tokens": 1, "requests": 5 if is_quick else 15, "streamed": False}
    prompt = {"prompt_tokens": 500 if is_quick else 2000}
    return (
        Case(name="1 token", settings={"as_in": "overhead", **one_token}),
        Case(name="1 stream", settings={"as_in": "streams", **one_stream}),
        Case(name="8 ragged streams", settings={"as_in": "streams", **ragged}),
        Case(
            name=f"prompt of {prompt['prompt_tokens']} tokens",
            settings={"as_in": "prefill", **prompt},
        ),
        Case(name="memory", settings={"as_in": "memory", **ragged}, rounds=1 if is_quick else 2),
    )


async def _memory(trial: Trial) -> Sample:
    """Memory of a fresh server: before, and while it answers eight streams."""
    server = await trial.stage.restart(trial.contender)
    if server is None:
        return Sample(errors=[NOT_STARTED_HERE])
    async with sampled_memory(server) as seen:
        sample = await streams.SCENARIO.measure(trial)
    sample.metrics = {"idle_bytes": [float(seen[0])], "peak_bytes": [float(max(seen))]}
    return sample


_MEASURES = {
    "overhead": overhead.SCENARIO.measure,
    "streams": streams.SCENARIO.measure,
    "prefill": prefill.SCENARIO.measure,
    "memory": _memory,
}


async def _measure(trial: Trial) -> Sample:
    return await _MEASURES[trial.settings["as_in"]](trial)


SCENARIO = Scenario(
    name="peers",
    summary="1 token, 1 stream, 8 streams, a long prompt, memory; mlx_lm.server and llama.cpp beside it",
    model=_MODEL,
    more_models=(_SMALL_MODEL,),
    cases=_cases,
    measure=_measure,
    peers=("mlx_lm", "llama.cpp"),
    against_itself="everybody",
    only_by_name=True,
)
# On x86 CPUs, MLX multiplies quantized weights in a scalar loop: a token takes a second.
FOUR_BIT_SCENARIO = replace(
    SCENARIO,
    name="peers-4bit",
    summary="the same with 4-bit weights; llama.cpp beside it",
    model=_MODEL + FOUR_BIT,
    more_models=(_SMALL_MODEL + FOUR_BIT,),
    peers=("llama.cpp",),
)
