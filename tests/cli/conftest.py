"""A server that answers commands."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.echo_server import EchoServer, running_server


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    with running_server() as server:
        yield server
