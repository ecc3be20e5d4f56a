"""The server that `chat` starts for itself: it becomes ready, is used, and ends with the chat."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from holdfast.cli.chat_client import AnswerStatistics, answer_pieces
from holdfast.cli.chat_server import own_server
from holdfast.cli.server_client import ServerClient, ServerFailed
from holdfast.config import EffectiveSettings, load_settings
from tests.fakes.tiny_models import write_tiny

MESSAGES = [{"role": "user", "content": "hello"}]


def settings(model: Path, **further: object) -> EffectiveSettings:
    return load_settings(
        file=None, environ={}, flags={"model.path": str(model), "log.level": "warning", **further}
    )


async def read(client: ServerClient, body: dict[str, object], statistics: AnswerStatistics) -> None:
    async for _ in answer_pieces(client, body, statistics):
        pass


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_it_serves_with_the_settings_of_the_chat_and_ends_with_it(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    before, told = children(), list[str]()
    with own_server(
        settings(tmp_path / "model", **{"model.name": "my model"}), on_state=told.append
    ) as client:
        assert client.model_ids() == ("my model",)
        statistics = AnswerStatistics()
        body = {"model": "my model", "messages": MESSAGES, "max_tokens": 3, "temperature": 0}
        asyncio.run(read(client, body, statistics))
        assert statistics.completion_tokens == 3
        started = children() - before
        assert len(started) >= 2  # the server and its worker
        with pytest.raises(ServerFailed, match="401"):  # nobody else on the machine can use it
            ServerClient(url=client.url, use_proxies=False).model_ids()
    assert not any(psutil.pid_exists(pid) for pid in started)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_model_that_cannot_be_loaded_is_one_clear_line(tmp_path: Path, log_format: str) -> None:
    before, wished = children(), settings(tmp_path / "none", **{"log.format": log_format})
    with (
        pytest.raises(ServerFailed, match=r"^there is no model folder"),
        own_server(wished, on_state=print),
    ):
        pass
    assert children() == before
