"""Files and functions stay small enough to be read at once."""

from __future__ import annotations

from tests.project.sources import sources

MOST_FILE_LINES = 500
MOST_FUNCTION_LINES = 60


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    lengths = {source.name: source.text.count("\n") for source in sources()}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FILE_LINES} == {}


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{source.name}:{function.lineno} {function.name}": (function.end_lineno or function.lineno) - function.lineno + 1
        for source in sources()
        for function in source.functions
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES} == {}
