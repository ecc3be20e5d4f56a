"""llm-comply: a tester of conformance to Open Responses, OpenAI's chat completions and Anthropic's
Messages.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conversations import Server, run

# By these names it recognizes a thinking model and skips no test.
THINKS, THINKS_TOO = "gpt-5-here", "claude-sonnet-4-here"
# Models here read text only. A request without a model is answered by the first one: Open Responses
# leaves that open.
REFUSED = {"image-input": 400}
ANSWERED = {"error-handling": 200}


def failures(server: Server, form: str, *, model: str) -> dict[str, list[str]]:
    """The failing tests with their messages. Asserts that all were run."""
    command = [
        str(Path(sys.executable).parent / "llm-comply"),
        "run",
        "--base-url",
        server.base_url,
        "--model",
        model,
    ]
    done = subprocess.run(
        [*command, "--api-key", server.api_key, "--format", form, "--timeout", "120", "--json"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["summary"]["skipped"] == 0, done.stdout
    assert found["summary"]["total"] > 8, done.stdout
    return {each["id"]: each["errors"] for each in found["results"] if each["status"] != "passed"}


def expect(failed: dict[str, list[str]], expected: dict[str, int]) -> None:
    """Only these tests failed, with these statuses."""
    assert {name: errors[0].split()[:2] for name, errors in failed.items()} == {
        name: ["HTTP", str(status)] for name, status in expected.items()
    }, failed


def open_responses(server: Server) -> None:
    expect(failures(server, "open-responses", model=THINKS), {**REFUSED, **ANSWERED})


def chat_completions(server: Server) -> None:
    failed = failures(server, "openai-chat", model=THINKS)
    expect(failed, {f"chat-{name}": status for name, status in {**REFUSED, **ANSWERED}.items()})


def messages(server: Server) -> None:
    failed = failures(server, "anthropic", model=THINKS_TOO)
    expect(failed, {f"anth-{name}": status for name, status in REFUSED.items()})


if __name__ == "__main__":
    run(open_responses, chat_completions, messages, packages=("llm-comply",))
