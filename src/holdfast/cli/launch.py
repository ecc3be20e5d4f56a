"""`holdfast launch`: runs a coding agent that is configured for a running server."""

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
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from holdfast.cli.agents import AGENTS, AgentSetup, AgentTarget, CodingAgent
from holdfast.cli.output import complain, plain_errors
from holdfast.cli.server_command import ApiKey, ServerAddress, Url, address_of
from holdfast.errors import HoldfastError

if TYPE_CHECKING:
    pass

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_IGNORED = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends them to the agent, too
_TASK_TOKENS = 4_000  # for a task, in addition to the agent's own prompt
_CERTIFICATE_VARIABLES = ("NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE")  # agents on Node; Codex
_NOT_FOUND = 127  # exit codes
_DECLINED = 1
_REAL_MODEL = "mlx-community/Qwen3-4B-4bit"  # small, with 40,960 tokens of context
_OPTIONS_OF_NO_AGENT = ("--allow-demo", "--small-model")  # agents may have the others


class LaunchFailed(HoldfastError):
    """The agent cannot be started with these arguments."""


def launch(
    agent: Annotated[
        str,
        typer.Argument(
            metavar="AGENT",
            show_default=False,
            help="One of: " + ", ".join(AGENTS) + ".",
            autocompletion=lambda: list(AGENTS),
        ),
    ] = "",
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS...", help="Arguments passed to the agent."),
    ] = None,
    url: Url = None,
    api_key: ApiKey = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID", help="The model; default: the server's first."),
    ] = None,
    small_model: Annotated[
        str | None,
        typer.Option(
            "--small-model",
            metavar="ID",
            help="For the agent's titles and summaries; default: same as --model.",
        ),
    ] = None,
    allow_demo: Annotated[
        bool, typer.Option("--allow-demo", help="Allow the bundled demonstration model.")
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Show the command instead of running it.")
    ] = False,
) -> None:
    """Start a coding agent on a running server.

    It does not change the agent's own configuration. Everything after AGENT is passed to the agent.
    """
    if not agent:
        _list_agents()
        return
    arguments = arguments or []
    with plain_errors():
        chosen = _chosen_agent(agent, arguments)
        program = shutil.which(chosen.program)
        if program is None and not print_only:
            complain(
                f"{chosen.title} is not installed: there is no `{chosen.program}`. To get it: "
                f"{chosen.install}"
            )
            raise typer.Exit(_NOT_FOUND)
        address = address_of(url, api_key)
        with tempfile.TemporaryDirectory(prefix=f"holdfast-{agent}-") as folder:
            target = _target(address, models=(model, small_model), folder=Path(folder))
            _warn_of_small_context(chosen, target)
            setup = chosen.setup(target)
            # the `--` that other launchers need before the agent's arguments is not passed on
            passed = arguments[1:] if arguments[:1] == ["--"] else arguments
            command = [program or chosen.program, *setup.options, *passed]
            if print_only:
                typer.echo(
                    _shell_text([chosen.program, *command[1:]], setup, secret=target.api_key)
                )
                return
            complain(_server_line(target, address))
            _check_demo(target, is_allowed=allow_demo)
            for name, text in setup.files.items():
                (target.folder / name).write_text(text)
            certificates = _certificates(target, certificate=address.certificate)
            environment = {**_no_proxy(target.url), **certificates, **setup.environment}
            code = _run(command, {**os.environ, **environment})
        if _is_interactive():
            options = {
                "--url": url,
                "--api-key": "KEY" if api_key else None,
                "--model": model,
                "--small-model": small_model,
            }
            complain(_resume_line(agent, options, allow_demo=allow_demo))
    raise typer.Exit(code)


def _list_agents() -> None:
    for name, agent in AGENTS.items():
        place = shutil.which(agent.program) or f"not installed: {agent.install}"
        typer.echo(f"{name:<10}{agent.title:<13}{place}")
    typer.echo("\nholdfast launch NAME starts one. For other clients see docs/guides/clients.md")


def _chosen_agent(name: str, arguments: Sequence[str]) -> CodingAgent:
    """The agent of this name.

    Raises LaunchFailed, also if an option of `launch` follows the name.
    """
    if name not in AGENTS:
        near = get_close_matches(name, AGENTS, n=1)
        hint = f"The agents are: {', '.join(AGENTS)}; for others see docs/guides/clients.md"
        if near:
            hint = f"Did you mean {near[0]}?"
        raise LaunchFailed(f"there is no agent {name}. {hint}")
    options = [argument.partition("=")[0] for argument in arguments]
    if options[:1] == ["--"]:
        return AGENTS[name]
    misplaced = [option for option in options if option in _OPTIONS_OF_NO_AGENT]
    if options[:1] == ["--url"]:
        misplaced = ["--url"]
    if misplaced:
        raise LaunchFailed(
            f"put launch's options before the agent's name: holdfast launch {misplaced[0]} … {name}"
        )
    return AGENTS[name]


def _target(
    address: ServerAddress, *, models: tuple[str | None, str | None], folder: Path
) -> AgentTarget:
    """The server and the models for the agent. Raises ServerFailed with a hint."""
    from holdfast.cli.server_client import ServerClient, ServerFailed

    with ServerClient(
        url=address.url, api_key=address.api_key, certificate=address.certificate
    ) as server:
        try:
            served = {str(card["id"]): card.get("max_model_len") for card in server.models()}
        except ServerFailed as error:
            raise ServerFailed(_with_hint(str(error), address)) from None
        url = server.url
    unknown = [model for model in models if model is not None and model not in served]
    if unknown or not served:
        raise ServerFailed(
            f"{url} does not serve {unknown[0] if unknown else 'any model'}; it serves: "
            f"{', '.join(served)}"
        )
    model = models[0] or next(iter(served))
    return AgentTarget(
        url=url,
        api_key=address.api_key,
        model=model,
        small_model=models[1] or model,
        context_tokens=served[model],
        folder=folder.resolve(),
    )


def _with_hint(error: str, address: ServerAddress) -> str:
    """The error with what the user can do."""
    if "not trusted" in error or "speak TLS" in error:
        return f"{error}."
    hint = "Is that a Holdfast? --url URL names another server"
    if "no answer from" in error:
        hint = (
            "Start one in another terminal: holdfast serve. If it runs elsewhere: holdfast launch "
            "--url URL …"
        )
        if "Connection refused" in error:
            error = f"no server is running at {address.url}"
    elif "answers 401" in error:
        verdict = "wrong" if address.api_key else "missing"
        hint = f"The key is {verdict}: holdfast launch --api-key KEY …"
    stop = "" if error.endswith((".", "?", "!", "…")) else "."
    return f"{error}{stop} {hint}"


def _server_line(target: AgentTarget, address: ServerAddress) -> str:
    """Which server and model the agent gets; it may not be the one that the user expects."""
    facts = [f"model {target.model}"]
    if target.context_tokens is not None:
        facts.append(f"context {target.context_tokens:,} tokens")
    if address.pid is not None:
        facts.append(f"pid {address.pid}")
    return f"using the server at {target.url} ({', '.join(facts)})"


def _check_demo(target: AgentTarget, *, is_allowed: bool) -> None:
    """Ask before the bundled model is used: it answers an agent with minutes of gibberish.

    Raises LaunchFailed, or Exit if the user declines.
    """
    from holdfast.models.demo import is_demo

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
        raise typer.Exit(_DECLINED)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _resume_line(name: str, options: Mapping[str, str | None], *, allow_demo: bool) -> str:
    """How to continue. The command that the agent itself prints names this run's deleted files."""
    words = ["holdfast launch"]
    for option, value in options.items():
        if value:
            words += [option, shlex.quote(value)]
    if allow_demo:
        words.append("--allow-demo")
    command = " ".join([*words, name])
    commands = [f"{command} {resume}" for resume in AGENTS[name].resume]
    return f"to continue this conversation: {' or '.join(commands)}"


def _certificates(target: AgentTarget, *, certificate: str) -> dict[str, str]:
    """Variables that make the agent trust what this command trusts, and what it trusts anyway."""
    ours = [certificate] if certificate else []
    # Node ignores SSL_CERT_FILE, which this command uses
    if target.url.startswith("https:") and os.environ.get("SSL_CERT_FILE"):
        ours.append(os.environ["SSL_CERT_FILE"])
    if not ours:
        return {}
    variables = {}
    for name in _CERTIFICATE_VARIABLES:
        paths = dict.fromkeys([os.environ.get(name, ""), *map(os.path.abspath, ours)])
        existing = [Path(path) for path in paths if path and os.path.isfile(path)]
        variables[name] = str(existing[0]) if existing else os.path.abspath(ours[-1])
        if len(existing) > 1:
            joined = target.folder / f"{name.lower()}.pem"
            joined.write_text("\n".join(path.read_text() for path in existing))
            variables[name] = str(joined)
    return variables


def _warn_of_small_context(agent: CodingAgent, target: AgentTarget) -> None:
    """An agent with too little room compacts the conversation before every turn, or forever."""
    if target.context_tokens is None:
        return
    needed = ceil((agent.own_tokens + _TASK_TOKENS) / agent.usable_share)
    if target.context_tokens < needed:
        complain(
            f"{target.model} has a {target.context_tokens:,}-token context, but {agent.title} "
            f"needs at least {needed:,}: serve it with a longer --context, or serve a different "
            "model"
        )


def _no_proxy(url: str) -> dict[str, str]:
    """Variables that keep the agent from using a proxy for this machine."""
    from holdfast.cli.server_client import is_loopback

    if not is_loopback(url):
        return {}
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    host = urlsplit(url).hostname or ""
    hosts = f"{before},{host}" if before else host
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent in this terminal; returns its exit code, or 128 + N if signal N ended it."""
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        for process in started:
            process.send_signal(number)

    # not SIG_IGN, which the agent would inherit
    handlers = dict.fromkeys(_FORWARDED, forward) | dict.fromkeys(_IGNORED, lambda *_: None)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        started.append(subprocess.Popen(command, env=dict(environment)))
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _shell_text(command: Sequence[str], setup: AgentSetup, *, secret: str) -> str:
    """The command as text for a shell, without the key."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in setup.environment.items()]
    lines.append(shlex.join(command))
    for name, text in setup.files.items():
        lines += ["", f"# {name} (temporary, deleted when the agent exits):", *text.splitlines()]
    shown = "\n".join(lines)
    return shown.replace(secret, "KEY") if secret else shown
