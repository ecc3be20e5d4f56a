"""The null server of the benchmarks on a test's loop, and a wrong variant."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from holdfast_bench.null_server import NullServer


class WrongServer(NullServer):
    """Like the other one, but every answer differs from some position on."""

    def __init__(self, *, wrong_from: int) -> None:
        super().__init__()
        self._wrong_from = wrong_from

    def answer(self, messages: list[dict[str, str]], position: int) -> str:
        right = super().answer(messages, position)
        return right if position < self._wrong_from else f"not{right}"


@contextlib.asynccontextmanager
async def serving(server: NullServer) -> AsyncIterator[str]:
    """Its URL for the duration of the context; it runs on the test's loop."""
    listening = await server.serve(0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
