"""The examples of README and first steps, run as they stand there, with the bundled model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from holdfast.cli.agents import AGENTS
from tests.fakes.command_line import LONGEST_SECONDS, holdfast
from tests.fakes.server_process import ServerProcess, environment
from tests.project.sources import ROOT

DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "first-steps.md")
ADDRESS = "http://127.0.0.1:8321"


def blocks(language: str, *, containing: str) -> list[str]:
    """The code blocks of a language that have a word in them."""
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    found = [block for text in texts for block in re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]
    chosen = [block for block in found if containing in block]
    assert chosen, f"no example of {language} has {containing!r}"
    return chosen


def ran(program: str, folder: Path) -> str:
    """The output of a Python example."""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, env=environment(), timeout=LONGEST_SECONDS
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def assert_greets(text: str) -> None:
    """One or two sentences with a capital first and a greeting in it, ended by themselves, no word three times in a row."""
    words = text.split()
    assert re.fullmatch(r"[A-Z].*[.!?]", text.strip(), re.DOTALL), text
    assert re.search(r"\b(hello|hi|hey|welcome|greetings)\b", text, re.IGNORECASE), text
    assert len(words) <= 60, text
    assert not any(one == two == three for one, two, three in zip(words, words[1:], words[2:], strict=False)), text


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    running = ServerProcess()
    running.wait_ready()
    yield running
    running.stop()


def test_the_request_over_http_is_answered_from_its_notes(server: ServerProcess) -> None:
    (command,) = blocks("sh", containing="curl ")
    found = re.fullmatch(rf"curl {ADDRESS}(\S+) -H 'Content-Type: application/json' -d '(.*)'\n", command, re.DOTALL)
    assert found is not None
    answer = httpx.post(server.url + found[1], json=json.loads(found[2]), timeout=LONGEST_SECONDS).json()
    assert answer["choices"][0]["message"]["content"] == "The code of the shed is 4711."
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_the_request_through_openais_client_is_answered_with_a_greeting(server: ServerProcess, tmp_path: Path) -> None:
    (program,) = blocks("python", containing="from openai import")
    assert_greets(ran(program.replace(ADDRESS, server.url).replace("stream=True", "stream=True, temperature=0"), tmp_path))


def test_the_library_example_of_the_readme_answers_with_a_greeting(tmp_path: Path) -> None:
    program, *_ = blocks("python", containing="from holdfast import LLM")
    assert_greets(ran(program, tmp_path))


def test_the_longer_library_example_answers_from_its_notes(tmp_path: Path) -> None:
    _, program, _ = blocks("python", containing="from holdfast import LLM")
    first, *_, last = ran(program, tmp_path).splitlines()
    assert first == last == "The code of the shed is 4711."


def test_the_library_example_of_tools_calls_one_and_tells_its_result_and_thinks(tmp_path: Path) -> None:
    *_, program = blocks("python", containing="from holdfast import LLM")
    said = ran(program, tmp_path)
    call, told, *_ = said.splitlines()
    assert call == 'get_weather {"city": "Oslo"}'
    assert "21 degrees" in told
    assert "42" in said
    assert "ToolCallStarted(" in said


def test_hello_through_a_pipe_is_answered_with_a_greeting(tmp_path: Path) -> None:
    (said,) = {
        line for text in blocks("sh", containing="| holdfast chat") for line in re.findall(r'echo "(.*)" \| holdfast chat', text)
    }
    done = holdfast("chat", "--temperature", "0", cwd=tmp_path, stdin=f"{said}\n")
    assert done.returncode == 0, done.stderr
    assert_greets(done.stdout)


@pytest.mark.parametrize(
    "command", sorted(set(re.findall(r"^holdfast [a-z]+(?: [a-z]+)?", "\n".join(map(Path.read_text, DOCUMENTS)), re.MULTILINE)))
)
def test_every_command_that_is_named_exists(command: str, tmp_path: Path) -> None:
    _, *words = command.split()
    if words[0] == "launch":  # what stands behind an agent's name is the agent's, which need not be installed
        assert words.pop() in AGENTS
    done = holdfast(*words, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
