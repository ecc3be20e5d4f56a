"""A server that answers every request immediately with random words, without running a model.

It shows what the load generator costs: `python -m holdfast_bench.null_server --port PORT`. Tests use
it, too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import sys
from typing import Any

from holdfast_bench.comparison import percentile
from holdfast_bench.contenders import Contender
from holdfast_bench.load import user
from holdfast_bench.prompts import words
from holdfast_bench.servers import ServerStarter

_REQUESTS = 40
_STREAMS, _TOKENS = 8, 250
NULL = Contender(
    label="null", command=(sys.executable, "-m", "holdfast_bench.null_server", "--port", "{port}")
)


class NullServer:
    """The part of OpenAI's protocol that the scenarios use. Equal messages get equal answers."""

    def __init__(self, *, token_seconds: float = 0.0, prompt_token_seconds: float = 0.0) -> None:
        self._token_seconds, self._prompt_token_seconds = token_seconds, prompt_token_seconds
        self.seen: list[dict[str, Any]] = []

    def answer(self, messages: list[dict[str, str]], position: int) -> str:
        """The word at this position of the answer to these messages."""
        digest = hashlib.blake2s(f"{position} {messages}".encode(), digest_size=4).digest()
        return words()[int.from_bytes(digest) % len(words())]

    async def serve(self, port: int) -> asyncio.Server:
        """Listen on the loopback interface; port 0 takes a free port."""
        return await asyncio.start_server(self._handle, "127.0.0.1", port)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # a client may disconnect
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            path = head.split(b" ", 2)[1].decode()
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                ),
                0,
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            await self._respond(writer, path, body)
            await writer.drain()
        writer.close()

    async def _respond(self, writer: asyncio.StreamWriter, path: str, body: dict[str, Any]) -> None:
        if path == "/v1/models":
            _send_json(writer, {"object": "list", "data": [{"id": "null"}]})
        elif path in ("/v1/chat/completions", "/v1/completions"):
            self.seen.append(body)
            await self._generate(writer, body)
        else:
            _send_json(writer, {"error": {"message": "no such path"}}, status="404 Not Found")

    async def _generate(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        messages = body.get("messages") or [{"role": "user", "content": body["prompt"]}]
        read = sum(len(message["content"].split()) for message in messages)
        count = body["max_tokens"]
        usage = {"prompt_tokens": read, "completion_tokens": count}
        await asyncio.sleep(self._prompt_token_seconds * read)
        if not body.get("stream"):
            text = " ".join(self.answer(messages, position) for position in range(count))
            _send_json(
                writer,
                {
                    "choices": [{"message": {"content": text}, "finish_reason": "length"}],
                    "usage": usage,
                },
            )
            return
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
        )
        for position in range(count):
            if self._token_seconds and position:
                await asyncio.sleep(self._token_seconds)
            _send_event(
                writer, {"choices": [{"delta": {"content": self.answer(messages, position) + " "}}]}
            )
            await writer.drain()
        _send_event(writer, {"choices": [{"delta": {}, "finish_reason": "length"}]})
        _send_event(writer, {"choices": [], "usage": usage})
        writer.write(b"data: [DONE]\n\n")


def _send_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    writer.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def _send_json(
    writer: asyncio.StreamWriter, body: dict[str, Any], *, status: str = "200 OK"
) -> None:
    content = json.dumps(body).encode()
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(content)}\r\nConnection: close\r\n\r\n"
    )
    writer.write(head.encode() + content)


async def client_cost(starter: ServerStarter) -> dict[str, Any]:
    """The load generator's time per request and its highest event rate.

    Every measured time includes the first; rates above the second cannot be measured.
    """
    server = await starter.start(NULL)
    try:
        client = server.client
        single = [
            await client.ask(user(f"request {number}", max_tokens=1)) for number in range(_REQUESTS)
        ]
        cpu = client.cpu_seconds
        streams = await client.ask_all(
            [user(f"stream {number}", max_tokens=_TOKENS) for number in range(_STREAMS)]
        )
    finally:
        server.stop(kill=True)
    events = sum(len(answer.text_times) for answer in streams.answers)
    return {
        "request_seconds": percentile([answer.seconds for answer in single], 50),
        "events_per_second": events / streams.seconds,
        "cpu_seconds_per_event": (client.cpu_seconds - cpu) / max(events, 1),
    }


async def _run(port: int) -> None:
    async with await NullServer().serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    asyncio.run(_run(parser.parse_args().port))
