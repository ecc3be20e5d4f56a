"""The metrics of results: unit, which direction is better, meaning, and how a value is shown."""

from __future__ import annotations

from dataclasses import dataclass

_TABLE = """
request_seconds              s       lower    one request, from connecting to the end of the answer
first_token_seconds          s       lower    from connecting to the first text
new_tokens                   tokens  neither  tokens that a turn adds to the prompt of the previous turn
cpu_seconds                  s       lower    CPU time of all processes of the server per request
beyond_step_seconds          s       lower    time to first token minus an ordinary engine step over as many new tokens
tokens_per_second            tok/s   higher   tokens of all streams per second of the whole case
decode_tokens_per_second     tok/s   higher   tokens per second after the last stream has started
prompt_tokens_per_second     tok/s   higher   prompt tokens per second until the first text
gap_p50_seconds              s       lower    median time between texts of a stream
gap_p99_seconds              s       lower    99th percentile of the time between texts of a stream
idle_gap_seconds             s       lower    median gap of a stream while nothing else runs
stalled_gap_p50_seconds      s       lower    median gap during the prefill of long prompts
stalled_gap_p99_seconds      s       lower    99th percentile of the gaps during the prefill of long prompts
stalled_gap_max_seconds      s       lower    longest gap during the prefill of long prompts
stalled_tokens_per_second    tok/s   higher   speed of the stream during the prefill of long prompts
long_first_token_seconds     s       lower    time to first text of the long prompts
alone_first_token_seconds    s       lower    time to first text of a long prompt without a stream beside it
cached_share                 share   higher   share of prompt tokens that the server reports as cached
total_seconds                s       lower    the whole trace
resumed_first_token_seconds  s       lower    time to first text of the agents resumed at the end
step_seconds                 s       lower    one decode step of all rows, mean of a block of steps
step_processor_seconds       s       lower    CPU time of all threads per step; with one BLAS thread, others affect it less
layout_seconds               s       lower    building the graph of a step in Python while another step computes
collect_seconds              s       neither  waiting for a step and reading its tokens
drawing_seconds              s       lower    sampling one token per row from computed logits
layout_share                 share   neither  graph building relative to the step; hidden if a core is free
drawing_share                share   neither  sampling relative to the step
attention_share              share   neither  attention relative to a step that is evaluated part by part
ready_seconds                s       lower    from starting the process to the end of its first answer
listening_seconds            s       lower    from starting the process to its first HTTP response
idle_bytes                   bytes   lower    memory of all processes when idle, shared pages counted once
processes                    count   neither  processes of the server
peak_bytes                   bytes   lower    highest sampled memory of all processes
kept_bytes                   bytes   neither  memory still in use after the agents were answered
kept_bytes_per_token         bytes   lower    memory still in use per token of the contexts
ram_bytes                    bytes   neither  KV in RAM for these contexts, as reported by the server
context_tokens               tokens  neither  prompt and answer of the turn
restored_gap_ratio           x       lower    median gap beside restored contexts, relative to short requests
cold_over_restored           x       higher   time to first text, cold relative to restored
read_seconds                 s       neither  reading the bytes of a context's KV from a file
copy_seconds                 s       neither  copying them into arrays and caches
forward_seconds              s       neither  one forward pass over the last prompt token
kv_bytes                     bytes   neither  KV of the context
disk_bytes                   bytes   neither  growth of the store folder
disk_bytes_per_token         bytes   lower    growth of the store folder per token of the contexts
"""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. better: lower, higher or neither."""

    unit: str
    better: str
    meaning: str


METRICS = {
    name: Metric(unit, better, meaning)
    for name, unit, better, meaning in (line.split(None, 3) for line in _TABLE.strip().splitlines())
}
_UNKNOWN = Metric("count", "neither", "unknown to this version")


def metric_of(name: str) -> Metric:
    """Look up a metric by name. In "first token @ cold", "cold" is a step of the scenario."""
    return METRICS.get(name.split(" @ ")[0], _UNKNOWN)


def shown(value: float, unit: str) -> str:
    """A value with its unit."""
    match unit:
        case "s" if value >= 1:
            return f"{value:,.2f} s"
        case "s" if value >= 0.001:
            return f"{value * 1000:,.1f} ms"
        case "s":
            return f"{value * 1e6:,.0f} µs"
        case "bytes":
            return _bytes_shown(value)
        case "share":
            return f"{value:.1%}"
        case "x":
            return f"{value:.2f} ×"
        case "tok/s":
            return f"{value:,.0f} tok/s" if value >= 100 else f"{value:,.1f} tok/s"
        case _:
            return f"{value:,.0f}"


def _bytes_shown(value: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"
