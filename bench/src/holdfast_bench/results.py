"""Result files: JSON with a schema name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import HoldfastError

SCHEMA = "holdfast-bench/1"


class Sample(msgspec.Struct, kw_only=True):
    """One round of one contender."""

    metrics: dict[str, list[float]] = {}
    gaps: list[float] = []  # seconds between texts, for histograms
    answers: list[str] = []  # greedy answers, in the order of the requests
    errors: list[str] = []
    others_cpu_share: float = 0.0  # CPU time of the waiting contenders, relative to one core


class Agreement(msgspec.Struct, kw_only=True, frozen=True):
    """How far a contender's greedy answers agree with the first contender's."""

    answers: int
    equal_answers: int
    tokens: int  # of the first contender's answers
    agreeing_tokens: int  # before the first difference of each answer

    @property
    def rate(self) -> float:
        """Share of tokens before the first difference."""
        return self.agreeing_tokens / self.tokens if self.tokens else 0.0


class ContenderResult(msgspec.Struct, kw_only=True):
    """All rounds of one contender in one case."""

    label: str
    rounds: list[Sample] = []
    noise: dict[str, list[float]] = {}  # ratios to itself, if every contender's noise is measured
    agreement: Agreement | None = None  # None for the first one, and if nothing can be compared
    notes: list[str] = []

    def values(self, metric: str) -> list[list[float]]:
        """The metric's values, round by round."""
        return [sample.metrics.get(metric, []) for sample in self.rounds]

    def pooled(self, metric: str) -> list[float]:
        """The metric's values of all rounds."""
        return [value for values in self.values(metric) for value in values]

    def errors(self) -> list[str]:
        """All errors, without repetition."""
        return list(dict.fromkeys(error for sample in self.rounds for error in sample.errors))


class CaseResult(msgspec.Struct, kw_only=True):
    """One case of a scenario. Others are compared with the first contender."""

    scenario: str
    case: str
    model: str
    settings: dict[str, Any] = {}
    contenders: list[ContenderResult] = []
    noise: dict[str, list[float]] = {}  # metric → ratios of the first contender to itself
    seconds: float = 0.0
    notes: list[str] = []

    def metric_names(self) -> list[str]:
        """All metrics with a value."""
        samples = [sample for each in self.contenders for sample in each.rounds]
        names = [name for sample in samples for name, got in sample.metrics.items() if got]
        return list(dict.fromkeys(names))


class Results(msgspec.Struct, kw_only=True):
    """All results of a run."""

    schema: str = SCHEMA
    kind: str = "scenarios"  # or "engine"
    made_at: str = ""
    version: str = ""
    commit: str = ""
    command: str = ""
    machine: dict[str, Any] = {}
    client: dict[str, Any] = {}  # cost of the load generator
    cases: list[CaseResult] = []
    notes: list[str] = []


def write_results(results: Results, file: Path) -> None:
    """Write as JSON, atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    partial.replace(file)


def read_results(file: Path) -> Results:
    """Read a result file. Raises HoldfastError for other files."""
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise HoldfastError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise HoldfastError(f"{file} is not a result file: {error}") from error
    if results.schema != SCHEMA:
        raise HoldfastError(
            f"{file} has the schema {results.schema!r}; this version reads {SCHEMA!r}"
        )
    return results
