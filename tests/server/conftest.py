from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from holdfast.models.demo import demo_folder
from tests.fakes.server_process import ServerProcess


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The bundled model, or the one that the variable names (a model that is still in training, for instance)."""
    named = os.environ.get("TEST_MODEL_FOLDER")
    return Path(named) if named else demo_folder()


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(str(model_folder), "--name", "demo")
    server.wait_ready()
    yield server
    assert server.stop() == 0, server.log()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
