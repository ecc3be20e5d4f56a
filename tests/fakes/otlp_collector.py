"""A collector of OpenTelemetry on a loopback port: accepts spans over OTLP/HTTP, or lets the sender
wait.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """The received spans, with the names of their services."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.url = ""

    def take(self, body: bytes) -> None:
        self.asked.set()
        self.may_answer.wait()
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                each.value.string_value
                for each in resource_spans.resource.attributes
                if each.key == "service.name"
            }
            self.spans += [span for scope in resource_spans.scope_spans for span in scope.spans]

    def named(self, name: str) -> Any:
        """The only span of that name."""
        (found,) = [span for span in self.spans if span.name == name]
        return found


def attributes(span: Any) -> dict[str, Any]:
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes
    }


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens until the context ends."""
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            made.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        made.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield made
        finally:
            made.may_answer.set()
            server.shutdown()
            thread.join()
