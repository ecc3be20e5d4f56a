"""The client of a running server, against a small real one."""

from __future__ import annotations

import socket

import pytest

from holdfast.cli.server_client import ServerClient, ServerFailed
from tests.fakes.echo_server import EchoServer


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_url_may_end_as_people_write_it(echo: EchoServer, ending: str) -> None:
    assert ServerClient(url=echo.url + ending, api_key="k").model_ids() == ("echo", "other")
    assert echo.keys == ["Bearer k"]


def test_health_is_read_even_while_the_server_starts(echo: EchoServer) -> None:
    assert ServerClient(url=echo.url).health()["models"] == [{"id": "echo", "state": "loading"}]


@pytest.mark.parametrize("url", ["not a url", "http://", "ftp://x"])
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ServerFailed):
        ServerClient(url=url).model_ids()


def test_a_missing_server_is_named() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerFailed, match=f"no answer from {url}"):
            ServerClient(url=url).model_ids()


def test_a_certificate_that_cannot_be_read_is_named() -> None:
    with pytest.raises(
        ServerFailed, match=r"server\.tls_cert: missing\.pem: No such file or directory"
    ):
        ServerClient(url="https://127.0.0.1:1", certificate="missing.pem")
