from __future__ import annotations

import io
import json
import logging
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from holdfast.config import LogSettings
from holdfast.errors import ConfigError
from holdfast.front.telemetry.logs import LogFile, configure_logging, open_log_file
from holdfast.front.telemetry.request_log import RequestRecord


@pytest.fixture(autouse=True)
def _root_logger_is_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def configured(
    monkeypatch: pytest.MonkeyPatch,
    settings: LogSettings,
    out: io.StringIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> io.StringIO:
    """Configure logging with this as standard error, and return it."""
    out = out or io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (environ or {}).items():
        monkeypatch.setenv(name, value)
    configure_logging(settings)
    return out


def test_json_lines_can_be_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    out = configured(monkeypatch, LogSettings(format="json"))
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("holdfast.test").exception("went %s\nwrong", "quite")
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert (line["level"], line["logger"], line["message"]) == (
        "error",
        "holdfast.test",
        "went quite\nwrong",
    )
    assert "ValueError: bad" in line["traceback"]
    assert line["time"].endswith("Z")


def test_lines_below_the_level_are_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    out = configured(monkeypatch, LogSettings(level="warning"))
    logging.getLogger("holdfast.test").info("quiet")
    logging.getLogger("holdfast.test").warning("loud")
    assert "quiet" not in out.getvalue()
    assert "loud" in out.getvalue()


def request_line(**fields: object) -> RequestRecord:
    return RequestRecord(method="GET", path="/v1/models", client="::1", **fields)  # type: ignore[arg-type]


def test_a_request_is_a_readable_line_and_structured_fields(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text, json_lines = io.StringIO(), io.StringIO()
    for out, form in ((text, "text"), (json_lines, "json")):
        configured(monkeypatch, LogSettings(format=form), out)  # type: ignore[arg-type]
        logging.getLogger("holdfast.test").info(request_line(status=404, error_code="unknown_path"))
    assert text.getvalue()[8:].startswith(" INFO    ::1 GET /v1/models 404 in ")
    line = json.loads(json_lines.getvalue())
    assert (line["status"], line["path"], line["error_code"]) == (404, "/v1/models", "unknown_path")
    assert line["message"].startswith("::1 GET /v1/models 404")


@pytest.mark.parametrize(("status", "colour"), [(200, "32"), (404, "33"), (500, "31")])
def test_the_status_is_coloured_on_a_terminal(
    status: int, colour: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Terminal()
    configured(monkeypatch, LogSettings(), out, {"TERM": "xterm"})
    logging.getLogger("holdfast.test").info(request_line(status=status))
    assert f"\x1b[{colour}m{status}\x1b[0m in " in out.getvalue()


@pytest.mark.parametrize(
    ("out", "environ"),
    [
        (Terminal(), {"NO_COLOR": "1"}),
        (Terminal(), {"TERM": "dumb"}),
        (io.StringIO(), {"TERM": "xterm"}),
    ],
)
def test_output_is_plain_without_a_terminal_or_if_disabled(
    out: io.StringIO, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    configured(monkeypatch, LogSettings(), out, environ)
    logging.getLogger("holdfast.test").warning("plain")
    logging.getLogger("holdfast.test").info(request_line(status=500))
    assert "\x1b" not in out.getvalue()
    assert "plain" in out.getvalue()


def test_client_text_cannot_control_the_terminal_or_forge_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = configured(monkeypatch, LogSettings())
    try:
        raise ValueError("\x1b[2J in an error")
    except ValueError:
        logging.getLogger("holdfast.test").exception("bad \x1b]0;owned\x07\n12:00:00 INFO forged")
    assert "\x1b" not in out.getvalue()
    assert "\x07" not in out.getvalue()
    assert "\n    12:00:00 INFO forged\nTraceback" in out.getvalue()


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
