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
    """An agent that `holdfast launch` starts: the answers of the model, the arguments of `launch`, and
    the required result.

    `{folder}` (where it is installed) and `{workspace}` in its texts are filled in.
    """

    name: str
    version: Sequence[str]  # the command that tells it
    programs: str  # the folder of its program
    script: Callable[[Path], Sequence[str]]  # the model's answers, of the workspace
    command: Sequence[str]
    said: str  # is in what the agent prints
    without_tools: str | None = None
    said_before: int = 0
    home: Mapping[str, str] = field(default_factory=dict)  # files of the home
    environment: Mapping[str, str] = field(default_factory=dict)
    typed: str = ""  # to its standard input


@dataclass(frozen=True, kw_only=True)
class TaskAgent(Agent):
    """One with a task and a second turn. files: of the workspace before, `expected`: afterwards."""

    files: Mapping[str, str]
    expected: Mapping[str, str]
    # arguments that continue the conversation in a new process; none: `command` has all turns
    again: Sequence[str] = ()
    said_again: str
    moves_its_prompt: bool = False  # its next request does not begin with its last one
    note: str = ""  # what the trial leaves out, and why


@dataclass(frozen=True, kw_only=True)
class TerminalAgent(Agent):
    """One in its interactive mode: a person types TYPED, and the script answers REPLIES."""

    awaits: str  # a pattern that is on the screen when it takes what is typed


def _copying(read: tuple[str, dict[str, Any]], write: tuple[str, dict[str, Any]]) -> Sequence[str]:
    return (calls(read, text="I read the notes first."), calls(write), COPIED, BREAD)


def _file_loop(read: str, write: str, *, path_key: str) -> Callable[[Path], Sequence[str]]:
    return lambda workspace: _copying(
        (read, {path_key: str(workspace / "notes.txt")}),
        (write, {path_key: str(workspace / "answer.txt"), "content": LINE + "\n"}),
    )


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
    "--edit-format diff --yes-always --no-git --no-check-update --no-pretty --no-fancy-input "
    "--analytics-disable --map-tokens 0"
).split()
_OPENCODE = {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}


def _copier(name: str, command: Sequence[str], again: Sequence[str], **more: Any) -> TaskAgent:
    """An agent that copies a line of a file, and is asked about another one."""
    return TaskAgent(
        name=name,
        programs=_NPM,
        version=(f"{_NPM}/{command[0]}", "--version"),
        files={"notes.txt": NOTES},
        command=(*command, COPY),
        again=(*again, NEXT) if again else (),
        expected={"answer.txt": LINE + "\n"},
        said=COPIED,
        said_again=BREAD if again else COPIED,
        **more,
    )


AGENTS: Sequence[TaskAgent] = (
    _copier(
        "Claude Code",
        ("claude", "-p", "--allowedTools", "Read,Write", "--"),
        ("claude", "-p", "-c"),
        script=_file_loop("Read", "Write", path_key="file_path"),
        without_tools="Second line of the notes",
    ),
    _copier(
        "Codex",
        ("codex", "exec", *_CODEX),
        ("codex", "exec", "resume", "--last", *_CODEX),
        script=lambda _: _copying(
            ("exec_command", {"cmd": "cat notes.txt"}),
            ("exec_command", {"cmd": "sed -n 2p notes.txt > answer.txt"}),
        ),
    ),
    _copier(
        "opencode",
        ("opencode", "run"),
        ("opencode", "run", "--continue"),
        script=_file_loop("read", "write", path_key="filePath"),
        without_tools="Second line of the notes",
        environment=_OPENCODE,
    ),
    _copier(
        "pi",
        ("pi", "-p"),
        ("pi", "-p", "--continue"),
        script=_file_loop("read", "write", path_key="path"),
        environment={"PI_OFFLINE": "1"},
    ),
    _copier(
        "Cline",
        ("cline",),
        (),
        script=lambda workspace: _copying(
            ("read_files", {"files": [{"path": str(workspace / "notes.txt")}]}),
            ("editor", {"path": str(workspace / "answer.txt"), "new_text": LINE + "\n"}),
        ),
        note="Only one turn is tried: Cline continues a conversation (`--id`) only in its terminal "
        "interface, even with a prompt on the command line.",
    ),
    TaskAgent(
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
        environment=_OPENCODE,
    )
    for name, program, awaits, said_before, home in (
        ("Claude Code", "claude", "❯", 0, {".claude.json": _CLAUDE_HOME}),
        ("Codex", "codex", "Ask Codex", 0, {".codex/config.toml": _CODEX_HOME}),
        ("opencode", "opencode", "Ask anything", 0, {}),
        ("Qwen Code", "qwen", "Type your message", 1, {".qwen/settings.json": _QWEN_HOME}),
    )
)
