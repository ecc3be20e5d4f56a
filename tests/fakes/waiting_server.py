"""A server whose model takes long: the real front with a scripted model, and a short interval
between keep-alives.

`python -m tests.fakes.waiting_server` prints its address, and ends with its standard input. Before
an answer begins, and again in its middle, the client gets dozens of keep-alives, as in minutes
otherwise.
"""

from __future__ import annotations

import asyncio
import sys

from holdfast.config import ServerSettings
from holdfast.front.request import GenerationRequest
from holdfast.front.server import answers as server_answers
from tests.fakes.http_clients import served
from tests.fakes.scripted_gateway import Script, ScriptedGateway, ScriptedStream, answer

SILENT_SECONDS, INTERVAL_SECONDS = 0.6, 0.01


class WaitingGateway(ScriptedGateway):
    """Is silent before it accepts a request, and in the middle of the answer."""

    async def generate(self, request: GenerationRequest) -> ScriptedStream:
        """The answer `Hello`."""
        self.script = _script
        await asyncio.sleep(SILENT_SECONDS)
        return await super().generate(request)


def _script(_: GenerationRequest) -> Script:
    first, last, end = answer("Hel", "lo")
    pause = asyncio.Event()
    asyncio.get_running_loop().call_later(SILENT_SECONDS, pause.set)
    return [first, pause, last, end]


async def main() -> None:
    """Serve until the standard input ends."""
    server_answers.HEADER_GRACE_SECONDS = server_answers.KEEP_ALIVE_SECONDS = INTERVAL_SECONDS
    async with served(WaitingGateway(), settings=ServerSettings(port=0, shutdown_seconds=0)) as url:
        sys.stdout.write(f"{url}\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main())
