"""Readable reports of a failure: as a story, and as a regression test."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Any

from tests.simulation.actions import (
    DEFAULT_OPTIONS,
    Action,
    Branch,
    Call,
    KeyChange,
    Scenario,
    Trouble,
    Turn,
)
from tests.simulation.outcomes import BEGAN, Failure, Result

MOST_LINES = 60
LAST_LINES = 15  # of a long story, always printed


def literal(scenario: Scenario) -> str:
    """The scenario as Python code, without default values."""
    lines = ["Scenario(", f"    order={scenario.order},"]
    if len(scenario.actions) == 1:
        lines.append(f"    actions=({_call(scenario.actions[0])},),")
    elif scenario.actions:
        lines.append("    actions=(")
        lines += [f"        {_call(action)}," for action in scenario.actions]
        lines.append("    ),")
    else:
        lines.append("    actions=(),")
    if options := _unusual(scenario):
        lines.append(f"    options={_quoted(options)},")
    return "\n".join([*lines, ")"])


def regression(scenario: Scenario, failure: Failure, *, was_in: str) -> str:
    """A test for `test_regressions.py`. was_in: the name of the world that failed first."""
    name = re.sub(r"\W+", "_", failure.invariant.lower()).strip("_")
    body = textwrap.indent(literal(scenario), "    " * 2)
    return "\n".join(
        [
            f"def test_{name}(worlds: Worlds) -> None:",
            f'    """Found by {was_in}: {_short(failure.what)}"""',
            "    check(",
            "        worlds,",
            f"{body},",
            "    )",
        ]
    )


def story(scenario: Scenario, result: Result) -> str:
    """The events up to the first violation, in order of time, without irrelevant ones."""
    failure = result.failures[0] if result.failures else None
    lines = [f"  options: {_quoted(_unusual(scenario)) or 'as usual'}"]
    told = sorted([*_asked(scenario), *_happened(result)], key=lambda line: round(line[0], 3))
    if failure is not None:
        told = _relevant(told, failure)
    lines += [f"  {at:10.3f} s  {text}" for at, text in told]
    if failure is not None:
        lines.append(f"  {failure.seconds:10.3f} s  {failure.invariant}: {failure.what}")
    return "\n".join(lines)


def _asked(scenario: Scenario) -> Iterator[tuple[float, str]]:
    for action in scenario.actions:
        match action:
            case Turn():
                yield action.at, f"{action.agent} gets a turn: {_words(action)}"
            case Branch():
                yield (
                    action.at,
                    f"{action.agent} goes on from {action.keep} messages of {action.source}",
                )
            case Call():
                yield action.at, f"somebody calls {action.method} {action.path}"
            case Trouble():
                yield action.at, f"trouble: {action.kind} ({_words(action)})"
            case KeyChange():
                yield action.at, f"the key file changes: {action.kind} ({_words(action)})"


def _happened(result: Result) -> Iterator[tuple[float, str]]:
    for at, text in result.story:
        if not text.startswith("trouble: "):  # the scenario has it, with its parameters
            yield at - BEGAN, text


def _words(action: Turn | Trouble | KeyChange) -> str:
    given = {
        name: value for name, value in _given(action).items() if name not in ("at", "agent", "kind")
    }
    return (
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in given.items()) or "plain"
    )


def _relevant(told: list[tuple[float, str]], failure: Failure) -> list[tuple[float, str]]:
    """All lines of a short story; of a long one, faults, the agents in the failure, and the end."""
    told = [line for line in told if line[0] <= failure.seconds]
    if len(told) <= MOST_LINES:
        return told
    names = {re.split(r"[-/]", word)[0] for word in re.findall(r"\ba\d+[\w.+/-]*", failure.what)}
    first, last = told[:-LAST_LINES], told[-LAST_LINES:]
    kept = [
        (at, text)
        for at, text in first
        if text.startswith("trouble") or names & set(re.findall(r"a\d+[\w.+]*", text))
    ]
    left_out = len(first) - len(kept[-MOST_LINES:])
    return [*kept[-MOST_LINES:], (last[0][0], f"(and {left_out} lines more)"), *last]


def _given(action: Action) -> dict[str, Any]:
    return {
        each.name: getattr(action, each.name)
        for each in fields(action)
        if each.default is MISSING or getattr(action, each.name) != each.default
    }


def _call(action: Action) -> str:
    given = ", ".join(f"{name}={_quoted(value)}" for name, value in _given(action).items())
    return f"{type(action).__name__}({given})"


def _unusual(scenario: Scenario) -> dict[str, Any]:
    return {
        name: value
        for name, value in scenario.options.items()
        if name not in DEFAULT_OPTIONS or DEFAULT_OPTIONS[name] != value
    }


def _quoted(value: Any) -> str:
    """The value as code, quoted as the formatter would."""
    if value == {}:
        return ""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_quoted(k)}: {_quoted(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    if isinstance(value, str) and not set(value) & {'"', "\\", "\n"}:
        return f'"{value}"'
    return repr(value)


def _short(text: str) -> str:
    line = text.strip().splitlines()[-1].replace('"', "'").replace("\\", "")
    return line if len(line) <= 80 else f"{line[:77]}..."
