from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.config import LogLevel, load_settings
from holdfast.front.run.front import Hangups, ReloadedSettings, _EarlySignals


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
        signals[0].stop_cancelling()
    for _ in range(3):
        await asyncio.sleep(0)
    return "went on"


async def test_an_early_signal_cuts_the_start_short() -> None:
    signals: list[_EarlySignals] = []
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(_serves(signals, disarms=False))
    assert signals[0].has_come


async def test_a_signal_after_disarm_cancels_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert await asyncio.create_task(_serves(signals, disarms=True)) == "went on"
    assert signals[0].has_come


def test_a_signal_after_the_end_does_nothing() -> None:
    signals: list[_EarlySignals] = []
    assert asyncio.run(_serves(signals, disarms=True)) == "went on"
    os.kill(os.getpid(), signal.SIGTERM)  # the loop is closed by now


@pytest.fixture(autouse=True)
def _the_level_and_the_handler_are_put_back() -> Iterator[None]:
    level, handler = logging.getLogger().level, signal.getsignal(signal.SIGHUP)
    yield
    logging.getLogger().setLevel(level)
    signal.signal(signal.SIGHUP, handler)


LEVELS: list[LogLevel] = []  # that workers were told


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "holdfast.toml").write_text('[log]\nlevel = "info"\n')
    return tmp_path / "holdfast.toml"


def reloaded(file: Path, caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    """The log lines after the file has been changed to this."""
    settings = ReloadedSettings(
        load_settings(file=file, environ={}, flags={"server.port": "9000"}), on_level=LEVELS.append
    )
    file.write_text(text)
    LEVELS.clear()
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "holdfast.front.run"):
        settings.reload()
    return [record.getMessage() for record in caplog.records]


def test_the_log_level_changes_with_one_line(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert reloaded(file, caplog, '[log]\nlevel = "debug"\n') == [
        "the log level is debug; it was info"
    ]
    assert (logging.getLogger().level, LEVELS) == (logging.DEBUG, ["debug"])


def test_settings_that_need_a_restart_are_named_in_that_line(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = reloaded(file, caplog, "[scheduler]\nmax_running = 3\n[server]\nport = 1\n")
    assert (
        line == "the log level is info, as before; restart to apply scheduler.max_running"
    )  # port: flag


def test_invalid_settings_change_nothing(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger().level
    (line,) = reloaded(file, caplog, '[log]\nlevel = "loud"\n')
    assert line.startswith("the settings are not reloaded: log.level")
    assert logging.getLogger().level == before


async def test_a_hangup_reloads_everything_once() -> None:
    done: list[str] = []
    Hangups().reload_on([lambda: done.append("one"), lambda: done.append("two")])
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert done == ["one", "two"]
