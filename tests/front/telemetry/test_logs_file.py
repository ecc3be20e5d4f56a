from __future__ import annotations

import logging
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.config import LogSettings
from holdfast.errors import ConfigError
from holdfast.front.telemetry.logs import LogFile, open_log_file


def auto(folder: Path, **settings: int) -> LogFile:
    file = open_log_file(
        LogSettings(file="auto", **settings), folder=lambda: folder, name="server-8321"
    )  # type: ignore[arg-type]
    assert file is not None
    return file


def homeless() -> Path:
    raise RuntimeError("no home")


@pytest.mark.parametrize("off", ["", "off"])
def test_without_the_setting_a_log_file_and_home_are_unnecessary(off: str) -> None:
    assert open_log_file(LogSettings(file=off), folder=homeless, name="n") is None
    with pytest.raises(ConfigError, match="no log file can be created: no home"):
        open_log_file(LogSettings(file="auto"), folder=homeless, name="n")


def test_rotated_files_are_limited_and_private(tmp_path: Path) -> None:
    file = auto(tmp_path / "logs", file_bytes=1000, old_files=2)
    for number in range(100):
        file.handle(
            logging.LogRecord("n", logging.INFO, "", 0, f"line {number:03} " + "x" * 90, None, None)
        )
    file.close()
    found = sorted(path.name for path in (tmp_path / "logs").glob("server*"))
    assert found == ["server-8321.log", "server-8321.log.1", "server-8321.log.2"]
    for path in (tmp_path / "logs").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.stat().st_size <= 1000
    assert "line 099" in (tmp_path / "logs" / "server-8321.log").read_text()


def test_two_servers_write_two_files_and_reuse_them(tmp_path: Path) -> None:
    first, second = auto(tmp_path), auto(tmp_path)
    assert (first.path.name, second.path.name) == ("server-8321.log", "server-8321-2.log")
    first.close()
    third = auto(tmp_path)
    assert third.path == first.path
    third.close()
    second.close()


def test_a_named_log_file_has_one_writer_and_must_be_writable(tmp_path: Path) -> None:
    settings = LogSettings(file=str(tmp_path / "own.log"))
    file = open_log_file(settings, folder=Path, name="n")
    assert file is not None
    with pytest.raises(ConfigError, match="another server already writes"):
        open_log_file(settings, folder=Path, name="n")
    file.close()
    with pytest.raises(ConfigError, match=r"log\.file: .*own\.log/x"):
        open_log_file(LogSettings(file=str(tmp_path / "own.log" / "x")), folder=Path, name="n")


def test_an_unexpected_error_is_in_the_file(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from holdfast.config import LogSettings
from holdfast.front.telemetry.logs import log_uncaught, open_log_file
from holdfast.front.telemetry.logs import configure_logging
settings = LogSettings(file={str(tmp_path / "own.log")!r})
configure_logging(settings, file=open_log_file(settings, folder=Path, name=""))
log_uncaught()
1 / 0
"""
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode
        == 1
    )
    assert "ZeroDivisionError" in (tmp_path / "own.log").read_text()


@pytest.mark.parametrize(
    ("redirected", "is_written"),
    [("2>/dev/null", True), ("2>own.txt", True), ("2>&1 | cat", False), ("2>&-", True)],
)
def test_a_background_server_writes_a_log_file_unless_piped(
    redirected: str, is_written: bool, tmp_path: Path
) -> None:
    program = (
        "from pathlib import Path; from holdfast.config import LogSettings; "
        "from holdfast.front.telemetry.logs import open_log_file; open_log_file(LogSettings(), "
        "folder=Path, name='n')"
    )
    command = f"{sys.executable} -c {shlex.quote(program)} {redirected}"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "n.log").exists() == is_written


def test_without_a_location_a_background_server_writes_no_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert open_log_file(LogSettings(), folder=homeless, name="n") is None
