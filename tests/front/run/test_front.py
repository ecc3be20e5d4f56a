from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import ModelSettings
from holdfast.front.run.front import _EarlySignals, can_chat
from holdfast.models.download import DEMO_ID


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


async def _serves(signals: list[_EarlySignals], *, disarms: bool) -> str:
    signals.append(_EarlySignals())
    os.kill(os.getpid(), signal.SIGTERM)  # while the loop is busy with this line
    if disarms:
        signals[0].disarm()
    for _ in range(3):
        await asyncio.sleep(0)
    return "went on"


async def test_an_early_signal_cuts_the_start_short() -> None:
    signals: list[_EarlySignals] = []
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(_serves(signals, disarms=False))
    assert signals[0].came


async def test_a_signal_after_disarm_cancels_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert await asyncio.create_task(_serves(signals, disarms=True)) == "went on"
    assert signals[0].came


def test_a_signal_after_the_end_does_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert asyncio.run(_serves(signals, disarms=True)) == "went on"
    os.kill(os.getpid(), signal.SIGTERM)  # the loop is closed by now


def test_only_a_model_without_a_chat_template_cannot_chat(
    tmp_path: Path,
) -> None:
    assert can_chat(ModelSettings(path=DEMO_ID))
    assert can_chat(ModelSettings(path=str(tmp_path / "missing")))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not can_chat(ModelSettings(path=str(tmp_path)))
    (tmp_path / "chat_template.jinja").write_text("x")
    assert can_chat(ModelSettings(path=str(tmp_path)))
