"""Runs coding agents through Holdfast, each in a temporary home, and writes
docs/reference/tested-agents.md.

Run: `python -m tools.try_agents [--folder .agents] [NAME …]`. `make agents` installs the agents
first; their tasks are in `tools/agent_trials.py`.

The model's weights produce scripted answers (`tests/fakes/scripted_model.py`), because the trial is
about the agent, its prompt, its tools and the server, not about a model's abilities. Most agents
are started by `holdfast launch`. The page also shows how they react to a wrong key, a prompt that
is too long, and Ctrl-C, and that their second turn prefills only new tokens.

Then agents hold a conversation of three short turns in small contexts, to see whether they compact
too early. The scripted model's answer depends on the number of answers in the conversation. An
agent that has compacted it gets the first answer again, and the trial fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from holdfast.agents import AGENTS as LAUNCHED  # noqa: E402
from holdfast.agents import AgentTarget  # noqa: E402
from tests.fakes.scripted_model import CONTEXT, write_scripted  # noqa: E402
from tests.fakes.server_process import ServerProcess, until  # noqa: E402
from tools.agent_trials import (  # noqa: E402
    AGENTS,
    REPLIES,
    TERMINAL_AGENTS,
    TYPED,
    Agent,
    TaskAgent,
    TerminalAgent,
)
from tools.terminal import ENTER, Terminal  # noqa: E402

LIMIT_SECONDS = 240
# for an agent that does not end if its prompt is too long
PATIENCE_SECONDS = 60
GRACE_SECONDS = 30.0  # to end on request
KEY = "the-key"
SMALL_CONTEXT = 2048
LAST_LINES = 8
# warnings of an agent's JavaScript, which repeat with every step
_WARNING = re.compile(r"^(?:Deprecation)?Warning: .*\n(?: +at .*\n)*\n?", re.MULTILINE)
_ANSWERED = re.compile(
    r" prompt (?P<prompt_tokens>\d+)(?: \((?P<cached_tokens>\d+) cached\))? answer "
    r"(?P<answer_tokens>\d+)"
)
CONTEXTS = (32_768, 40_960, 65_536)
START_SECONDS = 240.0  # opencode downloads a package first
ANSWER_SECONDS = 180.0
TYPING_SECONDS = 1.5  # faster input counts as a paste
PAGE = ROOT / "docs" / "reference" / "tested-agents.md"
LAST_SECTION = "## In small contexts\n"
SLACK_TOKENS = 16  # a template may render the end of an answer differently from the model


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The exit and the output of a process."""

    code: int
    printed: str
    by_us: bool = False  # because it did not end by itself


class Trial:
    """An agent in a temporary home with its own workspace."""

    def __init__(self, agent: Agent, *, folder: Path, scratch: Path) -> None:
        self.agent, self._folder = agent, folder
        self.home, self.workspace, self._model = (
            scratch / name for name in ("home", "work", "model")
        )
        self._scratch = scratch
        self.home.mkdir()
        self.workspace.mkdir()
        (self.home / "node_modules").symlink_to(folder / "node_modules")
        write_scripted(
            self._model,
            agent.script(self.workspace),
            without_tools=agent.without_tools,
            said_before=agent.said_before,
        )

    @contextmanager
    def server(self, name: str, *arguments: str, key: str = "") -> Iterator[ServerProcess]:
        """A server of this trial's model with its own store."""
        options = ["--name", "scripted", "--set", f"store.folder={self._scratch}/{name}"]
        if key:
            options += ["--set", f"server.api_key={key}"]
        server = ServerProcess(str(self._model), *options, *arguments)
        try:
            server.wait_ready()
            for path, text in self.agent.home.items():
                (self.home / path).parent.mkdir(exist_ok=True)
                (self.home / path).write_text(self.filled(text))
            yield server
        finally:
            server.stop()

    def filled(self, text: str) -> str:
        """The text with paths filled in."""
        text = text.replace("{folder}", str(self._folder))
        return text.replace("{workspace}", str(self.workspace))

    def environment(self, **further: str) -> dict[str, str]:
        """The agent's environment: the path to programs, but no keys and no configuration."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
        kept["PATH"] = f"{self.filled(self.agent.programs)}:{kept['PATH']}"
        own = {
            "HOME": str(self.home),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "CI": "1",
            "NO_COLOR": "1",
        }
        return {**kept, **own, **self.agent.environment, **further}

    def start(self, command: Sequence[str], **further: str) -> subprocess.Popen[str]:
        """Start a process in the workspace, in its own process group, with the agent's input."""
        process = subprocess.Popen(
            command,
            cwd=self.workspace,
            env=self.environment(**further),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdin is not None
        process.stdin.write(self.agent.typed)
        process.stdin.close()
        process.stdin = None
        return process

    def ended(self, process: subprocess.Popen[str], *, within: float = LIMIT_SECONDS) -> Ended:
        """Wait for its end, or kill it with all its children."""
        try:
            printed, _ = process.communicate(timeout=within)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                printed, _ = process.communicate(timeout=GRACE_SECONDS)
            except subprocess.TimeoutExpired:  # opencode may keep trying
                os.killpg(process.pid, signal.SIGKILL)
                printed, _ = process.communicate(timeout=GRACE_SECONDS)
            return Ended(code=process.returncode, printed=printed, by_us=True)
        return Ended(code=process.returncode, printed=printed)

    def launched(self, url: str, arguments: Sequence[str]) -> subprocess.Popen[str]:
        """Start the agent like a user."""
        source = str(ROOT / "src")
        return self.start(
            (*_launch(url), *arguments), HOLDFAST_SERVER_API_KEY=KEY, PYTHONPATH=source
        )

    def shown(self, ended: Ended) -> str:
        """The output, with short paths and without colours and progress lines."""
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", ended.printed).replace("\r", "")
        for path, short in {
            self.workspace: "~/project",
            self.home: "~",
            self._folder: ".agents",
        }.items():
            plain = plain.replace(str(path), short)
        plain = _WARNING.sub("", plain)
        # a run without a terminal
        lines = [
            line.rstrip()
            for line in plain.splitlines()
            if not line.startswith("HTTPSConnectionPool")
        ]
        return "\n".join(lines).strip()


def _launch(url: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "holdfast.cli.main", "launch", "--url", url)


@contextmanager
def trial_of(agent: Agent, folder: Path) -> Iterator[Trial]:
    """A trial in a temporary folder. folder: where the agents are installed."""
    # an agent may leave a process that still writes there
    with tempfile.TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True) as scratch:
        yield Trial(agent, folder=folder, scratch=Path(scratch).resolve())


def run(agent: TaskAgent, *, folder: Path) -> str:
    """Run an agent's task; returns the transcript as Markdown.

    Raises AssertionError if the agent fails.
    """
    with trial_of(agent, folder) as trial:
        for name, text in agent.files.items():
            (trial.workspace / name).write_text(text)
        command = [trial.filled(part) for part in agent.version]
        version = trial.shown(trial.ended(trial.start(command)))
        found = re.search(r"\d+\.\d+\.\d+", version)
        title = f"## {agent.name} {found[0] if found else version}\n"
        return "\n".join([title, *_task(trial, agent)])


def _task(trial: Trial, agent: TaskAgent) -> Iterator[str]:
    with trial.server("store", key=KEY) as server:
        first = trial.ended(trial.launched(server.url, agent.command))
        _check(trial, agent, first, agent.said)
        yield _transcript(trial, ("holdfast", "launch", *agent.command), first, typed=agent.typed)
        if agent.again:
            second = trial.ended(trial.launched(server.url, agent.again))
            _check(trial, agent, second, agent.said_again)
            yield _transcript(trial, ("holdfast", "launch", *agent.again), second)
        else:
            _check(trial, agent, first, agent.said_again)
        requests = answered_requests(server)
        wrong = _with_wrong_key(trial, agent, server.url)
    if agent.note:
        yield f"{agent.note}\n"
    yield _figures(agent, requests)
    with trial.server("small", "--context", str(SMALL_CONTEXT), key=KEY) as server:
        long = trial.ended(trial.launched(server.url, agent.command), within=PATIENCE_SECONDS)
    with trial.server("stopped", key=KEY) as server:
        stopped = _stopped(trial, agent, server)
    fit = "which is enough" if agent.said in long.printed else "which its prompt does not fit"
    cases = {
        "With a wrong key": wrong,
        f"With a context of {SMALL_CONTEXT} tokens, {fit}": long,
        "Stopped with Ctrl-C during the prefill": stopped,
    }
    for case, ended in cases.items():
        lines = [line[:400] for line in trial.shown(ended).splitlines() if line.strip()]
        last = "\n".join(lines[-LAST_LINES:])
        how = (
            f"still trying after {PATIENCE_SECONDS} s" if ended.by_us else f"exit code {ended.code}"
        )
        yield f"{case}, {how}:\n\n````\n{last}\n````\n"


def _check(trial: Trial, agent: TaskAgent, ended: Ended, said: str) -> None:
    assert ended.code == 0, f"{agent.name} ended with {ended.code}:\n{ended.printed}"
    assert said in ended.printed, f"{agent.name} said:\n{ended.printed}"
    for path, text in agent.expected.items():
        file = trial.workspace / path
        written = file.read_text() if file.exists() else "no such file"
        assert written == text, f"{agent.name}, {path}: {written!r}; it said:\n{ended.printed}"


def _with_wrong_key(trial: Trial, agent: TaskAgent, url: str) -> Ended:
    """Start the agent with a wrong key, which `holdfast launch` would reject."""
    folder = trial.home / "run"
    folder.mkdir()
    target = AgentTarget(
        url=url,
        api_key="wrong",
        model="scripted",
        small_model="scripted",
        context_tokens=CONTEXT,
        folder=folder,
    )
    name, *arguments = agent.command
    setup = LAUNCHED[name].setup(target)
    for file, text in setup.files.items():
        (folder / file).write_text(text)
    return trial.ended(
        trial.start((LAUNCHED[name].program, *setup.options, *arguments), **setup.environment)
    )


def _stopped(trial: Trial, agent: TaskAgent, server: ServerProcess) -> Ended:
    """Press Ctrl-C during the prefill; afterwards, no request may be left."""
    process = trial.launched(server.url, agent.command)
    until(lambda: server.model(key=KEY)["running"] > 0, f"{agent.name} asks")
    os.killpg(process.pid, signal.SIGINT)
    ended = trial.ended(process)
    until(lambda: server.model(key=KEY)["running"] == 0, f"what {agent.name} asked ends")
    return ended


def answered_requests(server: ServerProcess) -> list[dict[str, int]]:
    """The answered requests in the server's log, by their end."""
    found = [_ANSWERED.search(line) for line in server.log().splitlines()]
    return [
        {name: int(value or 0) for name, value in match.groupdict().items()}
        for match in found
        if match
    ]


def _figures(agent: TaskAgent, requests: Sequence[Mapping[str, int]]) -> str:
    """A table of the conversation's requests.

    Raises AssertionError if a request prefilled cached tokens again.
    """
    longest = max(request["prompt_tokens"] for request in requests)
    conversation = [request for request in requests if request["prompt_tokens"] > longest / 2]
    rows = [
        "| request | prompt tokens | cached | read | new since the last | answer |",
        "|---|---|---|---|---|---|",
    ]
    known = 0
    for number, request in enumerate(conversation, 1):
        prompt, cached = request["prompt_tokens"], request["cached_tokens"]
        rows.append(
            f"| {number} | {prompt} | {cached} | {prompt - cached} | {prompt - known} | "
            f"{request['answer_tokens']} |"
        )
        if known and not agent.moves_its_prompt:
            assert cached >= known - SLACK_TOKENS, f"{agent.name} reads again:\n" + "\n".join(rows)
        known = prompt + request["answer_tokens"]
    aside = len(requests) - len(conversation)
    return "\n".join(rows) + (
        f"\n\nNot shown: {aside} short requests, for example for titles.\n" if aside else "\n"
    )


def _transcript(trial: Trial, command: Sequence[str], ended: Ended, *, typed: str = "") -> str:
    words = [
        part if part.isprintable() and " " not in part else json.dumps(part) for part in command
    ]
    line = " ".join(words).replace(str(trial.home), "~")
    lines = [f"$ {line}", *(f"> {text}" for text in typed.splitlines()), trial.shown(ended)]
    return "\n".join(["````", *lines, "````", ""])


# -- conversations in small contexts


class Compacted(Exception):
    """An answer did not fit the whole conversation."""


def turns(trial: Trial, agent: TerminalAgent, *, context_tokens: int) -> list[int]:
    """Hold the conversation; returns the prompt tokens of its requests.

    Raises Compacted, with the screen.
    """
    with trial.server(f"context-{context_tokens}", "--context", str(context_tokens)) as server:
        command = (*_launch(server.url), *agent.command)
        variables = trial.environment(PYTHONPATH=str(ROOT / "src"))
        size = {"columns": 120, "lines": 50}
        with Terminal(command, cwd=trial.workspace, variables=variables, **size) as terminal:
            terminal.wait_for(agent.awaits, seconds=START_SECONDS)
            terminal.read_for(TYPING_SECONDS)
            for question, reply in zip(TYPED, REPLIES, strict=True):
                terminal.type(question)
                terminal.read_for(TYPING_SECONDS)
                terminal.type(ENTER)
                try:
                    terminal.wait_for(re.escape(reply), seconds=ANSWER_SECONDS)
                except AssertionError:
                    asked = [line for line in server.log().splitlines() if " prompt " in line]
                    raise Compacted("\n".join([terminal.shown, *asked])) from None
                terminal.read_for(TYPING_SECONDS)
        prompts = [request["prompt_tokens"] for request in answered_requests(server)]
    longest = max(prompts)
    return [tokens for tokens in prompts if tokens > longest * 3 // 4]


def row(agent: TerminalAgent, context_tokens: int, *, folder: Path) -> str:
    """A table row."""
    with trial_of(agent, folder) as trial:
        try:
            prompts = turns(trial, agent, context_tokens=context_tokens)
            outcome = "three turns, nothing compacted"
        except Compacted as compacted:
            print(compacted, file=sys.stderr)
            prompts, outcome = [], "**compacted**"
    shown = ", ".join(f"{tokens:,}" for tokens in prompts)
    return f"| {agent.name} | {context_tokens:,} | {shown} | {outcome} |"


def main() -> None:
    """Run the named agents, or all. If all succeed, write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".agents", help="where the agents are installed"
    )
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    names, folder = options.names, options.folder.resolve()
    parts = [INTRODUCTION]
    for agent in AGENTS:
        if not names or agent.name in names:
            parts.append(run(agent, folder=folder))
            print(parts[-1], flush=True)
    table = ["| agent | context | prompts of its turns | outcome |", "|---|---|---|---|"]
    for terminal_agent in TERMINAL_AGENTS:
        for context_tokens in CONTEXTS if not names or terminal_agent.name in names else ():
            table.append(row(terminal_agent, context_tokens, folder=folder))
            print(table[-1], flush=True)
    if not names:
        PAGE.write_text("\n".join([*parts, LAST_SECTION, IN_SMALL_CONTEXTS, *table, ""]))


INTRODUCTION = """# Tested agents

`make agents` generates this page: each agent does a task with its own prompt and tools in a temporary home, against a
model whose weights produce scripted answers. Paths are shortened. To set up an agent, see [Connect your
agent](../getting-started/connect-your-agent.md).

The tables show the requests of one conversation, from the server's log. *Read* counts the tokens that the model
computed. *New since the last* counts the tokens beyond the previous prompt and answer; *read* is one more, because the
last token of an answer is sampled but not yet prefilled. The second turn runs in a new process, except aider's.

"""
IN_SMALL_CONTEXTS = """\
Each agent, started by `holdfast launch` in its interactive mode, is asked three short questions. The scripted model's
answer depends on the number of answers in the conversation, which reveals an agent that has compacted it. The prompts
are counted in tokens of the scripted model.
"""

if __name__ == "__main__":
    main()
