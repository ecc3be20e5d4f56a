from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator, Mapping

import pytest

from holdfast.config import LogSettings
from holdfast.front.telemetry.logs import configure_logging
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
