"""Has coding agents do a task through Holdfast, each in a throw-away home, and writes what happened to docs/agents.md.

    python -m tools.try_agents --folder .agents [opencode aider vercel …]

The model is scripted (`tests/fakes/scripted_model.py`): its weights spell given answers, turn by turn, so that what is tried is
the agent, its prompt, its tools and the server, not a model's wit. `make agents` installs the agents into .agents first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tests.fakes.scripted_model import calls, write_scripted  # noqa: E402
from tests.fakes.server_process import ServerProcess  # noqa: E402

LIMIT_SECONDS = 240
NOTES = "milk\nThe meeting is on Thursday at ten.\nbread\n"
LINE = "The meeting is on Thursday at ten."
PROGRAM = 'def greet(name):\n    return "Hello " + name\n'
MENDED = 'def greet(name):\n    return f"Hello, {name}!"\n'


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One agent's task: what the model says, how the agent is configured and called, and what must have come of it."""

    name: str
    version: Sequence[str]  # the command that tells it
    task: str
    script: (
        Callable[[Path], Sequence[str]] | None
    )  # the model's answers, of the workspace; None: the bundled model, which has none
    command: Sequence[str]
    expected: Mapping[str, str]  # files of the workspace afterwards
    said: str  # is in what the agent prints
    files: Mapping[str, str] = field(default_factory=dict)  # of the workspace before
    home: Mapping[str, str] = field(default_factory=dict)  # of the home, `{url}` in them is the server's
    without_tools: str | None = None
    said_before: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def _file_loop(read: str, write: str, *, path_key: str) -> Callable[[Path], Sequence[str]]:
    return lambda workspace: (
        calls((read, {path_key: str(workspace / "notes.txt")}), text="I read the notes first."),
        calls((write, {path_key: str(workspace / "answer.txt"), "content": LINE + "\n"})),
        "The second line is now in answer.txt.",
    )


OPENCODE_CONFIG = {
    "$schema": "https://opencode.ai/config.json",
    "provider": {
        "holdfast": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Holdfast",
            "options": {"baseURL": "{url}/v1"},
            "models": {"scripted": {"name": "scripted", "tool_call": True, "limit": {"context": 131072, "output": 4096}}},
        }
    },
    "model": "holdfast/scripted",
    "share": "disabled",
    "autoupdate": False,
}

VERCEL = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText, stepCountIs, tool } from 'ai';
import { readFileSync, writeFileSync } from 'node:fs';
import { z } from 'zod';
const holdfast = createOpenAICompatible({ name: 'holdfast', baseURL: '{url}/v1', includeUsage: true });
const tools = {
  read_file: tool({ description: 'Read a file.', inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => readFileSync(path, 'utf8') }),
  write_file: tool({ description: 'Write a file.', inputSchema: z.object({ path: z.string(), content: z.string() }),
    execute: async ({ path, content }) => { writeFileSync(path, content); return 'written'; } }),
};
const asked = { model: holdfast('scripted'), tools, stopWhen: stepCountIs(5), prompt: process.argv[2] };
const whole = await generateText(asked);
const show = (steps) => steps.flatMap(s => s.toolCalls.map(c => `${c.toolName} ${JSON.stringify(c.input)}`));
console.log('whole:', show(whole.steps), whole.text, whole.finishReason);
const stream = streamText(asked);
let text = '';
for await (const part of stream.textStream) text += part;
const steps = await stream.steps;
console.log('streamed:', show(steps), text, await stream.finishReason);
const usage = await stream.totalUsage;
console.log('usage:', usage.inputTokens > 0 && usage.outputTokens > 0);
const same = JSON.stringify(show(whole.steps)) === JSON.stringify(show(steps)) && text.endsWith(whole.text);
console.log(same ? 'streamed = whole' : 'DIFFERENT');
"""

BUNDLED = """
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, streamText, stepCountIs, tool } from 'ai';
import { z } from 'zod';
const holdfast = createOpenAICompatible({ name: 'holdfast', baseURL: '{url}/v1', includeUsage: true });
const tools = { get_weather: tool({ description: 'Get the weather of a city.', inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => 'sunny, 21 degrees' }) };
const asked = { model: holdfast('holdfast-demo'), tools, temperature: 0, stopWhen: stepCountIs(3), prompt: process.argv[2] };
const show = (steps) => JSON.stringify(steps.flatMap(s => s.toolCalls.map(c => `${c.toolName} ${JSON.stringify(c.input)}`)));
const whole = await generateText(asked);
console.log('whole:', show(whole.steps), whole.text, whole.finishReason);
const stream = streamText(asked);
let text = '';
for await (const part of stream.textStream) text += part;
console.log('streamed:', show(await stream.steps), text, await stream.finishReason);
const sum = { model: holdfast('holdfast-demo'), temperature: 0, prompt: 'What is 17 plus 25?' };
const thought = await generateText(sum);
console.log('whole:', JSON.stringify(thought.reasoningText), thought.text);
let reasoning = '', said = '';
for await (const part of streamText(sum).fullStream) {
  if (part.type === 'reasoning-delta') reasoning += part.text;
  if (part.type === 'text-delta') said += part.text;
}
console.log('streamed:', JSON.stringify(reasoning), said);
const same = reasoning === thought.reasoningText && said === thought.text && text === whole.text;
console.log(same ? 'streamed = whole' : 'DIFFERENT');
"""

AIDER_EDIT = """I make the greeting friendlier.

greet.py
```python
<<<<<<< SEARCH
    return "Hello " + name
=======
    return f"Hello, {name}!"
>>>>>>> REPLACE
```
"""

AGENTS = (
    Agent(
        name="opencode",
        version=("{folder}/node_modules/.bin/opencode", "--version"),
        task="Copy the second line of notes.txt into a new file answer.txt.",
        script=_file_loop("read", "write", path_key="filePath"),
        files={"notes.txt": NOTES},
        home={".config/opencode/opencode.json": json.dumps(OPENCODE_CONFIG, indent=2)},
        command=("{folder}/node_modules/.bin/opencode", "run", "--model", "holdfast/scripted", "{task}"),
        expected={"answer.txt": LINE + "\n"},
        said="The second line is now in answer.txt.",
        without_tools="Second line of the notes",
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    ),
    Agent(
        name="aider",
        version=("{folder}/aider/bin/aider", "--version"),
        task="Make the greeting friendlier.",
        script=lambda workspace: (AIDER_EDIT,),
        files={"greet.py": PROGRAM},
        command=(
            *("{folder}/aider/bin/aider", "--model", "openai/scripted", "--edit-format", "diff", "--yes-always", "--no-git"),
            *("--no-check-update", "--no-show-model-warnings", "--no-pretty", "--analytics-disable", "--map-tokens", "0"),
            *("--message", "{task}", "greet.py"),
        ),
        expected={"greet.py": MENDED},
        said="Applied edit to greet.py",
        said_before=4,
        environment={"OPENAI_API_BASE": "{url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Agent(
        name="Vercel AI SDK",
        version=("node", "-p", "require('{folder}/node_modules/ai/package.json').version"),
        task="Copy the second line of notes.txt into a new file answer.txt.",
        script=_file_loop("read_file", "write_file", path_key="path"),
        files={"notes.txt": NOTES},
        home={"loop.mjs": VERCEL},
        command=("node", "{home}/loop.mjs", "{task}"),
        expected={"answer.txt": LINE + "\n"},
        said="streamed = whole",
    ),
    Agent(
        name="Vercel AI SDK, bundled model",
        version=("node", "-p", "require('{folder}/node_modules/ai/package.json').version"),
        task="What is the weather in Oslo?",
        script=None,
        home={"bundled.mjs": BUNDLED},
        command=("node", "{home}/bundled.mjs", "{task}"),
        expected={},
        said="streamed = whole",
    ),
)


def run(agent: Agent, *, folder: Path) -> str:
    """Have an agent do its task; returns the transcript as Markdown. Raises AssertionError where it does not succeed."""
    with tempfile.TemporaryDirectory(prefix="agent-") as scratch:
        home, workspace, model = (Path(scratch).resolve() / name for name in ("home", "work", "model"))
        for path, text in agent.files.items():
            _write(workspace / path, text)
        served: tuple[str, ...] = ()
        if agent.script is not None:
            write_scripted(model, agent.script(workspace), without_tools=agent.without_tools, said_before=agent.said_before)
            served = (str(model), "--name", "scripted")
        server = ServerProcess(*served, "--set", f"store.folder={scratch}/store")
        try:
            server.wait_ready()
            values = {"url": server.url, "home": str(home), "folder": str(folder), "task": agent.task}
            for path, text in agent.home.items():
                _write(home / path, _filled(text, values))
            home.mkdir(exist_ok=True)
            workspace.mkdir(exist_ok=True)
            (home / "node_modules").symlink_to(folder / "node_modules")
            environment = _environment(home) | {name: _filled(value, values) for name, value in agent.environment.items()}
            version = _output([_filled(part, values) for part in agent.version], workspace, environment).strip()
            command = [_filled(part, values) for part in agent.command]
            printed = _output(command, workspace, environment)
            requests = _requests(server)
        finally:
            server.stop()
        for path, text in agent.expected.items():
            assert (workspace / path).exists(), f"{agent.name} made no {path}; it said:\n{printed}\n{server.log()}"
            assert (workspace / path).read_text() == text, f"{agent.name} wrote {(workspace / path).read_text()!r}\n{printed}"
        assert agent.said in printed, f"{agent.name} said:\n{printed}\n{server.log()}"
        shown = _plain(printed).replace(str(home), "~").replace(str(workspace), "~/project").replace(str(folder), ".agents")
        call = " ".join(part if part.isprintable() and " " not in part else json.dumps(part) for part in command)
        call = call.replace(str(folder), ".agents").replace(str(home), "~")
        version = _plain(version).removeprefix(agent.name).strip()
        return f"## {agent.name} {version}\n\n{_setup(agent)}````\n$ {call}\n{shown.strip()}\n````\n\n{requests}\n"


def _setup(agent: Agent) -> str:
    """What a user has to write to point the agent at the server."""
    address = {"url": "http://127.0.0.1:8321"}
    files = [f"`~/{path}`:\n\n````\n{_filled(text, address).strip()}\n````\n\n" for path, text in agent.home.items()]
    variables = " ".join(f"{name}={_filled(value, address)}" for name, value in agent.environment.items())
    return "".join(files) + (f"Environment: `{variables}`\n\n" if variables else "")


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text


def _environment(home: Path) -> dict[str, str]:
    """Nothing of the user's own but the way to programs: no keys, no configuration."""
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TERM") if name in os.environ}
    return {**kept, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "CI": "1", "NO_COLOR": "1"}


def _output(command: Sequence[str], workspace: Path, environment: Mapping[str, str]) -> str:
    done = subprocess.run(
        command,
        cwd=workspace,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout}"
    return done.stdout


def _plain(text: str) -> str:
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
    return "\n".join(line for line in shown.splitlines() if not line.startswith("HTTPSConnectionPool"))  # tried without a network


def _requests(server: ServerProcess) -> str:
    """A line of what the server counted: how much of the prompts was read, how much found."""
    totals: dict[str, Any] = {}
    for line in httpx.get(f"{server.url}/metrics").text.splitlines():
        if line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        for wanted in (
            "request_prompt_tokens_total",
            "request_cached_tokens_total",
            "completion_tokens_total",
            "accept_seconds_count",
        ):
            if name.split("{")[0].endswith(wanted):
                totals[wanted] = totals.get(wanted, 0) + int(float(value))
    return (
        f"{totals['accept_seconds_count']} requests, {totals['request_prompt_tokens_total']} tokens of prompts, of which "
        f"{totals['request_cached_tokens_total']} were not read again; {totals['completion_tokens_total']} tokens written."
    )


def main() -> None:
    """Try the agents that are named, or all, and write docs/agents.md when all have been tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / ".agents", help="where the agents are installed")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [agent for agent in AGENTS if not options.names or agent.name in options.names]
    parts = []
    for agent in chosen:
        parts.append(run(agent, folder=options.folder.resolve()))
        print(parts[-1])
    if len(chosen) == len(AGENTS):
        (ROOT / "docs" / "agents.md").write_text(INTRODUCTION + "\n".join(parts))


INTRODUCTION = """# Agents that were tried

What `make agents` printed: each agent has done a task with its own prompt and tools, in a throw-away home, against a model
whose weights spell a script, or, where it says so, the bundled one. Paths are shortened.

"""

if __name__ == "__main__":
    main()
