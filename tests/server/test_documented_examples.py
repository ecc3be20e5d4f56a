"""Examples in README.md and docs/ are run as shown, in a fresh home; those that cannot run are
listed with the reason.

A shell block is split into its commands; a Python or TOML block is one example. Documents that
leave the home unchanged share a server with the bundled model. Blocks in `text` and `json` are
output and contain no commands.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast.config import load_settings
from holdfast.front.fleet.catalog import read_catalog_file
from tests.fakes.command_line import LONGEST_SECONDS, invoked
from tests.fakes.conditions import link_compiled
from tests.fakes.server_process import ServerProcess, running_server
from tests.project.sources import ROOT

ADDRESS = "127.0.0.1:8321"
SHELL = ("sh", "bash", "console")
OUTPUT = ("text", "json")
FENCE = re.compile(r"^ *```(\S*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
SHOWN_ERROR = re.compile(r"holdfast: |No such ")

PAGES = [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if ROOT / "docs" / "bench" not in path.parents
]
DOCUMENTS = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *PAGES)}
WRITTEN_BY_PROGRAMS = {
    "docs/reference/tested-agents.md": "sessions of agents that need npm; `make agents` holds them anew",
    "docs/getting-started/demo-chat.md": "`make demo-chat` writes it, tests/models/test_download_demo_chat.py reads it",
}
READ_FIRST = ("README.md", "docs/getting-started/first-steps.md", "docs/guides/python.md")
CHANGES_ITS_HOME = (  # keys, deleted stores, a stopped server
    "docs/guides/api-keys.md",
    "docs/guides/memory.md",
    "docs/guides/operating.md",
)

HUB = "downloads from the Hub"
INSTALLS = "installs into the environment"
NO_PROGRAM = "needs a program of somebody else"
BY_MAKE_CLIENTS = "a library that the tests do not install; `make clients` runs it"
# Examples that are not run: (document, beginning of the example) → reason.
NOT_RUN: dict[tuple[str, str], str] = {
    ("README.md", "make serve"): INSTALLS,
    ("README.md", "make test"): "runs these very tests",
    ("README.md", "holdfast serve mlx-community/"): HUB,
    ("README.md", "holdfast models info owner/name"): HUB,
    ("docs/guides/models.md", "mlx_lm.convert"): HUB,
    ("docs/guides/models.md", "holdfast serve mlx-community/"): HUB,
    ("docs/guides/models.md", "holdfast run qwen:sql"): HUB,
    ("docs/guides/models.md", "mlx_lm.lora"): HUB,
    ("docs/guides/vision.md", "make venv"): INSTALLS,
    ("docs/guides/vision.md", "holdfast serve mlx-community/"): HUB,
    ("docs/guides/vision.md", "import base64, openai"): HUB,
    ("README.md", "holdfast launch claude"): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "holdfast launch claude"): NO_PROGRAM,
    (
        "docs/getting-started/connect-your-agent.md",
        "holdfast launch --url http://studio:8321",
    ): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "holdfast launch --model ID"): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "ANTHROPIC_BASE_URL="): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "OPENAI_API_BASE="): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "OPENAI_API_KEY=none qwen"): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "pi --provider"): NO_PROGRAM,
    ("docs/getting-started/connect-your-agent.md", "cline "): NO_PROGRAM,
    (
        "docs/how-it-works/simulation.md",
        "make simulate",
    ): "tests/simulation/test_simulation.py runs it",
    ("docs/getting-started/first-steps.md", "holdfast serve mlx-community/"): HUB,
    (
        "docs/getting-started/first-steps.md",
        "holdfast chat ~/models/my-model",
    ): "a folder of the reader's",
    ("docs/getting-started/install.md", "pip install"): INSTALLS,
    ("docs/guides/clients.md", "docker run"): NO_PROGRAM,
    ("docs/guides/clients.md", "holdfast serve mlx-community/"): HUB,
    ("docs/guides/clients.md", "name: Holdfast"): NO_PROGRAM,
    ("docs/guides/clients.md", "- model_id: holdfast"): NO_PROGRAM,
    ("docs/guides/clients.md", "import { createAnthropic }"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "from agents import"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "from langchain_anthropic"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "from llama_index"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "from pydantic_ai"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "from litellm"): BY_MAKE_CLIENTS,
    ("docs/guides/clients.md", "import instructor"): BY_MAKE_CLIENTS,
    ("docs/guides/operating.md", "make venv"): INSTALLS,
    ("docs/reference/ollama.md", "OLLAMA_HOST=http://127.0.0.1:8321 ollama ls"): NO_PROGRAM,
}
# Required output: (document, beginning of the example) → a pattern.
SAYS: dict[tuple[str, str], str] = {
    ("README.md", "curl"): r"The code of the shed is 4711\.",
    ("README.md", "echo"): r"^[A-Z].*[.!?]\s*$",
    ("README.md", "from openai"): r"^[A-Z].*[.!?]\s*$",
    ("README.md", "from holdfast"): r"(Hello|Hi|Hey|Welcome)\b.*[.!?]\s*$",
    ("README.md", "holdfast ps"): r"holdfast-demo",
    ("docs/getting-started/first-steps.md", "curl"): r"The code of the shed is 4711\.",
    ("docs/guides/embeddings.md", "curl http://127.0.0.1:8321/v1/embeddings"): r'"embedding":\s*\[',
    ("docs/guides/embeddings.md", "curl http://127.0.0.1:8321/v1/rerank"): r'"relevance_score"',
    ("docs/guides/operating.md", "curl -X PATCH"): r'"max_running":\s*4',
    (
        "docs/guides/python.md",
        "from holdfast import LLM\n\nwith",
    ): r"(?s)^The code of the shed is 4711\.\n.*The code of the shed is 4711\.\s*$",
    (
        "docs/guides/python.md",
        "from holdfast import LLM\n\nweather",
    ): r'(?s)^get_weather \{"city": "Oslo"\}\n.*21 degrees.*42.*ToolCallStarted\(',
    ("docs/guides/structured-output.md", "curl"): r'\{\\"name\\"',
    (
        "docs/guides/tools.md",
        "curl http://127.0.0.1:8321/v1/chat/completions -H",
    ): r'"name":\s*"get_weather"',
    ("docs/guides/clients.md", "from openai"): r"(?s)^[A-Z].*[.!?]\n[A-Z].*[.!?]\s*$",
    ("docs/guides/clients.md", "from anthropic"): r"^[A-Z].*[.!?]\s*$",
    ("docs/guides/clients.md", "from ollama"): r"^[A-Z].*[.!?]\s*$",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A command of a shell block, or a whole block of another language."""

    document: str
    language: str
    text: str
    shown: str = ""  # the output that a `console` block shows below the command

    def begins(self, beginning: tuple[str, str]) -> bool:
        return self.document == beginning[0] and self.text.startswith(beginning[1])

    @property
    def is_run(self) -> bool:
        return not any(self.begins(listed) for listed in NOT_RUN)


def commands(block: str, *, prompt: str) -> Iterator[tuple[str, str]]:
    """Each command of a shell block, with the output lines below it."""
    command, shown = "", ""
    for line in block.splitlines(keepends=True):
        if command and is_open(command):
            command += line
        elif line.startswith(prompt) and line.strip() and not line.lstrip().startswith("#"):
            if command:
                yield command.strip(), shown
            command, shown = line.removeprefix(prompt), ""
        else:
            shown += line
    if command:
        yield command.strip(), shown


def is_open(command: str) -> bool:
    """Whether a command continues in the next line."""
    try:
        shlex.split(command, comments=True)
    except ValueError:
        return True
    return command.endswith("\\\n")


def examples_of(document: str) -> list[Example]:
    """All examples of a document, in order."""
    found: list[Example] = []
    for language, block in FENCE.findall(DOCUMENTS[document].read_text(encoding="utf-8")):
        if language in SHELL:
            prompt = "$ " if language == "console" else ""
            parts = commands(block, prompt=prompt)
            found += [
                Example(document=document, language=language, text=text, shown=shown)
                for text, shown in parts
            ]
        elif language not in OUTPUT:
            found.append(Example(document=document, language=language, text=block))
    return found


EXAMPLES = {
    document: examples_of(document) for document in DOCUMENTS if document not in WRITTEN_BY_PROGRAMS
}
ALL_EXAMPLES = [example for found in EXAMPLES.values() for example in found]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An unused home for all processes that the tests of this file start."""
    with pytest.MonkeyPatch.context() as patch:
        yield new_home(patch, tmp_path_factory.mktemp("home"))


def new_home(patch: pytest.MonkeyPatch, folder: Path) -> Path:
    link_compiled(folder)
    for variable in [name for name in os.environ if name.startswith(("HOLDFAST_", "XDG_", "HF_"))]:
        patch.delenv(variable)
    source = ROOT / "src"
    patch.setenv("HOME", str(folder))
    patch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    patch.setenv("PYTHONPATH", str(source))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("OPENBLAS_NUM_THREADS", "1")
    patch.setenv("COLUMNS", "200")
    return folder


@pytest.fixture(scope="module")
def shared_server(home: Path) -> Iterator[ServerProcess]:
    with running_server() as server:
        yield server


def run(example: Example, *, folder: Path, server: ServerProcess, is_here: bool = False) -> str:
    """Run an example; returns its output, or FAILED and the error.

    is_here: run a Python program in this process, which has imported most of its modules.
    """
    text = example.text.replace(ADDRESS, server.url.removeprefix("http://"))
    if example.language == "toml":
        return str(read_settings(example.document, text, folder))
    if example.language == "python" and is_here:
        return printed(text, folder)
    if example.language == "python":
        return outcome(example, [sys.executable, "-c", text], folder)
    if re.match(r"(\w+=\S+ )*holdfast serve\b", text) and not SHOWN_ERROR.match(example.shown):
        return served(text, folder)
    return outcome(example, ["bash", "-euo", "pipefail", "-c", text], folder)


def printed(program: str, folder: Path) -> str:
    """The output of a Python program."""
    output = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(output):
        exec(compile(program, "example", "exec"), {"__name__": "__main__"})
    return output.getvalue()


def read_settings(document: str, text: str, folder: Path) -> object:
    """Parse a TOML block like the program it is for."""
    file = folder / "shown.toml"
    file.write_text(text, encoding="utf-8")
    if document == "docs/reference/configuration.md":
        return load_settings(file=file, environ={}, flags={})
    if document == "docs/guides/models.md":
        return read_catalog_file(file, load_settings(file=None, environ={}, flags={}).settings)
    return tomllib.loads(text)


def outcome(example: Example, command: list[str], folder: Path) -> str:
    """Run a command to its end: it succeeds, or fails with the documented error."""
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=LONGEST_SECONDS,
    )
    output = done.stdout + done.stderr
    fails = SHOWN_ERROR.match(example.shown) is not None
    if fails != (done.returncode != 0):
        return f"FAILED with {done.returncode}: {output}"
    if fails:
        line = example.shown.splitlines()[0]
        pattern = ".*".join(re.escape(part) for part in line.split("…"))
        return (
            output
            if re.search(pattern, output, re.DOTALL)
            else f"FAILED with another error than is shown: {output}"
        )
    return output


def served(text: str, folder: Path) -> str:
    """Start a server as shown, on a free port, and end it when it is ready."""
    command = text.partition("  #")[0]
    process = subprocess.Popen(
        ["bash", "-c", f"{command} --port 0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    for line in process.stdout:
        lines.append(line)
        if "is ready at" in line:
            os.killpg(process.pid, signal.SIGTERM)
            rest, _ = process.communicate(timeout=LONGEST_SECONDS)
            return "".join([*lines, rest])
    return f"FAILED, ended with {process.wait()}: {''.join(lines)}"


def assert_runs(
    examples: list[Example], *, folder: Path, server: ServerProcess, is_here: bool = False
) -> None:
    """Every example that is not listed runs with its required output."""
    for example in examples:
        if not example.is_run:
            continue
        output = run(example, folder=folder, server=server, is_here=is_here)
        assert not output.startswith("FAILED"), f"{example.document}: {example.text}\n{output}"
        for beginning, pattern in SAYS.items():
            if example.begins(beginning):
                assert re.search(pattern, output), f"{example.document}: {example.text}\n{output}"


def is_quick(example: Example) -> bool:
    """Whether `make test` runs it: the programs and requests in the first pages for newcomers."""
    return example.document in READ_FIRST and not re.match(r"(\w+=\S+ )*holdfast ", example.text)


@pytest.mark.parametrize("document", READ_FIRST)
def test_the_first_commands_of_a_newcomer_run(
    document: str, shared_server: ServerProcess, tmp_path: Path
) -> None:
    assert_runs(
        [each for each in EXAMPLES[document] if is_quick(each)],
        folder=tmp_path,
        server=shared_server,
        is_here=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "document", [name for name, found in EXAMPLES.items() if any(each.is_run for each in found)]
)
def test_all_other_documented_examples_run(
    document: str, shared_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = [each for each in EXAMPLES[document] if not is_quick(each)]
    if document not in CHANGES_ITS_HOME:
        assert_runs(examples, folder=tmp_path, server=shared_server)
        return
    new_home(monkeypatch, tmp_path)
    server = ServerProcess("--log-file", "auto")
    try:
        server.wait_ready()
        assert_runs(examples, folder=tmp_path, server=server)
    finally:
        server.stop()


def test_every_block_is_run_listed_or_output() -> None:
    known = {*SHELL, *OUTPUT, "python", "toml"}
    unknown = [
        f"{each.document}: {each.text[:60]!r}"
        for each in ALL_EXAMPLES
        if each.language not in known and each.is_run
    ]
    assert unknown == [], "give these blocks a language, or list them in NOT_RUN"


def test_output_blocks_contain_no_commands() -> None:
    found = []
    for document in EXAMPLES:
        for language, block in FENCE.findall(DOCUMENTS[document].read_text(encoding="utf-8")):
            if language in OUTPUT:
                found += [
                    f"{document}: {line}"
                    for line in block.splitlines()
                    if re.match(r"\$ |curl |holdfast [a-z]|make [a-z]", line)
                ]
    assert found == [], "put these commands into a block of `sh` or `console`"


def test_every_listed_example_still_exists() -> None:
    listed = [*NOT_RUN, *SAYS]
    assert [
        each for each in listed if not any(example.begins(each) for example in ALL_EXAMPLES)
    ] == []
    assert [name for name in WRITTEN_BY_PROGRAMS if name not in DOCUMENTS] == []


def holdfast_commands() -> set[tuple[str, ...]]:
    """The words after `holdfast` in every example, run or not, that is not shown as failing."""
    found = set()
    for example in ALL_EXAMPLES:
        if example.language in SHELL and not SHOWN_ERROR.match(example.shown):
            for part in re.split(r" \| | && |\n", example.text.replace("\\\n", " ")):
                words = shlex.split(part, comments=True) if not is_open(part) else []
                names = [index for index, word in enumerate(words) if word == "holdfast"]
                if names and all("=" in word for word in words[: names[0]]):
                    found.add(tuple(words[names[0] + 1 :]))
    return found


def test_every_documented_holdfast_command_is_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("typer.core.HAS_RICH", False)  # the help in colours takes twice as long
    wrong = []
    for words in sorted(holdfast_commands()):
        # the words after an agent's name belong to the agent
        place = 1 if words[0] == "launch" else len(words)
        result = invoked([*words[:place], "--help", *words[place:]])
        if result.exit_code:
            wrong.append(f"holdfast {' '.join(words)}: {result.output}")
    assert wrong == []
