"""How coding agents and libraries are configured for a server.

An agent is a function from the server to an AgentSetup, plus an entry in AGENTS. `holdfast launch`
starts an agent with its setup. The page for browsers shows it as a command to copy, next to
examples for libraries.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.models.model_folder import LONGEST_ANSWER_TOKENS, planned_answer_tokens

NO_KEY = "none"  # some agents do not start without a key
_PROVIDER = "holdfast"
# Claude Code keeps this many tokens free besides the longest answer, whatever the context size
_CLAUDE_SPARE_TOKENS = 13_000
# share of the context; Qwen Code's default of 0.7 is less than its first prompt if the context has
# 32,768 tokens
_QWEN_COMPACTS_AT = 0.9
# pi compacts when fewer than this many tokens are left, regardless of the context size
_PI_SPARE_TOKENS = 16_384


@dataclass(frozen=True, kw_only=True)
class AgentTarget:
    """The server and the models that an agent will use."""

    url: str
    api_key: str  # empty if the server needs no key
    model: str
    small_model: str
    context_tokens: int | None  # None: unknown, because the model has not been loaded yet
    can_see: bool = False  # whether the model can be given images
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
    # whether it uses the proxy in HTTP_PROXY even for hosts in NO_PROXY
    ignores_no_proxy: bool = False


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
    stated_tokens = context_tokens + max(0, _CLAUDE_SPARE_TOKENS - eighth)
    return {
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(stated_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(min(LONGEST_ANSWER_TOKENS, eighth)),
    }


def _codex(target: AgentTarget) -> AgentSetup:
    """Configures Codex with options `-c`, each of which sets a value of its config.toml."""
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
    """Configures opencode with a variable that contains a configuration file."""
    models: dict[str, Any] = {
        name: {"name": name, "tool_call": True} for name in (target.model, target.small_model)
    }
    if target.can_see:
        models[target.model] |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
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
    """Configure aider with a separate env file (`--env-file`).

    Environment variables would not do: the .env files of the project and the user override them.
    """
    model = f"openai/{target.model}"
    small_model = f"openai/{target.small_model}"
    env_file = target.folder / "aider.env"
    limits_file = target.folder / "models.json"
    variables = {"OPENAI_API_KEY": target.key, "AIDER_OPENAI_API_KEY": target.key}
    options = [
        "--env-file",
        str(env_file),
        "--openai-api-base",
        f"{target.url}/v1",
        "--model",
        model,
        "--weak-model",
        small_model,
    ]
    files = {env_file.name: "".join(f"{name}={value}\n" for name, value in variables.items())}
    if target.context_tokens is None:
        options.append("--no-show-model-warnings")
    else:
        options += ["--model-metadata-file", str(limits_file)]
        model_limits = {
            "litellm_provider": "openai",
            "mode": "chat",
            "max_input_tokens": target.context_tokens,
            "max_output_tokens": target.answer_tokens,
            "input_cost_per_token": 0,
            "output_cost_per_token": 0,
        }
        files[limits_file.name] = _document({model: model_limits, small_model: model_limits})
    return AgentSetup(options=tuple(options), files=files)


def _qwen(target: AgentTarget) -> AgentSetup:
    """Configures Qwen Code's context length in a file of defaults, because there is no option."""
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


def _pi(target: AgentTarget) -> AgentSetup:
    """Configures pi with an extension, because its models file belongs to the user.

    pi keeps 16,384 tokens free, regardless of the context size. So this configuration states a
    larger context, and pi compacts when three quarters of a small context are used.
    """
    models: list[dict[str, Any]] = [
        {
            "id": name,
            "name": name,
            "reasoning": False,
            "input": ["text", "image"] if target.can_see else ["text"],
            "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        }
        for name in dict.fromkeys((target.model, target.small_model))
    ]
    if target.context_tokens is not None:
        added_tokens = max(0, _PI_SPARE_TOKENS - target.context_tokens // 4)
        for model in models:
            model["contextWindow"] = target.context_tokens + added_tokens
            model["maxTokens"] = min(target.answer_tokens, _PI_SPARE_TOKENS)
    provider = {
        "name": "Holdfast",
        "baseUrl": f"{target.url}/v1",
        "apiKey": "HOLDFAST_SERVER_API_KEY",  # the name of a variable
        "api": "openai-completions",
        "models": models,
    }
    extension = target.folder / "pi-provider.js"
    text = json.dumps(provider, indent=2)
    return AgentSetup(
        options=(
            *("--extension", str(extension), "--provider", _PROVIDER),
            *("--model", target.model),
        ),
        environment={"HOLDFAST_SERVER_API_KEY": target.key},
        files={
            extension.name: f"export default (pi) => pi.registerProvider({_PROVIDER!r}, {text});\n"
        },
    )


def _cline(target: AgentTarget) -> AgentSetup:
    """Configures Cline with a providers file and, in the same folder, a models file."""
    provider = "openai-compatible"
    url = f"{target.url}/v1"
    settings = {
        "provider": provider,
        "apiKey": target.key,
        "model": target.model,
        "baseUrl": url,
    }
    saved_provider = {
        "settings": settings,
        "updatedAt": "2026-01-01T00:00:00.000Z",
        "tokenSource": "manual",
    }
    providers = target.folder / "providers.json"
    files = {
        providers.name: _document(
            {"version": 1, "lastUsedProvider": provider, "providers": {provider: saved_provider}}
        )
    }
    if target.context_tokens is not None:
        model = {
            "id": target.model,
            "name": target.model,
            "contextWindow": target.context_tokens,
            "maxInputTokens": target.context_tokens - target.answer_tokens,
            "maxTokens": target.answer_tokens,
            "supportsVision": target.can_see,
        }
        provider_models = {provider: {"models": {target.model: model}}}
        files["models.json"] = _document({"version": 1, "providers": provider_models})
    return AgentSetup(
        options=("--provider", provider, "--model", target.model),
        environment={
            "CLINE_PROVIDER_SETTINGS_PATH": str(providers),
            # not in its daemon, which would keep the address and key of an earlier server
            "CLINE_SESSION_BACKEND_MODE": "local",
        },
        files=files,
    )


def _document(content: Mapping[str, Any]) -> str:
    """The text of a JSON file."""
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
        ignores_no_proxy=True,
    ),
    "pi": CodingAgent(
        title="pi",
        program="pi",
        own_tokens=1_400,
        usable_share=0.75,
        install="npm install -g @mariozechner/pi-coding-agent",
        resume=("--continue", "--session ID"),
        setup=_pi,
    ),
    "cline": CodingAgent(
        title="Cline",
        program="cline",
        own_tokens=5_400,
        usable_share=0.7,
        install="npm install -g cline",
        resume=("--id ID",),
        setup=_cline,
    ),
}


def shell_text(command: Sequence[str], setup: AgentSetup, *, secret: str) -> str:
    """Return the command as text for a shell, without the API key."""
    lines = [f"{name}={shlex.quote(value)} \\" for name, value in setup.environment.items()]
    lines.append(shlex.join(command))
    for name, text in setup.files.items():
        lines += ["", f"# {name} (temporary, deleted when the agent exits):", *text.splitlines()]
    text_with_secret = "\n".join(lines)
    return text_with_secret.replace(secret, "KEY") if secret else text_with_secret


@dataclass(frozen=True, kw_only=True)
class ClientLibrary:
    """A library or program, with an example that works once the key, if needed, is in a variable.

    text: the example for a server.
    """

    name: str
    title: str
    install: str
    language: str
    text: Callable[[AgentTarget], str]


def _curl(target: AgentTarget) -> str:
    body = {"model": target.model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = f' -H "Authorization: Bearer {target.api_key}"' if target.api_key else ""
    url = shlex.quote(f"{target.url}/v1/chat/completions")
    return (
        f"curl {url}{key} -H 'Content-Type: application/json' \\\n  -d "
        f"{shlex.quote(json.dumps(body))}"
    )


def _environment(target: AgentTarget) -> str:
    """Variables that many clients read, to set in a shell."""
    key = f'"{target.api_key}"' if target.api_key else NO_KEY
    variables = {
        "OPENAI_BASE_URL": shlex.quote(f"{target.url}/v1"),
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": shlex.quote(target.url),
        "ANTHROPIC_AUTH_TOKEN": key,
        "OLLAMA_HOST": shlex.quote(target.url),
    }
    return "\n".join(f"export {name}={value}" for name, value in variables.items())


def _python_key(target: AgentTarget) -> str:
    """The key as an expression of Python."""
    if not target.api_key:
        return json.dumps(NO_KEY)
    return f'os.environ["{target.api_key.removeprefix("$")}"]'


def _python(target: AgentTarget, *lines: str) -> str:
    """A Python program, which imports `os` if the key comes from a variable."""
    imports = ["import os", ""] if target.api_key else []
    return "\n".join([*imports, *lines])


def _openai(target: AgentTarget) -> str:
    model, url = json.dumps(target.model), json.dumps(f"{target.url}/v1")
    return _python(
        target,
        "from openai import OpenAI",
        "",
        f"client = OpenAI(base_url={url}, api_key={_python_key(target)})",
        'hello = [{"role": "user", "content": "Hello!"}]',
        f"answer = client.chat.completions.create(model={model}, messages=hello)",
        "print(answer.choices[0].message.content)",
    )


def _anthropic(target: AgentTarget) -> str:
    model, url = json.dumps(target.model), json.dumps(target.url)
    return _python(
        target,
        "from anthropic import Anthropic",
        "",
        f"client = Anthropic(base_url={url}, api_key={_python_key(target)})",
        'hello = [{"role": "user", "content": "Hello!"}]',
        f"answer = client.messages.create(model={model}, max_tokens=1000, messages=hello)",
        "print(answer.content[-1].text)",
    )


def _ollama(target: AgentTarget) -> str:
    headers = f', headers={{"Authorization": "Bearer " + {_python_key(target)}}}'
    return _python(
        target,
        "from ollama import Client",
        "",
        f"client = Client(host={json.dumps(target.url)}{headers if target.api_key else ''})",
        'hello = [{"role": "user", "content": "Hello!"}]',
        f"print(client.chat({json.dumps(target.model)}, hello).message.content)",
    )


def _langchain(target: AgentTarget) -> str:
    return _python(
        target,
        "from langchain_openai import ChatOpenAI",
        "",
        "chat = ChatOpenAI(",
        f"    base_url={json.dumps(f'{target.url}/v1')},",
        f"    api_key={_python_key(target)},",
        f"    model={json.dumps(target.model)},",
        ")",
        'print(chat.invoke("Hello!").content)',
    )


LIBRARIES = (
    ClientLibrary(name="curl", title="curl", install="", language="sh", text=_curl),
    ClientLibrary(
        name="environment",
        title="Variables that many clients read",
        install="",
        language="sh",
        text=_environment,
    ),
    ClientLibrary(
        name="openai",
        title="OpenAI for Python",
        install="pip install openai",
        language="python",
        text=_openai,
    ),
    ClientLibrary(
        name="anthropic",
        title="Anthropic for Python",
        install="pip install anthropic",
        language="python",
        text=_anthropic,
    ),
    ClientLibrary(
        name="ollama",
        title="Ollama for Python",
        install="pip install ollama",
        language="python",
        text=_ollama,
    ),
    ClientLibrary(
        name="langchain",
        title="LangChain",
        install="pip install langchain-openai",
        language="python",
        text=_langchain,
    ),
)
