"""`holdfast launch`: a coding agent, set up for a running server for the length of this run."""

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
    from holdfast.cli.server_client import ServerClient

_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
# it sends them to the agent as well, and what they mean is the agent's affair
_OF_THE_TERMINAL = (signal.SIGINT, signal.SIGQUIT)
_ROOM_TOKENS = 4_000  # for a task beside the agent's own prompt
_TRUSTED_TOO = ("NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE")  # by what runs on Node, and by Codex
_NOT_FOUND = 127  # as shells say it
_REAL_MODEL = "mlx-community/Qwen3-4B-4bit"  # small, and with 40,960 tokens of context
DECLINED = 1  # exit code
_OPTIONS_OF_NO_AGENT = ("--allow-demo", "--small-model")  # the others may also be an agent's


class LaunchFailed(HoldfastError):
    """The agent cannot be started as asked for."""


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
        bool, typer.Option("--allow-demo", help="Start it on the bundled demonstration model too.")
    ] = False,
    print_only: Annotated[
        bool, typer.Option("--print", help="Show what would be run, and run nothing.")
    ] = False,
) -> None:
    """Start a coding agent on a running server.

    The agent's own configuration stays as it is. What follows AGENT is passed to the agent.
    """
    if not agent:
        _list_agents()
        return
    with plain_errors():
        chosen = _chosen(agent, arguments or [])
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
            command = [program or chosen.program, *setup.options, *_without_dashes(arguments or [])]
            if print_only:
                typer.echo(_shown([chosen.program, *command[1:]], setup, secret=target.api_key))
                return
            complain(_chosen_server(target, address))
            _ask_about_demo(target, is_allowed=allow_demo)
            for name, text in setup.files.items():
                (target.folder / name).write_text(text)
            trust = _trust(os.environ, target, certificate=address.certificate)
            code = _run(
                command,
                {**os.environ, **_proxies(os.environ, target.url), **trust, **setup.environment},
            )
        if _is_interactive():
            named = {
                "--url": url,
                "--api-key": "KEY" if api_key else None,
                "--model": model,
                "--small-model": small_model,
            }
            complain(_way_back(agent, chosen, named=named, allow_demo=allow_demo))
    raise typer.Exit(code)


def _list_agents() -> None:
    for name, agent in AGENTS.items():
        where = shutil.which(agent.program)
        typer.echo(f"{name:<10}{agent.title:<13}{where or f'not installed: {agent.install}'}")
    typer.echo("\nholdfast launch NAME starts one. For other clients see docs/guides/clients.md")


def _chosen(name: str, arguments: Sequence[str]) -> CodingAgent:
    """The agent of this name. Raises LaunchFailed, also for options of `launch` after the name."""
    if name not in AGENTS:
        near = get_close_matches(name, AGENTS, n=1)
        hint = (
            f"Did you mean {near[0]}?"
            if near
            else f"It knows: {', '.join(AGENTS)}; others: see docs/guides/clients.md"
        )
        raise LaunchFailed(f"launch does not know the agent {name}. {hint}")
    options = [argument.partition("=")[0] for argument in arguments]
    misplaced = [option for option in options if option in _OPTIONS_OF_NO_AGENT]
    if options[:1] == ["--url"]:
        misplaced = ["--url"]
    if misplaced and options[0] != "--":
        raise LaunchFailed(
            f"put launch's options before the agent's name: holdfast launch {misplaced[0]} … {name}"
        )
    return AGENTS[name]


def _without_dashes(arguments: Sequence[str]) -> Sequence[str]:
    """The agent's arguments without the `--` that may stand before them, as other launchers want
    it.
    """
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _target(
    address: ServerAddress, *, models: tuple[str | None, str | None], folder: Path
) -> AgentTarget:
    """What the server says of itself. Raises ServerFailed, in words that say what to do."""
    from holdfast.cli.server_client import ServerClient, ServerFailed

    url, api_key = address.url, address.api_key
    with ServerClient(url=url, api_key=api_key, certificate=address.certificate) as server:
        try:
            served = _served(server)
        except ServerFailed as error:
            said = f"no server is running at {url}" if _is_refused(str(error)) else str(error)
            raise ServerFailed(
                f"{_sentence(said)} {_way_out(str(error), api_key)}".rstrip()
            ) from None
        url = server.url
    wanted = [model for model in models if model is not None and model not in served]
    if wanted or not served:
        raise ServerFailed(
            f"{url} does not serve {wanted[0] if wanted else 'any model'}; it serves: "
            f"{', '.join(served)}"
        )
    model = models[0] or next(iter(served))
    small = models[1] or model
    return AgentTarget(
        url=url,
        api_key=api_key,
        model=model,
        small_model=small,
        context_tokens=served[model],
        folder=folder.resolve(),
    )


def _chosen_server(target: AgentTarget, address: ServerAddress) -> str:
    """Which server and model the agent gets: it may be another server than the one that the user
    thinks of.
    """
    facts = [f"model {target.model}"]
    if target.context_tokens is not None:
        facts.append(f"context {target.context_tokens:,} tokens")
    if address.pid is not None:
        facts.append(f"pid {address.pid}")
    return f"using the server at {target.url} ({', '.join(facts)})"


def _ask_about_demo(target: AgentTarget, *, is_allowed: bool) -> None:
    """The bundled model answers an agent's prompt with minutes of gibberish.

    Raises LaunchFailed, or Exit if it is declined.
    """
    from holdfast.models.demo import is_demo

    if is_allowed or not is_demo(target.model):
        return
    about = (
        f"{target.model} is a demonstration of three million parameters; it cannot do an agent's "
        "work"
    )
    way_out = f"Serve a real model, for example: holdfast serve {_REAL_MODEL}"
    if not _is_interactive():
        raise LaunchFailed(
            f"{about}. {way_out}. To start the agent all the same: holdfast launch --allow-demo …"
        )
    complain(f"{about}. {way_out}")
    if not typer.confirm("Start it all the same?", err=True):
        raise typer.Exit(DECLINED)


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stdout.isatty()


def _way_back(
    name: str, agent: CodingAgent, *, named: Mapping[str, str | None], allow_demo: bool
) -> str:
    """How to continue: the command that the agent itself prints names files of this run, which are
    gone.
    """
    options = [
        part for option, value in named.items() if value for part in (option, shlex.quote(value))
    ]
    command = " ".join(
        ["holdfast launch", *options, *(["--allow-demo"] if allow_demo else []), name]
    )
    return (
        f"to continue this conversation: {' or '.join(f'{command} {way}' for way in agent.resume)}"
    )


def _trust(environ: Mapping[str, str], target: AgentTarget, *, certificate: str) -> dict[str, str]:
    """Variables by which agents trust what we have trusted, beside what they trust anyway."""
    # Node does not look at SSL_CERT_FILE, though it is what we go by.
    named = environ.get("SSL_CERT_FILE", "") if target.url.startswith("https:") else ""
    ours = [os.path.abspath(path) for path in (certificate, named) if path]
    return {
        name: _in_one_file(name, [environ.get(name, ""), *ours], target.folder)
        for name in _TRUSTED_TOO
        if ours
    }


def _in_one_file(name: str, paths: Sequence[str], folder: Path) -> str:
    """The file that holds what all these hold; "" is none."""
    several = [path for path in dict.fromkeys(paths) if path and os.path.isfile(path)]
    if len(several) < 2:
        return next(iter(several), paths[-1])
    joined = folder / f"{name.lower()}.pem"
    joined.write_text("\n".join(Path(path).read_text() for path in several))
    return str(joined)


def _warn_of_small_context(agent: CodingAgent, target: AgentTarget) -> None:
    """An agent whose own prompt leaves too little room compacts the conversation before every turn,
    or for ever.
    """
    if target.context_tokens is None:
        return
    needed = ceil((agent.own_tokens + _ROOM_TOKENS) / agent.usable_share)
    if target.context_tokens < needed:
        shortage = (
            f"{target.model} has a {target.context_tokens:,}-token context, but {agent.title} "
            f"needs at least {needed:,}"
        )
        complain(f"{shortage}: serve it with a longer --context, or serve a different model")


def _served(server: ServerClient) -> Mapping[str, int | None]:
    """The context of each model that the server serves."""
    return {str(model["id"]): model.get("max_model_len") for model in server.models()}


def _sentence(words: str) -> str:
    return words if words.endswith((".", "?", "!", "…")) else f"{words}."


def _is_refused(error: str) -> bool:
    return "no answer from" in error and "Connection refused" in error


def _way_out(error: str, api_key: str) -> str:
    if "not trusted" in error or "speak TLS" in error:
        return ""  # it says so itself
    if "no answer from" in error:
        return (
            "Start one in another terminal: holdfast serve. If it runs elsewhere: holdfast launch "
            "--url URL …"
        )
    if "answers 401" in error:
        return (
            f"The key given is {'not its key' if api_key else 'missing'}: holdfast launch "
            "--api-key KEY …"
        )
    return "Is that a Holdfast? --url URL names another server"


def _proxies(environ: Mapping[str, str], url: str) -> dict[str, str]:
    """Keep agents from asking a proxy for this machine."""
    from holdfast.cli.server_client import is_loopback

    host = urlsplit(url).hostname
    if host is None or not is_loopback(url):
        return {}
    before = environ.get("no_proxy") or environ.get("NO_PROXY") or ""
    without = ",".join([*([before] if before else []), host])
    return {"NO_PROXY": without, "no_proxy": without}


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run the agent in this terminal to its end; returns its exit code, 128 + N where a signal N
    ended it.
    """
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        for process in started:
            process.send_signal(number)

    # Functions in both cases, since what is ignored here would be ignored by the agent too.
    handlers = dict.fromkeys(_FORWARDED, forward) | dict.fromkeys(_OF_THE_TERMINAL, lambda *_: None)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        started.append(subprocess.Popen(command, env=dict(environment)))
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _shown(command: Sequence[str], setup: AgentSetup, *, secret: str) -> str:
    """What would be run, as a shell takes it; the key is left out."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in setup.environment.items()] + [
        shlex.join(command)
    ]
    for name, text in setup.files.items():
        lines += ["", f"# {name} (temporary, deleted when the agent exits):", *text.splitlines()]
    shown = "\n".join(lines)
    return shown.replace(secret, "KEY") if secret else shown
