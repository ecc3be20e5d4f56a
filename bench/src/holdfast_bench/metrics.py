"""What is measured: for each name its unit, which direction is better, and how it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Better = Literal["lower", "higher", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One kind of figure."""

    unit: Literal["s", "tok/s", "bytes", "tokens", "share", "x", "count"]
    better: Better
    meaning: str


METRICS = {
    "request_seconds": Metric(
        unit="s", better="lower", meaning="one request from connecting to its end"
    ),
    "first_turn_seconds": Metric(
        unit="s", better="lower", meaning="the first request of a conversation, which caches it"
    ),
    "request_bytes": Metric(unit="bytes", better="neither", meaning="the body of one request"),
    "front_seconds": Metric(
        unit="s", better="lower", meaning="processor time of the front process for one request"
    ),
    "tokenizing_seconds": Metric(
        unit="s",
        better="neither",
        meaning="processor time of tokenizing a whole prompt of that length, measured apart",
    ),
    "ids_front_seconds": Metric(
        unit="s", better="neither", meaning="the same for a prompt of as many token ids"
    ),
    "beyond_ids_seconds": Metric(
        unit="s", better="lower", meaning="the difference: rendering, tokenizing, history"
    ),
    "first_token_seconds": Metric(
        unit="s", better="lower", meaning="from connecting to the first text"
    ),
    "event_loop_lag_seconds": Metric(
        unit="s", better="lower", meaning="by how much the front's event loop came late at worst"
    ),
    "event_loop_busy_seconds": Metric(
        unit="s",
        better="lower",
        meaning="processor time that the event loop took at most before it came round",
    ),
    "new_tokens": Metric(
        unit="tokens",
        better="neither",
        meaning="by which the prompt is longer than that of the turn before",
    ),
    "cpu_seconds": Metric(
        unit="s",
        better="lower",
        meaning="processor time of all processes of the server for one request",
    ),
    "beyond_step_seconds": Metric(
        unit="s",
        better="lower",
        meaning="first token, less an ordinary step of the engine over as many tokens on live state",
    ),
    "tokens_per_second": Metric(
        unit="tok/s", better="higher", meaning="tokens drawn by all streams over the whole time"
    ),
    "decode_tokens_per_second": Metric(
        unit="tok/s", better="higher", meaning="tokens drawn after the last stream began"
    ),
    "prompt_tokens_per_second": Metric(
        unit="tok/s", better="higher", meaning="prompt tokens over the time to the first text"
    ),
    "gap_p50_seconds": Metric(
        unit="s", better="lower", meaning="median time between texts of a stream"
    ),
    "gap_p99_seconds": Metric(
        unit="s", better="lower", meaning="99th percentile of the time between texts of a stream"
    ),
    "idle_gap_seconds": Metric(
        unit="s", better="lower", meaning="median gap of a stream while nothing else runs"
    ),
    "stalled_gap_p50_seconds": Metric(
        unit="s", better="lower", meaning="median gap while long prompts are read"
    ),
    "stalled_gap_p99_seconds": Metric(
        unit="s", better="lower", meaning="99th percentile gap while long prompts are read"
    ),
    "stalled_gap_max_seconds": Metric(
        unit="s", better="lower", meaning="longest gap while long prompts are read"
    ),
    "stalled_tokens_per_second": Metric(
        unit="tok/s", better="higher", meaning="speed of the stream while long prompts are read"
    ),
    "long_first_token_seconds": Metric(
        unit="s", better="lower", meaning="first text of the long prompts"
    ),
    "alone_first_token_seconds": Metric(
        unit="s", better="lower", meaning="first text of a long prompt without a stream beside it"
    ),
    "share_of_cold": Metric(
        unit="share",
        better="lower",
        meaning="time to first text over that of the same length, cold",
    ),
    "cached_share": Metric(
        unit="share",
        better="higher",
        meaning="prompt tokens that the server says it did not read again",
    ),
    "total_seconds": Metric(unit="s", better="lower", meaning="the whole trace"),
    "resumed_first_token_seconds": Metric(
        unit="s", better="lower", meaning="first text of agents that come back at the end"
    ),
    "step_seconds": Metric(
        unit="s", better="lower", meaning="one decoding step of all rows, mean of a block of steps"
    ),
    "step_processor_seconds": Metric(
        unit="s",
        better="lower",
        meaning="the same in processor time of all threads: with one BLAS thread, other programs "
        "on the machine affect it less",
    ),
    "layout_seconds": Metric(
        unit="s",
        better="lower",
        meaning="building the graph of a step in Python, while another computes",
    ),
    "collect_seconds": Metric(
        unit="s", better="neither", meaning="waiting for a step and reading what it drew"
    ),
    "drawing_seconds": Metric(
        unit="s", better="lower", meaning="drawing a token for each row from logits that are there"
    ),
    "layout_share": Metric(
        unit="share",
        better="neither",
        meaning="the same over the step; hidden as far as cores are free",
    ),
    "drawing_share": Metric(unit="share", better="neither", meaning="drawing over the step"),
    "attention_share": Metric(
        unit="share",
        better="neither",
        meaning="attention over a step that is evaluated part by part",
    ),
    "ready_seconds": Metric(
        unit="s", better="lower", meaning="from starting the process to the end of its first answer"
    ),
    "listening_seconds": Metric(
        unit="s",
        better="lower",
        meaning="from starting the process to the first response over HTTP",
    ),
    "idle_bytes": Metric(
        unit="bytes",
        better="lower",
        meaning="memory of all its processes when idle, shared pages once",
    ),
    "processes": Metric(unit="count", better="neither", meaning="processes of the server"),
    "peak_bytes": Metric(
        unit="bytes", better="lower", meaning="most memory of all its processes, sampled"
    ),
    "kept_bytes": Metric(
        unit="bytes",
        better="neither",
        meaning="memory that stays taken after the agents were answered",
    ),
    "kept_bytes_per_token": Metric(
        unit="bytes", better="lower", meaning="the same for each token of their contexts"
    ),
    "ram_bytes": Metric(
        unit="bytes",
        better="neither",
        meaning="KV in RAM of what the agents sent, as the server tells it",
    ),
    "states_bytes": Metric(
        unit="bytes",
        better="neither",
        meaning="KV and other state of all agents' tokens, each once",
    ),
    "ram_over_states": Metric(
        unit="x",
        better="lower",
        meaning="KV in RAM, kept and live, by what the server tells, over that",
    ),
    "peak_ram_over_states": Metric(
        unit="x", better="lower", meaning="the most of it while turns ran"
    ),
    "grown_over_states": Metric(
        unit="x",
        better="lower",
        meaning="growth of the memory of all processes over the agents' states",
    ),
    "peak_grown_over_states": Metric(
        unit="x", better="neither", meaning="the most of it while turns ran, sampled"
    ),
    "grown_from_idle_over_states": Metric(
        unit="x",
        better="lower",
        meaning="growth of memory since before the warm-up over the agents' states and that of the warm-up",
    ),
    "disk_over_states": Metric(
        unit="x", better="lower", meaning="growth of the store folder over the agents' states"
    ),
    "context_tokens": Metric(
        unit="tokens", better="neither", meaning="prompt and answer of the turn"
    ),
    "restored_gap_ratio": Metric(
        unit="x",
        better="lower",
        meaning="median gap beside restored contexts over that beside short requests",
    ),
    "cold_over_restored": Metric(
        unit="x", better="higher", meaning="time to first text when cold over that when restored"
    ),
    "read_seconds": Metric(
        unit="s", better="neither", meaning="reading the bytes of a context's KV from a file"
    ),
    "copy_seconds": Metric(unit="s", better="neither", meaning="making arrays and caches of them"),
    "forward_seconds": Metric(
        unit="s", better="neither", meaning="one forward pass over the prompt's last token"
    ),
    "kv_bytes": Metric(unit="bytes", better="neither", meaning="KV of the context"),
    "disk_bytes": Metric(
        unit="bytes", better="neither", meaning="what the store folder has grown by"
    ),
    "disk_bytes_per_token": Metric(
        unit="bytes", better="lower", meaning="the same for each token of the contexts"
    ),
}


_UNKNOWN = Metric(unit="count", better="neither", meaning="not known to this version")


def metric_of(name: str) -> Metric:
    """The metric of a name; what stands behind " @ " tells a step of the scenario and changes
    nothing.
    """
    return METRICS.get(name.split(" @ ")[0], _UNKNOWN)


def shown(value: float, unit: str) -> str:
    """A figure as people read it."""
    match unit:
        case "s":
            return (
                f"{value:,.2f} s"
                if value >= 1
                else f"{value * 1000:,.1f} ms"
                if value >= 0.001
                else f"{value * 1e6:,.0f} µs"
            )
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
