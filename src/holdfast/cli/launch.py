"""`holdfast launch`: starts a coding agent that is configured for a running server.

An agent is a function from the server to an AgentSetup, plus an entry in AGENTS. Agents are
configured with variables, options, and files in a temporary folder. Their own configuration is
never changed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import ceil
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from urllib.parse import urlsplit

import typer

from holdfast.cli.output import FAILED, complain, plain_errors
from holdfast.cli.server_client import (
    ApiKey,
    ServerClient,
    ServerFailed,
    Url,
    client_of,
    is_loopback,
)
from holdfast.errors import HoldfastError
from holdfast.models.download import is_demo
from holdfast.models.model_folder import LONGEST_ANSWER_TOKENS, planned_answer_tokens

NO_KEY = "none"  # some agents do not start without a key
_PROVIDER = "holdfast"
# Claude Code keeps this many tokens free besides the longest answer, whatever the size of the
# context
_CLAUDE_SPARE_TOKENS = 13_000
# share of the context; Qwen Code's default of 0.7 is less than its first prompt if the context has
# 32,768 tokens
_QWEN_COMPACTS_AT = 0.9
_FORWARDED = (signal.SIGTERM, signal.SIGHUP)
_IGNORED = (signal.SIGINT, signal.SIGQUIT)  # the terminal sends these signals to the agent, too
_TASK_TOKENS = 4_000  # room for a task, besides the agent's own prompt
# for agents on Node, and for Codex
_CERTIFICATE_VARIABLES = ("NODE_EXTRA_CA_CERTS", "CODEX_CA_CERTIFICATE")
_NOT_FOUND = 127  # exit code if the program does not exist
_REAL_MODEL = "mlx-community/Qwen3-4B-4bit"  # a small model with 40,960 tokens of context
# options that only `launch` has; an agent may have options named like the other ones
_OPTIONS_OF_NO_AGENT = ("--allow-demo", "--small-model")


@dataclass(frozen=True, kw_only=True)
class AgentTarget:
    """The server and the models that an agent will use."""

    url: str
    api_key: str  # empty if the server needs no key
    model: str
    small_model: str
    context_tokens: int | None  # None: unknown, because the model has not been loaded yet
    folder: Path  # for temporary files

    @property
    def key(self) -> str:
        """The API key, or a placeholder if there is none."""
        return self.api_key or NO_KEY

    @property
    def answer_tokens(self) -> int:
        """How many tokens to reserve for an answer. context_tokens must be known."""
        assert self.context_tokens is not None
        return planned_answer_tokens(self.context_tokens)


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """How an agent is configured.

    This takes options that are put before the user's own, environment variables, and files (name →
    text) in the target's folder.
    """

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """One agent: its program, how to install it, and how to configure it."""

    title: str
    program: str
    # size of the agent's prompt and tools, as measured (docs/reference/tested-agents.md)
    own_tokens: int
    usable_share: float  # part of the context after which the agent compacts, with the setup below
    install: str
    # arguments that continue a conversation; the first ones continue the latest conversation
    resume: tuple[str, ...]
    setup: Callable[[AgentTarget], AgentSetup]


def _claude(target: AgentTarget) -> AgentSetup:
    """Configures Claude Code with a settings file, because `env` in the user's settings would
    override variables.
    """
    environment = {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.small_model,
        "ANTHROPIC_SMALL_FAST_MODEL": target.small_model,
        "CLAUDE_CODE_USE_BEDROCK": "0",
        "CLAUDE_CODE_USE_VERTEX": "0",
        # this would put a changing line at the top of the prompt
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "true",  # off by default for servers other than Anthropic's
    }
    if target.context_tokens is not None:
        environment |= _claude_limits(target.context_tokens)
    settings = target.folder / "settings.json"
    return AgentSetup(
        options=("--settings", str(settings)),
        environment=environment,
        files={settings.name: _document({"env": environment})},
    )


def _claude_limits(context_tokens: int) -> dict[str, str]:
    """Make Claude Code compact when three quarters of a small context are used.

    Claude Code assumes a million tokens for an unknown model, and compacts at: context - longest
    answer (at most 20,000) - 13,000. If it knew the real size of a context of 32,768 tokens, it
    would compact before every turn, because its own prompt is longer than this limit. So it is told
    a larger size. With this, an eighth of the real context stays free for the answer, and another
    eighth in reserve.
    """
    eighth = context_tokens // 8
    named = context_tokens + max(0, _CLAUDE_SPARE_TOKENS - eighth)
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(named),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(LONGEST_ANSWER_TOKENS, eighth)),
    }


def _codex(target: AgentTarget) -> AgentSetup:
    provider = {"name": "Holdfast", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.api_key:
        provider["env_key"] = "HOLDFAST_SERVER_API_KEY"
    values: dict[str, Any] = {"model": target.model, "model_provider": _PROVIDER}
    values |= {f"model_providers.{_PROVIDER}.{name}": value for name, value in provider.items()}
    if target.context_tokens is not None:
        values["model_context_window"] = target.context_tokens
    # JSON strings and numbers are valid TOML
    options = tuple(
        part
        for name, value in values.items()
        for part in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}")
    )
    return AgentSetup(
        options=options,
        environment={"HOLDFAST_SERVER_API_KEY": target.api_key} if target.api_key else {},
    )


def _opencode(target: AgentTarget) -> AgentSetup:
    models: dict[str, Any] = {
        name: {"name": name, "tool_call": True} for name in (target.model, target.small_model)
    }
    if target.context_tokens is not None:
        models[target.model]["limit"] = {
            "context": target.context_tokens,
            "output": target.answer_tokens,
        }
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Holdfast",
        "options": {"baseURL": f"{target.url}/v1", "apiKey": target.key},
        "models": models,
    }
    config = {
        "provider": {_PROVIDER: provider},
        "model": f"{_PROVIDER}/{target.model}",
        "small_model": f"{_PROVIDER}/{target.small_model}",
    }
    return AgentSetup(environment={"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


def _aider(target: AgentTarget) -> AgentSetup:
    """Configure aider with an env file of its own (`--env-file`).

    Environment variables would not do: the .env files of the project and the user override them.
    """
    model, small = f"openai/{target.model}", f"openai/{target.small_model}"
    variables, limits = target.folder / "aider.env", target.folder / "models.json"
    named = {"OPENAI_API_KEY": target.key, "AIDER_OPENAI_API_KEY": target.key}
    options = [
        "--env-file",
        str(variables),
        "--openai-api-base",
        f"{target.url}/v1",
        "--model",
        model,
        "--weak-model",
        small,
    ]
    files = {variables.name: "".join(f"{name}={value}\n" for name, value in named.items())}
    if target.context_tokens is None:
        options.append("--no-show-model-warnings")
    else:
        options += ["--model-metadata-file", str(limits)]
        known = {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": target.context_tokens,
            "max_output_tokens": target.answer_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
        files[limits.name] = _document({model: known, small: known})
    return AgentSetup(options=tuple(options), files=files)


def _qwen(target: AgentTarget) -> AgentSetup:
    """Configures Qwen Code's context length in a file of defaults; there is no option for it."""
    options = (
        "--auth-type",
        "openai",
        "--openai-base-url",
        f"{target.url}/v1",
        "--model",
        target.model,
    )
    environment = {"OPENAI_API_KEY": target.key}
    if target.context_tokens is None:
        return AgentSetup(options=options, environment=environment)
    defaults = target.folder / "qwen-defaults.json"
    environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] = str(defaults)
    model = {
        "generationConfig": {"contextWindowSize": target.context_tokens},
        "chatCompression": {"contextPercentageThreshold": _QWEN_COMPACTS_AT},
    }
    return AgentSetup(
        options=options, environment=environment, files={defaults.name: _document({"model": model})}
    )


def _document(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


AGENTS: Mapping[str, CodingAgent] = {
    "claude": CodingAgent(
        title="Claude Code",
        program="claude",
        own_tokens=19_500,
        usable_share=0.75,
        install="npm install -g @anthropic-ai/claude-code",
        resume=("--continue", "--resume ID"),
        setup=_claude,
    ),
    "codex": CodingAgent(
        title="Codex",
        program="codex",
        own_tokens=17_000,
        usable_share=0.9,
        install="npm install -g @openai/codex",
        resume=("resume --last", "resume ID"),
        setup=_codex,
    ),
    "opencode": CodingAgent(
        title="opencode",
        program="opencode",
        own_tokens=11_000,
        usable_share=0.75,
        install="npm install -g opencode-ai",
        resume=("--continue", "--session ID"),
        setup=_opencode,
    ),
    "aider": CodingAgent(
        title="aider",
        program="aider",
        own_tokens=4_000,
        usable_share=1.0,
        install="uv tool install --python 3.12 aider-chat",
        resume=("--restore-chat-history",),
        setup=_aider,
    ),
    "qwen": CodingAgent(
        title="Qwen Code",
        program="qwen",
        own_tokens=27_000,
        usable_share=_QWEN_COMPACTS_AT,
        install="npm install -g @qwen-code/qwen-code",
        resume=("--continue", "--resume ID"),
        setup=_qwen,
    ),
}


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
        chosen = _chosen_agent(agent, arguments or [])
        program = chosen.program if print_only else _installed_program(chosen)
        with (
            client_of(url, api_key) as server,
            tempfile.TemporaryDirectory(prefix=f"holdfast-{agent}-") as folder,
        ):
            target = _target(server, models=(model, small_model), folder=Path(folder))
            _warn_of_small_context(chosen, target)
            setup = chosen.setup(target)
            command = [program, *setup.options, *_passed_on(arguments or [])]
            if print_only:
                typer.echo(_shell_text(command, setup, secret=target.api_key))
                return
            complain(_server_line(target, server.pid))
            _check_demo(target, is_allowed=allow_demo)
            code = _run(command, setup, target, certificate=server.certificate)
        if _is_interactive():
            complain(_resume_line(agent, options, allow_demo=allow_demo))
    raise typer.Exit(code)


def _installed_program(agent: CodingAgent) -> str:
    program = shutil.which(agent.program)
    if program is None:
        complain(
            f"{agent.title} is not installed: there is no `{agent.program}`. To get it: "
            f"{agent.install}"
        )
        raise typer.Exit(_NOT_FOUND)
    return program


def _passed_on(arguments: Sequence[str]) -> Sequence[str]:
    """Return the agent's arguments, without the `--` that other launchers need before them."""
    return arguments[1:] if arguments[:1] == ["--"] else arguments


def _list_agents() -> None:
    for name, agent in AGENTS.items():
        place = shutil.which(agent.program) or f"not installed: {agent.install}"
        typer.echo(f"{name:<10}{agent.title:<13}{place}")
    typer.echo("\nholdfast launch NAME starts one. For other clients see docs/guides/clients.md")


def _chosen_agent(name: str, arguments: Sequence[str]) -> CodingAgent:
    """Return the agent with this name.

    Raises LaunchFailed if there is none, or if an option of `launch` follows the name.
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
    server: ServerClient, *, models: tuple[str | None, str | None], folder: Path
) -> AgentTarget:
    """Choose the server's models for the agent. Raises ServerFailed with a hint."""
    try:
        served = {str(card["id"]): card.get("max_model_len") for card in server.models()}
    except ServerFailed as error:
        raise ServerFailed(_with_hint(str(error), server)) from None
    unknown = [model for model in models if model is not None and model not in served]
    if unknown or not served:
        raise ServerFailed(
            f"{server.url} does not serve {unknown[0] if unknown else 'any model'}; it serves: "
            f"{', '.join(served)}"
        )
    model = models[0] or next(iter(served))
    return AgentTarget(
        url=server.url,
        api_key=server.api_key,
        model=model,
        small_model=models[1] or model,
        context_tokens=served[model],
        folder=folder.resolve(),
    )


def _with_hint(error: str, server: ServerClient) -> str:
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
    elif "answers 401" in error:
        verdict = "wrong" if server.api_key else "missing"
        hint = f"The key is {verdict}: holdfast launch --api-key KEY …"
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
    """Variables that make the agent trust the same certificates as this command, and the server's
    own.
    """
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


def _no_proxy(url: str) -> dict[str, str]:
    """Variables that keep the agent from using a proxy for a server on this machine."""
    if not is_loopback(url):
        return {}
    before = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
    host = urlsplit(url).hostname or ""
    hosts = f"{before},{host}" if before else host
    return {"NO_PROXY": hosts, "no_proxy": hosts}


def _run(
    command: Sequence[str], setup: AgentSetup, target: AgentTarget, *, certificate: str
) -> int:
    """Run the agent in this terminal.

    Returns the agent's exit code, or 128 + N if signal N ended it.
    """
    for name, text in setup.files.items():
        (target.folder / name).write_text(text)
    environment = {
        **os.environ,
        **_no_proxy(target.url),
        **_certificates(target, certificate=certificate),
        **setup.environment,
    }
    started: list[subprocess.Popen[bytes]] = []

    def forward(number: int, _frame: object) -> None:
        for process in started:
            process.send_signal(number)

    # SIG_IGN would be inherited by the agent
    handlers = dict.fromkeys(_FORWARDED, forward) | dict.fromkeys(_IGNORED, lambda *_: None)
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        started.append(subprocess.Popen(command, env=environment))
        code = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _shell_text(command: Sequence[str], setup: AgentSetup, *, secret: str) -> str:
    """Return the command as text for a shell, without the API key."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in setup.environment.items()]
    lines.append(shlex.join(command))
    for name, text in setup.files.items():
        lines += ["", f"# {name} (temporary, deleted when the agent exits):", *text.splitlines()]
    shown = "\n".join(lines)
    return shown.replace(secret, "KEY") if secret else shown
