from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from holdfast.config import LogSettings
from holdfast.telemetry.logs import configure_logging


@pytest.fixture(autouse=True)
def _root_logger_is_restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_lines_can_be_read_back() -> None:
    out = io.StringIO()
    configure_logging(LogSettings(format="json"), stream=out)
    try:
        raise ValueError("bad")
    except ValueError:
        logging.getLogger("holdfast.test").exception("went %s\nwrong", "quite")
    line = json.loads(out.getvalue())
    assert out.getvalue().count("\n") == 1
    assert (line["level"], line["logger"], line["message"]) == ("error", "holdfast.test", "went quite\nwrong")
    assert "ValueError: bad" in line["traceback"]
    assert line["time"].endswith("Z")


def test_what_is_below_the_level_is_not_written() -> None:
    out = io.StringIO()
    configure_logging(LogSettings(level="warning"), stream=out)
    logging.getLogger("holdfast.test").info("quiet")
    logging.getLogger("holdfast.test").warning("loud")
    assert "quiet" not in out.getvalue()
    assert "loud" in out.getvalue()
