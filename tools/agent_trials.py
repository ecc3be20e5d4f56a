"""The trials of agents: tasks, the answers of the scripted model, and the files that must result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.scripted_model import calls

NOTES = "milk\nThe meeting is on Thursday at ten.\nbread\n"
LINE = "The meeting is on Thursday at ten."
PROGRAM = 'def greet(name):\n    return "Hello " + name\n'
MENDED = 'def greet(name):\n    return f"Hello, {name}!"\n'
COPY = "Copy the second line of notes.txt into a new file answer.txt."
COPIED = "The second line is now in answer.txt."
NEXT = "What is the third line?"
BREAD = "It says bread."


@dataclass(frozen=True, kw_only=True)
class Agent:
    """One agent's task: the answers of the model, the command of the agent, and the required result.

    `{home}`, `{folder}` (where it is installed) and `{url}` in its texts are filled in.
    """

    name: str
    version: Sequence[str]  # the command that tells it
    script: (
        Callable[[Path], Sequence[str]] | None
    )  # the model's answers, of the workspace; None: the bundled model, which has none
    command: Sequence[str]
    said: str  # is in what the agent prints
    expected: Mapping[str, str] = field(default_factory=dict)  # files of the workspace afterwards
    files: Mapping[str, str] = field(default_factory=dict)  # of the workspace before
    home: Mapping[str, str] = field(default_factory=dict)  # files of the home
    without_tools: str | None = None
    said_before: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class LaunchedAgent(Agent):
    """One that `holdfast launch` starts: `command` is its name and its arguments."""

    programs: str  # the folder of its program
    # arguments that continue the conversation in a new process; none: `command` has all turns
    again: Sequence[str] = ()
    said_again: str
    typed: str = ""  # to its standard input
    moves_its_prompt: bool = False  # its next request does not begin with its last one
    note: str = ""  # what the trial leaves out, and why


@dataclass(frozen=True, kw_only=True)
class TerminalAgent(Agent):
    """One in its interactive mode, started by `holdfast launch`: a person types TYPED, and the
    script answers REPLIES.
    """

    programs: str  # the folder of its program
    awaits: str  # a pattern that is on the screen when it takes what is typed


def _copying(read: tuple[str, dict[str, Any]], write: tuple[str, dict[str, Any]]) -> Sequence[str]:
    return (calls(read, text="I read the notes first."), calls(write), COPIED, BREAD)


def _file_loop(read: str, write: str, *, path_key: str) -> Callable[[Path], Sequence[str]]:
    return lambda workspace: _copying(
        (read, {path_key: str(workspace / "notes.txt")}),
        (write, {path_key: str(workspace / "answer.txt"), "content": LINE + "\n"}),
    )


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

_NPM = "{folder}/node_modules/.bin"
_CODEX = ("--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check")
_AIDER = (
    *(
        "--edit-format",
        "diff",
        "--yes-always",
        "--no-git",
        "--no-check-update",
        "--no-pretty",
        "--no-fancy-input",
    ),
    *("--analytics-disable", "--map-tokens", "0"),
)

AGENTS: Sequence[Agent] = (
    LaunchedAgent(
        name="Claude Code",
        programs=_NPM,
        version=(f"{_NPM}/claude", "--version"),
        script=_file_loop("Read", "Write", path_key="file_path"),
        files={"notes.txt": NOTES},
        command=("claude", "-p", "--allowedTools", "Read,Write", "--", COPY),
        again=("claude", "-p", "-c", NEXT),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=BREAD,
        without_tools="Second line of the notes",
    ),
    LaunchedAgent(
        name="Codex",
        programs=_NPM,
        version=(f"{_NPM}/codex", "--version"),
        script=lambda _: _copying(
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": "sed -n 2p notes.txt > answer.txt"}),
        ),
        files={"notes.txt": NOTES},
        command=("codex", "exec", *_CODEX, COPY),
        again=("codex", "exec", "resume", "--last", *_CODEX, NEXT),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=BREAD,
    ),
    LaunchedAgent(
        name="opencode",
        programs=_NPM,
        version=(f"{_NPM}/opencode", "--version"),
        script=_file_loop("read", "write", path_key="filePath"),
        files={"notes.txt": NOTES},
        command=("opencode", "run", COPY),
        again=("opencode", "run", "--continue", NEXT),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=BREAD,
        without_tools="Second line of the notes",
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    ),
    LaunchedAgent(
        name="pi",
        programs=_NPM,
        version=(f"{_NPM}/pi", "--version"),
        script=_file_loop("read", "write", path_key="path"),
        files={"notes.txt": NOTES},
        command=("pi", "-p", COPY),
        again=("pi", "-p", "--continue", NEXT),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=BREAD,
        environment={"PI_OFFLINE": "1"},
    ),
    LaunchedAgent(
        name="Cline",
        programs=_NPM,
        version=(f"{_NPM}/cline", "--version"),
        script=lambda workspace: _copying(
            ("read_files", {"files": [{"path": str(workspace / "notes.txt")}]}),
            ("editor", {"path": str(workspace / "answer.txt"), "new_text": LINE + "\n"}),
        ),
        files={"notes.txt": NOTES},
        command=("cline", COPY),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=COPIED,
        note="Only one turn is tried: Cline continues a conversation (`--id`) only in its terminal "
        "interface, even with a prompt on the command line.",
    ),
    LaunchedAgent(
        name="aider",
        programs="{folder}/aider/bin",
        version=("{folder}/aider/bin/aider", "--version"),
        script=lambda _: (AIDER_EDIT, "Ok.", "It greets by name."),  # the second one it says itself
        files={"greet.py": PROGRAM},
        command=("aider", *_AIDER, "greet.py"),
        typed="Make the greeting friendlier.\nWhat does it do now?\n",
        expected={"greet.py": MENDED},
        said="Applied edit to greet.py",
        said_again="It greets by name.",
        said_before=4,
        moves_its_prompt=True,
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
    Agent(
        name="Vercel AI SDK",
        version=("node", "-p", "require('{folder}/node_modules/ai/package.json').version"),
        script=_file_loop("read_file", "write_file", path_key="path"),
        files={"notes.txt": NOTES},
        home={"loop.mjs": VERCEL},
        command=("node", "{home}/loop.mjs", COPY),
        expected={"answer.txt": LINE + "\n"},
        said="streamed = whole",
    ),
    Agent(
        name="Vercel AI SDK, bundled model",
        version=("node", "-p", "require('{folder}/node_modules/ai/package.json').version"),
        script=None,
        home={"bundled.mjs": BUNDLED},
        command=("node", "{home}/bundled.mjs", "What is the weather in Oslo?"),
        said="streamed = whole",
    ),
)

TYPED = ("First question, please.", "Second question, please.", "Third question, please.")
REPLIES = ("The first reply is alpha.", "The second reply is bravo.", "The third reply is charlie.")
_CLAUDE_HOME = """{
  "hasCompletedOnboarding": true,
  "theme": "dark",
  "projects": {"{workspace}": {"hasTrustDialogAccepted": true, "hasCompletedProjectOnboarding": true}}
}
"""
_CODEX_HOME = """check_for_update_on_startup = false
[projects."{workspace}"]
trust_level = "trusted"
"""
_QWEN_HOME = """{"general": {"disableAutoUpdate": true}, "security": {"folderTrust": {"enabled": false}}}
"""

TERMINAL_AGENTS: Sequence[TerminalAgent] = tuple(
    TerminalAgent(
        name=name,
        programs=_NPM,
        version=(f"{_NPM}/{program}", "--version"),
        script=lambda _: REPLIES,
        command=(program,),
        said=REPLIES[-1],
        without_tools="Three questions",
        said_before=said_before,
        awaits=awaits,
        home=home,
        environment={"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"},
    )
    for name, program, awaits, said_before, home in (
        ("Claude Code", "claude", "❯", 0, {".claude.json": _CLAUDE_HOME}),
        ("Codex", "codex", "Ask Codex", 0, {".codex/config.toml": _CODEX_HOME}),
        ("opencode", "opencode", "Ask anything", 0, {}),
        ("Qwen Code", "qwen", "Type your message", 1, {".qwen/settings.json": _QWEN_HOME}),
    )
)
