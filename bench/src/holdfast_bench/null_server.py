"""A server that answers every request immediately with random words, without running a model.

It measures the load generator: `python -m holdfast_bench.null_server --port PORT`. Tests use it,
too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
from typing import Any

from holdfast_bench.lexicon import words

_MODEL = "null"


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
        if path == "/health":
            _send_json(writer, {"status": "ok", "models": [{"id": _MODEL, "state": "ready"}]})
        elif path == "/v1/models":
            _send_json(writer, {"object": "list", "data": [{"id": _MODEL}]})
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


async def _run(arguments: argparse.Namespace) -> None:
    null = NullServer(
        token_seconds=arguments.token_seconds, prompt_token_seconds=arguments.prompt_token_seconds
    )
    server = await null.serve(arguments.port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-seconds", type=float, default=0.0)
    parser.add_argument("--prompt-token-seconds", type=float, default=0.0)
    asyncio.run(_run(parser.parse_args()))
