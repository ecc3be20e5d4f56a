"""Measures the overhead of the load generator against a server that answers without a model."""

from __future__ import annotations

import sys
from typing import Any

from holdfast_bench.contenders import Contender
from holdfast_bench.figures import percentile
from holdfast_bench.load import user
from holdfast_bench.servers import ServerStarter

_REQUESTS = 40
_STREAMS, _TOKENS = 8, 250
NULL = Contender(
    label="null", command=(sys.executable, "-m", "holdfast_bench.null_server", "--port", "{port}")
)


async def client_floor(starter: ServerStarter) -> dict[str, Any]:
    """The load generator's time per request and its highest event rate.

    Every measured time includes the first; rates above the second cannot be measured.
    """
    server = await starter.start(NULL)
    try:
        client = server.client
        single = [
            await client.ask(user(f"request {number}", max_tokens=1)) for number in range(_REQUESTS)
        ]
        cpu = client.cost.cpu_seconds
        streams = await client.ask_all(
            [user(f"stream {number}", max_tokens=_TOKENS) for number in range(_STREAMS)]
        )
    finally:
        server.stop(kill=True)
    events = sum(len(answer.text_times) for answer in streams.answers)
    return {
        "request_seconds": percentile([answer.seconds for answer in single], 50),
        "events_per_second": events / streams.seconds,
        "cpu_seconds_per_event": (client.cost.cpu_seconds - cpu) / max(events, 1),
    }
