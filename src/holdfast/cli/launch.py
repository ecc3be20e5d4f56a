"""`holdfast launch`: starts a coding agent that is configured for a running server.

Agents are configured with variables, options, and files in a temporary folder
(`holdfast/agents.py`). Their own configuration is never changed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Annotated, TypeAlias
from urllib.parse import urlsplit

import typer

from holdfast.agents import AGENTS, AgentSetup, AgentTarget, CodingAgent, shell_text
from holdfast.cli.output import FAILED, complain, plain_errors
from holdfast.cli.server_client import (
    ApiKey,
    KeyRefused,
    NotServed,
    ServerClient,
    ServerFailed,
    Url,
    client_of,
    is_loopback,
)
from holdfast.errors import HoldfastError
from holdfast.models.download import is_demo

_FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
# the terminal sends these signals to the agent, too
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGQUIT)
_TASK_TOKENS = 4_000  # room for a task, besides the agent's own prompt
# for agents on Node, and for Codex
_CERTIFICATE_VARIABLES = ("NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE")
_PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")
_PROGRAM_NOT_FOUND = 127  # exit code if the program does not exist
_REAL_MODEL = "mlx-community/Qwen3-4B-4bit"  # a small model with 40,960 tokens of context
# options that only `launch` has; an agent may have options named like the other ones
_OPTIONS_OF_LAUNCH_ONLY = ("--allow-demo", "--small-model")


Agent: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="AGENT",
        show_default=False,
        help="One of: " + ", ".join(AGENTS) + ".",
        autocompletion=lambda: list(AGENTS),
    ),
]


class LaunchFailed(HoldfastError):
    """The agent cannot be started with these arguments."""


SmallModel = Annotated[
    str | None,
    typer.Option(
        "--small-model",
        metavar="ID",
        help="For the agent's titles and summaries; default: same as --model.",
    ),
]


def launch(
    agent: Agent = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS...", help="Arguments passed to the agent."),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", metavar="ID", help="Id of the model; default: the server's first one."
        ),
    ] = None,
    small_model: SmallModel = None,
    allow_demo: Annotated[
        bool, typer.Option("--allow-demo", help="Allow the bundled demonstration model.")
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Show the command instead of running it.")
    ] = False,
) -> None:
    """Start a coding agent on a running server.

    The agent's own configuration is not changed. Everything after AGENT is passed to the agent.
    """
    if not agent:
        _list_agents()
        return
    options = {
        "--url": url,
        "--api-key": "KEY" if api_key else None,
        "--model": model,
        "--small-model": small_model,
    }
    with plain_errors():
        chosen_agent = _chosen_agent(agent, arguments or [])
        program = chosen_agent.program if print_only else _installed_program(chosen_agent)
        with (
            client_of(url, api_key) as server,
            tempfile.TemporaryDirectory(prefix=f"holdfast-{agent}-") as folder,
        ):
            target = _target(server, models=(model, small_model), folder=Path(folder))
            _warn_of_small_context(chosen_agent, target)
            setup = chosen_agent.setup(target)
            command = [program, *setup.options, *_agent_arguments(arguments or [])]
            if print_only:
                typer.echo(shell_text(command, setup, secret=target.api_key))
                return
            complain(_server_line(target, server.pid))
            _check_demo(target, is_allowed=allow_demo)
            environment = {
                **_no_proxy_variables(target.url, ignores_no_proxy=chosen_agent.ignores_no_proxy),
                **_certificate_variables(target, certificate=server.certificate),
                **setup.environment,
            }
            code = _run_agent(command, setup, target, environment=environment)
        if _is_interactive():
            complain(_resume_line(agent, options, allow_demo=allow_demo))
    raise typer.Exit(code)


def _installed_program(agent: CodingAgent) -> str:
    """The path of the agent's program. Exits with a message if it is not installed."""
    program = shutil.which(agent.program)
    if program is None:
        complain(
            f"{agent.title} is not installed: there is no `{agent.program}`. To get it: "
            f"{agent.install}"
        )
        raise typer.Exit(_PROGRAM_NOT_FOUND)
    return program


def _agent_arguments(arguments: Sequence[str]) -> Sequence[str]:
    """Return the agent's arguments, without the `--` that other launchers need before them."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _list_agents() -> None:
    """Print all agents, and where each is installed or how to install it."""
    for name, agent in AGENTS.items():
        location = shutil.which(agent.program) or f"not installed: {agent.install}"
        typer.echo(f"{name:<10}{agent.title:<13}{location}")
    typer.echo("\nholdfast launch NAME starts one. For other clients see docs/guides/clients.md")


def _chosen_agent(name: str, arguments: Sequence[str]) -> CodingAgent:
    """Return the agent with this name.

    Raises LaunchFailed if there is none, or if an option of `launch` follows the name.
    """
    if name not in AGENTS:
        similar_names = get_close_matches(name, AGENTS, n=1)
        hint = f"The agents are: {', '.join(AGENTS)}; for others see docs/guides/clients.md"
        if similar_names:
            hint = f"Did you mean {similar_names[0]}?"
        raise LaunchFailed(f"there is no agent {name}. {hint}")
    options = [argument.partition("=")[0] for argument in arguments]
    if options[:1] == ["--"]:
        return AGENTS[name]
    misplaced = [option for option in options if option in _OPTIONS_OF_LAUNCH_ONLY]
    if options[:1] == ["--url"]:
        misplaced = ["--url"]
    if misplaced:
        raise LaunchFailed(
            f"put launch's options before the agent's name: holdfast launch {misplaced[0]} … {name}"
        )
    return AGENTS[name]


def _target(
    server: ServerClient, *, models: tuple[str | None, str | None], folder: Path
) -> AgentTarget:
    """Choose the server's models for the agent. Raises ServerFailed with a hint."""
    try:
        model = server.model(models[0] or "")
        small_model = server.model(models[1] or model["id"])
    except (KeyRefused, NotServed):
        raise
    except ServerFailed as error:
        raise ServerFailed(_error_with_hint(str(error), server)) from None
    return AgentTarget(
        url=server.url,
        api_key=server.api_key,
        model=model["id"],
        small_model=small_model["id"],
        context_tokens=model.get("max_model_len"),
        can_see="image" in model.get("architecture", {}).get("input_modalities", ()),
        folder=folder.resolve(),
    )


def _error_with_hint(error: str, server: ServerClient) -> str:
    """Append what the user can do to an error."""
    if "not trusted" in error or "speak TLS" in error:
        return f"{error}."
    hint = "Is that a Holdfast server? Use --url URL for another one"
    if "no answer from" in error:
        hint = (
            "Start one in another terminal: holdfast serve. If it runs elsewhere: holdfast launch "
            "--url URL …"
        )
        if "Connection refused" in error:
            error = f"no server is running at {server.url}"
    stop = "" if error.endswith((".", "?", "!", "…")) else "."
    return f"{error}{stop} {hint}"


def _server_line(target: AgentTarget, pid: int | None) -> str:
    """Name the server and model that the agent uses, because the user may expect other ones."""
    facts = [f"model {target.model}"]
    if target.context_tokens is not None:
        facts.append(f"context {target.context_tokens:,} tokens")
    if pid is not None:
        facts.append(f"pid {pid}")
    return f"using the server at {target.url} ({', '.join(facts)})"


def _check_demo(target: AgentTarget, *, is_allowed: bool) -> None:
    """Ask the user before an agent uses the bundled model, which cannot do an agent's work.

    Raises LaunchFailed if nobody can be asked, or Exit if the user declines.
    """
    if is_allowed or not is_demo(target.model):
        return
    warning = (
        f"{target.model} is a demonstration model with three million parameters and cannot do an "
        f"agent's work. Serve a real model, for example: holdfast serve {_REAL_MODEL}"
    )
    if not _is_interactive():
        raise LaunchFailed(f"{warning}. To start the agent anyway: holdfast launch --allow-demo …")
    complain(warning)
    if not typer.confirm("Start it anyway?", err=True):
        raise typer.Exit(FAILED)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _resume_line(name: str, options: Mapping[str, str | None], *, allow_demo: bool) -> str:
    """Return the line that says how to continue the conversation later.

    The command that the agent itself prints refers to deleted files.
    """
    command_words = ["holdfast launch"]
    for option, value in options.items():
        if value:
            command_words += [option, shlex.quote(value)]
    if allow_demo:
        command_words.append("--allow-demo")
    command = " ".join([*command_words, name])
    commands = [f"{command} {resume}" for resume in AGENTS[name].resume]
    return f"to continue this conversation: {' or '.join(commands)}"


def _certificate_variables(target: AgentTarget, *, certificate: str) -> dict[str, str]:
    """Variables that make the agent trust the same certificates as this command, and the server's
    own.
    """
    certificate_files = [certificate] if certificate else []
    # Node ignores SSL_CERT_FILE, which this command uses
    if target.url.startswith("https:") and os.environ.get("SSL_CERT_FILE"):
        certificate_files.append(os.environ["SSL_CERT_FILE"])
    if not certificate_files:
        return {}
    variables = {}
    for name in _CERTIFICATE_VARIABLES:
        paths = dict.fromkeys([os.environ.get(name, ""), *map(os.path.abspath, certificate_files)])
        existing = [Path(path) for path in paths if path and os.path.isfile(path)]
        variables[name] = str(existing[0]) if existing else os.path.abspath(certificate_files[-1])
        if len(existing) > 1:
            joined = target.folder / f"{name.lower()}.pem"
            joined.write_text("\n".join(path.read_text() for path in existing))
            variables[name] = str(joined)
    return variables


def _warn_of_small_context(agent: CodingAgent, target: AgentTarget) -> None:
    """Warn if the context is small: the agent would compact the conversation before every turn, or
    forever.
    """
    if target.context_tokens is None:
        return
    needed = ceil((agent.own_tokens + _TASK_TOKENS) / agent.usable_share)
    if target.context_tokens < needed:
        complain(
            f"{target.model} has a {target.context_tokens:,}-token context, but {agent.title} "
            f"needs at least {needed:,}: serve it with a longer --context, or serve a different "
            "model"
        )


def _no_proxy_variables(url: str, *, ignores_no_proxy: bool) -> dict[str, str]:
    """Variables that keep the agent from using a proxy for a server on this machine.

    ignores_no_proxy: whether the agent ignores NO_PROXY; if so, its proxy variables are removed.
    """
    if not is_loopback(url):
        return {}
    if ignores_no_proxy:
        return {name: "" for name in _PROXY_VARIABLES if os.environ.get(name)}
    existing_hosts = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    host = urlsplit(url).hostname or ""
    hosts = f"{existing_hosts},{host}" if existing_hosts else host
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _run_agent(
    command: Sequence[str],
    setup: AgentSetup,
    target: AgentTarget,
    *,
    environment: Mapping[str, str],
) -> int:
    """Run the agent in this terminal. environment: variables to add to those of this process.

    Returns the agent's exit code, or 128 + N if signal N ended it.
    """
    for name, text in setup.files.items():
        (target.folder / name).write_text(text)
    processes: list[subprocess.Popen[bytes]] = []  # the agent, once it has started
    early_signals: list[int] = []  # signals that arrived before the agent's process was known

    def forward(number: int, _frame: object) -> None:
        if not processes:
            early_signals.append(number)
        for process in processes:
            process.send_signal(number)

    # SIG_IGN would be inherited by the agent
    handlers = dict.fromkeys(_FORWARDED_SIGNALS, forward) | dict.fromkeys(
        _IGNORED_SIGNALS, lambda *_: None
    )
    handlers_before = {
        number: signal.signal(number, handler) for number, handler in handlers.items()
    }
    try:
        processes.append(subprocess.Popen(command, env={**os.environ, **environment}))
        for number in early_signals:
            processes[0].send_signal(number)
        code = processes[0].wait()
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code
