from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.logs import Level, followed, last_lines, line_text
from holdfast.front.telemetry.log_ring import LEVELS
from tests.fakes.command_line import holdfast_here, only_line


def test_the_last_lines_include_rotated_files(tmp_path: Path) -> None:
    log = tmp_path / "server-1.log"
    for age, first in ((0, 20), (1, 10), (2, 0)):
        log.with_name(log.name + (f".{age}" if age else "")).write_text(
            "".join(f"{n}\n" for n in range(first, first + 10))
        )
    for number, first in ((15, 15), (0, 30), (100, 0)):
        with log.open() as file:
            assert list(last_lines(log, file, number)) == [str(n) for n in range(first, 30)]


def test_following_continues_with_the_next_file_in_complete_lines(tmp_path: Path) -> None:
    log = tmp_path / "server-1.log"
    log.write_text("old\n")
    reader = log.open()
    assert list(last_lines(log, reader, 10)) == ["old"]
    found = followed(log, reader)
    with log.open("a") as file:
        file.write("one\ntwo")
        file.flush()
        assert next(found) == "one"
        file.write(" halves\n")
    assert next(found) == "two halves"
    log.rename(tmp_path / "server-1.log.1")
    log.write_text("three\n")
    assert next(found) == "three"


def test_without_a_log_the_error_says_how_to_get_one(tmp_path: Path) -> None:
    variables = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CACHE", "STATE")}
    refused = holdfast_here("logs", cwd=tmp_path, variables=variables)
    assert refused.returncode == 2
    assert "--log-file auto" in only_line(refused.stderr)


def test_the_log_of_a_stopped_server_is_found_by_port(tmp_path: Path) -> None:
    (tmp_path / "holdfast" / "logs").mkdir(parents=True)
    for port in (8321, 9000):
        (tmp_path / "holdfast" / "logs" / f"server-{port}.log").write_text(f"of {port}\n")
    variables = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CACHE", "STATE")}
    assert holdfast_here("logs", "8321", cwd=tmp_path, variables=variables).stdout == "of 8321\n"
    assert holdfast_here("logs", "832", cwd=tmp_path, variables=variables).returncode == 2


@pytest.mark.parametrize(
    ("logger", "text", "shown"),
    [
        ("holdfast.front.telemetry.request_log", "1.2.3.4 GET /", "WARNING 1.2.3.4 GET /"),
        ("holdfast.worker", "a\nb", "WARNING holdfast.worker: a\n    b"),
    ],
)
def test_lines_of_a_running_server_and_its_file_look_alike(
    logger: str, text: str, shown: str
) -> None:
    line = {"number": 1, "time": 0.0, "level": "warning", "logger": logger, "text": text}
    assert line_text(line)[20:] == shown


def test_levels_are_those_of_the_server_in_any_case(tmp_path: Path) -> None:
    assert [each.value for each in Level] == list(LEVELS)
    refused = holdfast_here("logs", "--level", "loud", cwd=tmp_path)
    assert refused.returncode == 2
    assert "'loud' is not one of 'debug', 'info', 'warning', 'error', 'critical'" in refused.stderr


def test_filters_need_a_running_server(tmp_path: Path) -> None:
    variables = {f"XDG_{name}_HOME": str(tmp_path) for name in ("CACHE", "STATE")}
    refused = holdfast_here("logs", "--level", "ERROR", cwd=tmp_path, variables=variables)
    assert refused.returncode == 2
    assert "no server" in only_line(refused.stderr).lower()
