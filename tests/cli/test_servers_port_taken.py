"""`serve` on a port that is in use."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.cli.servers import port_in_use
from holdfast.config import ServerSettings
from holdfast.errors import AddressInUse
from tests.fakes.command_line import holdfast, only_line
from tests.fakes.http_clients import served_on_a_thread
from tests.fakes.scripted_gateway import MODEL


def said_of(port: int) -> str:
    return port_in_use(AddressInUse(host="127.0.0.1", port=port, url=f"http://127.0.0.1:{port}"))


@contextmanager
def answering(status: int, answer: Any) -> Iterator[int]:
    """The port of a server that gives this response to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_another_holdfast_is_named_with_its_address_and_models() -> None:
    with answering(
        503,
        {"status": "starting", "version": "0.1.0", "models": [{"id": "demo", "state": "loading"}]},
    ) as port:
        said = said_of(port)
    assert f"in use by another Holdfast, which serves demo at http://127.0.0.1:{port} (" in said
    assert f"holdfast chat --url http://127.0.0.1:{port}" in said
    assert f"-p {port + 1} (-p 0: a free one)" in said


@pytest.mark.parametrize(
    "answer", [{}, [], {"version": "1"}, {"models": []}, {"version": "1", "models": "all"}]
)
def test_any_other_answer_means_another_program(answer: Any) -> None:
    with answering(200, answer) as port:
        assert "in use by another program; stop it, or use another port: -p" in said_of(port)


def test_a_server_with_hidden_models_is_recognized_by_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with answering(200, {"status": "ok"}) as port:
        own = SimpleNamespace(port=port)
        monkeypatch.setattr("holdfast.cli.servers.own_servers", lambda: [own])
        said = said_of(port)
        assert f"in use by another Holdfast, at http://127.0.0.1:{port}. Stop that server" in said
        own.port += 1
        assert "another program" in said_of(port)


def test_a_server_without_http_is_another_program() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def refuse() -> None:
            for _ in range(2):
                connection, _address = listener.accept()
                connection.sendall(b"220 mail ready\r\n")
                connection.close()

        threading.Thread(target=refuse, daemon=True).start()
        assert "another program" in said_of(port)


def test_a_second_server_names_the_program_that_has_the_port(tmp_path: Path) -> None:
    with served_on_a_thread(settings=ServerSettings(port=0, shutdown_seconds=0)) as url:
        done = holdfast("serve", "-p", url.rpartition(":")[2], cwd=tmp_path)
    assert done.returncode == 2
    assert f"in use by another Holdfast, which serves {MODEL} at {url}" in only_line(done.stderr)
