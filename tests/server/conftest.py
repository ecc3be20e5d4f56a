from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.served_model import served_model_folder
from tests.fakes.server_process import ServerProcess


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return served_model_folder()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        str(model_folder), "--name", "demo", "--set", "server.reconnect_seconds=2"
    )
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
