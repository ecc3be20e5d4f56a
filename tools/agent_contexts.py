"""Holds a conversation of three short turns with coding agents in small contexts, to see whether
they compact too early.

Run: `python -m tools.agent_contexts --folder .agents [--contexts 32768 40960 65536] [NAME …]`.

The scripted model's answer depends on the number of answers in the conversation. An agent that has
compacted it gets the first answer again, and the trial fails. If all agents succeed, the last
section of docs/reference/tested-agents.md is written.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from tools.agent_trials import REPLIES, TERMINAL_AGENTS, TYPED, TerminalAgent  # noqa: E402
from tools.terminal import ENTER, Terminal  # noqa: E402
from tools.try_agents import LAST_SECTION, Trial, answered_requests  # noqa: E402

CONTEXTS = (32_768, 40_960, 65_536)
START_SECONDS = 240.0  # opencode downloads a package first
ANSWER_SECONDS = 180.0
TYPING_SECONDS = 1.5  # faster input counts as a paste
INTRODUCTION = """\
`python -m tools.agent_contexts` generates this table: each agent, started by `holdfast launch` in its interactive mode,
is asked three short questions. The scripted model's answer depends on the number of answers in the conversation, which
reveals an agent that has compacted it. The prompts are counted in tokens of the scripted model.
"""


class Compacted(Exception):
    """An answer did not fit the whole conversation."""


def turns(trial: Trial, agent: TerminalAgent, *, context_tokens: int) -> list[int]:
    """Hold the conversation; returns the prompt tokens of its requests.

    Raises Compacted, with the screen.
    """
    with trial.server(f"context-{context_tokens}", "--context", str(context_tokens)) as server:
        command = (
            sys.executable,
            "-m",
            "holdfast.cli.main",
            "launch",
            "--url",
            server.url,
            *agent.command,
        )
        variables = trial.environment(PYTHONPATH=str(ROOT / "src"))
        with Terminal(
            command, cwd=trial.workspace, variables=variables, columns=120, lines=50
        ) as terminal:
            terminal.wait_for(agent.awaits, seconds=START_SECONDS)
            terminal.read_for(TYPING_SECONDS)
            for question, reply in zip(TYPED, REPLIES, strict=True):
                terminal.type(question)
                terminal.read_for(TYPING_SECONDS)
                terminal.type(ENTER)
                try:
                    terminal.wait_for(re.escape(reply), seconds=ANSWER_SECONDS)
                except AssertionError:
                    log = "\n".join(
                        line for line in server.log().splitlines() if " prompt " in line
                    )
                    raise Compacted(f"{terminal.shown}\n{log}") from None
                terminal.read_for(TYPING_SECONDS)
        prompts = [request["prompt_tokens"] for request in answered_requests(server)]
    longest = max(prompts)
    return [tokens for tokens in prompts if tokens > longest * 3 // 4]


def rows(
    agents: Sequence[TerminalAgent], contexts: Sequence[int], *, folder: Path
) -> Iterator[str]:
    """Table rows of all agents and contexts."""
    for agent in agents:
        for context_tokens in contexts:
            # an agent may leave a process that still writes there
            with tempfile.TemporaryDirectory(
                prefix="agent-", ignore_cleanup_errors=True
            ) as scratch:
                trial = Trial(agent, folder=folder, scratch=Path(scratch).resolve())
                try:
                    prompts = turns(trial, agent, context_tokens=context_tokens)
                    outcome = "three turns, nothing compacted"
                except Compacted as compacted:
                    print(compacted, file=sys.stderr)
                    prompts, outcome = [], "**compacted**"
            shown = ", ".join(f"{tokens:,}" for tokens in prompts)
            yield f"| {agent.name} | {context_tokens:,} | {shown} | {outcome} |"


def main() -> None:
    """Run the named agents, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".agents", help="where the agents are installed"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    chosen = [
        agent for agent in TERMINAL_AGENTS if not options.names or agent.name in options.names
    ]
    table = ["| agent | context | prompts of its turns | outcome |", "|---|---|---|---|"]
    for row in rows(chosen, options.contexts, folder=options.folder.resolve()):
        print(row, flush=True)
        table.append(row)
    if len(chosen) == len(TERMINAL_AGENTS) and tuple(options.contexts) == CONTEXTS:
        document = ROOT / "docs" / "reference" / "tested-agents.md"
        before, _, _ = document.read_text().partition(LAST_SECTION)
        document.write_text("\n".join([before + LAST_SECTION, INTRODUCTION, *table, ""]))


if __name__ == "__main__":
    main()
