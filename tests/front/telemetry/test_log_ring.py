from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from holdfast.front.output import TextDelta
from holdfast.front.telemetry import log_ring
from holdfast.front.telemetry.log_ring import LogRing
from holdfast.front.telemetry.metrics import Metrics
from holdfast.front.telemetry.request_log import (
    AnswerRecord,
    RequestRecord,
    current_record,
    write_line,
)


@pytest.fixture
def ring() -> Iterator[LogRing]:
    made = LogRing()
    root = logging.getLogger()
    before = root.level
    root.addHandler(made)
    root.setLevel(logging.DEBUG)
    yield made
    root.removeHandler(made)
    root.setLevel(before)


def texts(ring: LogRing, **wanted: object) -> list[str]:
    return [line.text for line in ring.lines(**wanted)]  # type: ignore[arg-type]


log = logging.getLogger("holdfast.tests")


def test_lines_are_numbered_and_filtered(ring: LogRing) -> None:
    log.debug("one")
    log.warning("Two of abc/0")
    log.error("three")
    assert texts(ring) == ["one", "Two of abc/0", "three"]
    assert texts(ring, level="warning") == ["Two of abc/0", "three"]
    assert texts(ring, text="TWO") == ["Two of abc/0"]
    assert texts(ring, text="holdfast.TESTS", level="error") == ["three"]
    assert texts(ring, request_id="abc") == ["Two of abc/0"]
    (line,) = ring.lines(after=ring.latest_number - 1)
    assert (line.number, line.level, line.logger) == (ring.latest_number, "error", "holdfast.tests")


def test_lines_belong_to_the_request_that_wrote_them(ring: LogRing) -> None:
    record = RequestRecord(method="GET", path="/x", client="1.2.3.4", request_id="req_7")
    with current_record(record):
        log.info("within")
    log.info("outside")
    write_line(record)
    assert [line.text for line in ring.lines(request_id="req_7")] == [
        "within",
        "1.2.3.4 GET /x 499 in 0.00 s",
    ]


def test_prompts_and_answers_stay_out_of_the_ring(ring: LogRing) -> None:
    answer = AnswerRecord(Metrics())
    answer.note_accepted("m", prompt_tokens=3, prompt="a secret")
    answer.observe(TextDelta(index=0, text="an answer"))
    record = RequestRecord(method="POST", path="/x", client="1.2.3.4", answer=answer)
    write_line(record)
    assert "a secret" in str(record)
    assert "an answer" in str(record)
    (text,) = texts(ring)
    assert "a secret" not in text
    assert "an answer" not in text


def test_control_characters_are_escaped_and_tracebacks_are_kept(ring: LogRing) -> None:
    log.info("a\x1b[31m\u202eb\nc\r")
    try:
        raise ValueError("\x07 rings")
    except ValueError:
        log.exception("failed")
    assert texts(ring)[0] == "a\\x1b[31m\\u202eb\nc\\r"
    assert texts(ring)[1].startswith("failed\nTraceback")
    assert texts(ring)[1].endswith("ValueError: \\x07 rings")


def test_number_and_size_are_bounded(ring: LogRing, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(log_ring.MOST_LINES + 10):
        log.info("line %d", number)
    lines = texts(ring)
    assert len(lines) == log_ring.MOST_LINES
    assert lines[0] == "line 10"
    monkeypatch.setattr(log_ring, "MOST_CHARACTERS", 3 * log_ring.LONGEST_LINE)
    log.info("x" * 100_000)
    log.info("y" * 100_000)
    assert [line[0] for line in texts(ring)][-2:] == ["x", "y"]
    assert texts(ring)[-1].endswith("more characters)")
    assert sum(map(len, texts(ring))) <= 3 * log_ring.LONGEST_LINE


def test_unformattable_lines_do_not_disturb_the_caller(
    ring: LogRing, capsys: pytest.CaptureFixture[str]
) -> None:
    ring.handle(logging.LogRecord("x", logging.INFO, "", 0, "%d", ("no number",), None))
    assert "no number" in capsys.readouterr().err
    log.info("next")
    assert texts(ring) == ["next"]
