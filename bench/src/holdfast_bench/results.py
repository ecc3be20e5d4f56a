"""The result files: JSON with a schema name, so that old files can be told from new ones."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import HoldfastError

SCHEMA = "holdfast-bench/1"


class Sample(msgspec.Struct, kw_only=True):
    """What one round gave for one contender."""

    metrics: dict[str, list[float]] = msgspec.field(default_factory=dict)
    # seconds between texts, for the histogram
    gaps: list[float] = msgspec.field(default_factory=list)
    answers: list[str] = msgspec.field(default_factory=list)  # greedy, in the order of the requests
    errors: list[str] = msgspec.field(default_factory=list)
    # of one core, taken meanwhile by the contenders whose turn it was not
    others_cpu_share: float = 0.0


class Agreement(msgspec.Struct, kw_only=True, frozen=True):
    """How far a contender's greedy answers are those of the first one, to the same prompts."""

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
    rounds: list[Sample] = msgspec.field(default_factory=list)
    # as of the case, where everybody's is measured
    noise: dict[str, list[float]] = msgspec.field(default_factory=dict)
    # None for the first contender, and where there is nothing to compare
    agreement: Agreement | None = None
    notes: list[str] = msgspec.field(default_factory=list)

    def values(self, metric: str) -> list[list[float]]:
        """The metric's values, round by round."""
        return [sample.metrics.get(metric, []) for sample in self.rounds]

    def pooled(self, metric: str) -> list[float]:
        """The metric's values of all rounds."""
        return [value for values in self.values(metric) for value in values]

    def errors(self) -> list[str]:
        """What went wrong, each once."""
        return list(dict.fromkeys(error for sample in self.rounds for error in sample.errors))


class CaseResult(msgspec.Struct, kw_only=True):
    """One case of a scenario: the first contender is the one that the others are compared with."""

    scenario: str
    case: str
    model: str
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    contenders: list[ContenderResult] = msgspec.field(default_factory=list)
    # metric → ratios of the first contender to itself
    noise: dict[str, list[float]] = msgspec.field(default_factory=dict)
    seconds: float = 0.0
    notes: list[str] = msgspec.field(default_factory=list)

    def metric_names(self) -> list[str]:
        """All metrics that anybody has a value of."""
        return list(
            dict.fromkeys(
                name
                for each in self.contenders
                for sample in each.rounds
                for name, got in sample.metrics.items()
                if got
            )
        )


class Results(msgspec.Struct, kw_only=True):
    """One run."""

    schema: str = SCHEMA
    kind: str = "scenarios"  # or "engine"
    made_at: str = ""
    version: str = ""
    commit: str = ""
    command: str = ""
    machine: dict[str, Any] = msgspec.field(default_factory=dict)
    # what the load generator can do and what it took
    client: dict[str, Any] = msgspec.field(default_factory=dict)
    cases: list[CaseResult] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


def write_results(results: Results, file: Path) -> None:
    """Write as JSON, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    partial.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1))
    partial.replace(file)


def read_results(file: Path) -> Results:
    """Raises HoldfastError for what is no result file of this schema."""
    try:
        results = msgspec.json.decode(file.read_bytes(), type=Results)
    except OSError as error:
        raise HoldfastError(f"{file} cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise HoldfastError(f"{file} is no result file: {error}") from error
    if results.schema != SCHEMA:
        raise HoldfastError(
            f"{file} has the schema {results.schema!r}; this version reads {SCHEMA!r}"
        )
    return results


def median_of_rounds(values: list[list[float]]) -> list[float]:
    """One value for each round that has any."""
    return [statistics.median(each) for each in values if each]
