"""The checks for every client, and the frame of its script: `python with_CLIENT.py BASE_URL MODEL`.

A script runs in an environment that has the client and not Holdfast. It prints a line of JSON for
each check, and ends with 1 if one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import inspect
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WEATHER_QUESTION, CITY, WEATHER, TOLD = (
    "What is the weather in Oslo?",
    "Oslo",
    "sunny, 21 degrees",
    "21 degrees",
)
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
SUM_QUESTION, SUM = "What is 17 + 25?", "42"


@dataclass(frozen=True)
class Server:
    """Its address and its model. Clients that require a key get an arbitrary one."""

    base_url: str  # ends with /v1
    model: str
    api_key: str = "none"

    @property
    def root(self) -> str:
        """Without /v1, as clients of Messages and Ollama require."""
        return self.base_url.removesuffix("/v1")


# of the server and, where a client speaks several protocols, the name of one
Check = Callable[..., Any]
_only_through: dict[Check, tuple[str, ...]] = {}


def told(text: str | None) -> None:
    """The answer contains the tool's result, of which the bundled model may misspell a word."""
    assert TOLD in (text or ""), f"the answer does not tell the result: {text!r}"


def summed(text: str | None) -> None:
    """The answer contains the sum, without markers of a thought."""
    assert SUM in (text or ""), f"the answer has not the sum: {text!r}"
    assert "think" not in (text or ""), f"the thought is in the answer: {text!r}"


def thought(text: str | None) -> None:
    """There was a thought, without its markers."""
    assert text, "there is no thought"
    assert "<think>" not in text, f"the marker is in the thought: {text!r}"


def called(name: str, arguments: Any) -> str:
    """The tool was called as the question requires. Returns its result."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert (name, values) == ("get_weather", {"city": CITY}), f"called {name} with {arguments!r}"
    return WEATHER


def through(*protocols: str) -> Callable[[Check], Check]:
    """A check for these protocols only."""

    def limited(check: Check) -> Check:
        _only_through[check] = protocols
        return check

    return limited


def run(*checks: Check, packages: tuple[str, ...], protocols: tuple[str, ...] = ()) -> None:
    """Run all checks with the server from the command line, once for each of their protocols."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base_url")
    parser.add_argument("model")
    parser.add_argument("waits", nargs="?", help="said to those scripts that can do both")
    given = parser.parse_args()
    server = Server(given.base_url, given.model)
    versions = {package: importlib.metadata.version(package) for package in packages}
    failed = False
    for check in checks:
        for wanted in [(name,) for name in _only_through.get(check, protocols)] or [()]:
            problem = _problem_of(check, server, *wanted)
            failed |= bool(problem)
            found = {
                "check": " ".join((check.__name__, *wanted)),
                "problem": problem,
                "versions": versions,
            }
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    sys.exit(failed)


def _problem_of(check: Check, server: Server, *protocol: str) -> str:
    try:
        done = check(server, *protocol)
        if inspect.isawaitable(done):
            asyncio.run(_awaited(done))
    except Exception:
        return traceback.format_exc()
    return ""


async def _awaited(done: Any) -> None:
    await done
