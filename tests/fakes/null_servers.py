"""The null server of the benchmarks on the loop of a test, and a variant of it that is wrong."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from holdfast_bench.null_server import NullServer


class WrongServer(NullServer):
    """Like the other one, but every answer differs from one position on."""

    def __init__(self, *, wrong_from: int) -> None:
        super().__init__()
        self._wrong_from = wrong_from

    def answer(self, messages: list[dict[str, str]], position: int) -> str:
        right = super().answer(messages, position)
        return right if position < self._wrong_from else f"not{right}"


@contextlib.asynccontextmanager
async def serving(server: NullServer) -> AsyncIterator[str]:
    """Its URL, for as long as the context lasts; it runs on the loop of the test."""
    listening = await server.serve(0)
    try:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
