"""A small real HTTP server with the part of OpenAI's protocol that a chat client needs, which
answers with an echo.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class EchoServer(ThreadingHTTPServer):
    """Records its requests. Answers "you said: …" word by word, or as `behaviour` says."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.models = ["echo", "other"]
        self.owner = "holdfast"
        self.behaviour = "answer"  # or "refuse", "break", "fail", "wait", "think", "call"
        self.client_left = threading.Event()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running_server() -> Iterator[EchoServer]:
    """A server on a separate thread for the duration of the context."""
    server = EchoServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: EchoServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.server.keys.append(self.headers.get("Authorization", ""))
        if self.path == "/v1/models":
            self._send(
                200,
                {
                    "object": "list",
                    "data": [
                        {"id": name, "owned_by": self.server.owner} for name in self.server.models
                    ],
                },
            )
        elif self.path == "/health":
            self._send(503, {"status": "starting", "models": [{"id": "echo", "state": "loading"}]})
        else:
            self._send(404, {"error": {"message": "no such path"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append(body)
        if self.server.behaviour == "refuse":
            self._send(
                400,
                {"error": {"message": "the prompt is too long", "type": "invalid_request_error"}},
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.server.behaviour == "call":
            self._think_and_call()
            return
        words = f"you said: {body['messages'][-1]['content']}".split(" ")
        self.wfile.write(b": a comment keeps the line open\n\n")
        for number, word in enumerate(["", *words]):
            if self.server.behaviour == ("think" if number == 1 else "wait" if number == 2 else ""):
                self._wait_for_the_client_to_leave()
                return
            delta = {"content": word if number < 2 else " " + word}
            usage = (
                {"usage": {"prompt_tokens": 11, "completion_tokens": number}}
                if self._counts()
                else {}
            )
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **usage})
        match self.server.behaviour:
            case "fail":
                self._event({"error": {"message": "the worker died; please try again"}})
            case "break":
                return
            case _:
                self._end(words)

    def _think_and_call(self) -> None:
        first = {
            "index": 0,
            "id": "c1",
            "type": "function",
            "function": {"name": "look_up", "arguments": ""},
        }
        second = {
            "index": 1,
            "id": "c2",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a":\n1}'},
        }
        deltas: list[dict[str, Any]] = [
            {"role": "assistant", "content": ""},
            {"reasoning_content": "Let me ", "reasoning": "Let me "},
            {"reasoning": "see\x1b[31m."},
            {"content": "I look."},
            {"tool_calls": [first]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"word": '}}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '"ferry"}'}}]},
            {"tool_calls": [second]},
        ]
        for delta in deltas:
            self._event({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]})
        self.wfile.write(b"data: [DONE]\n\n")

    def _counts(self) -> bool:
        return bool(self.server.requests[-1]["stream_options"].get("continuous_usage_stats"))

    def _end(self, words: list[str]) -> None:
        reason = (
            "length" if self.server.requests[-1].get("max_tokens", 0) in range(1, 10) else "stop"
        )
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {
            "prompt_tokens": 11,
            "completion_tokens": len(words),
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _wait_for_the_client_to_leave(self) -> None:
        self.connection.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert self.rfile.read(1) == b""
        self.server.client_left.set()

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode())
        self.wfile.flush()

    def _send(self, status: int, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name in the base class
        """Keeps tests quiet."""
