"""Servers shared by the tests of several files: one of each kind per process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.fakes.server_process import ServerProcess, running_server, served_model_folder


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return served_model_folder()


@pytest.fixture(scope="session")
def store_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `server` stores blocks."""
    return tmp_path_factory.mktemp("shared") / "store"


@pytest.fixture(scope="session")
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `server` writes crash reports."""
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def server(model_folder: Path, store_folder: Path, state_folder: Path) -> Iterator[ServerProcess]:
    """The bundled model. Tests that count cached tokens use their own tenant."""
    arguments = (str(model_folder), "--name", "demo", "--store", str(store_folder))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(state_folder))
        with running_server(*arguments, "--set", "server.reconnect_seconds=0.5") as server:
            yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def strict_server(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """The bundled model with few places and short timeouts, open to the whole network, with a
    separate store.
    """
    settings = {
        "scheduler.max_running": 4,
        "scheduler.max_queued": 10,
        "residency.unread_bytes": 65536,
        "server.stalled_seconds": 0.5,
        "server.head_seconds": 1,
        "server.body_seconds": 1,
        "server.max_connections_per_address": 500,
        "server.reconnect_seconds": 0,
        "server.shutdown_seconds": 0,
    }
    arguments = [str(model_folder), "--name", "demo", "--host", "0.0.0.0"]
    arguments += ["--store", str(tmp_path_factory.mktemp("strict") / "store")]
    for name, value in settings.items():
        arguments += ["--set", f"{name}={value}"]
    with running_server(*arguments) as server:
        yield server
