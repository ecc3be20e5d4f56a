"""Functions fit on a screen, and the repository holds no large results."""

from __future__ import annotations

from tests.project.sources import ROOT, sources

MOST_FUNCTION_LINES = 60
MOST_RESULT_BYTES = 100_000


def test_no_function_is_longer_than_a_screen() -> None:
    lengths = {
        f"{source.name}:{function.lineno} {function.name}": (function.end_lineno or function.lineno) - function.lineno + 1
        for source in sources()
        for function in source.functions
    }
    assert {name: lines for name, lines in lengths.items() if lines > MOST_FUNCTION_LINES} == {}


def test_raw_results_of_benchmarks_stay_out_of_the_repository_when_they_are_large() -> None:
    sizes = {str(path.relative_to(ROOT)): path.stat().st_size for path in (ROOT / "docs").rglob("*.json")}
    assert {name: size for name, size in sizes.items() if size > MOST_RESULT_BYTES} == {}
