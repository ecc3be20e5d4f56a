"""The coding agents that `holdfast launch` knows: what each has to be told so that it speaks to this server.

An agent is a function from the server to what is added for one run, and a line in AGENTS. Nothing here writes to the agent's own
configuration: settings come as variables, as options, or as files of a folder that is gone after the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NO_KEY = "none"  # for agents that want some key, where the server wants none
_PROVIDER = "holdfast"
_ANSWER_TOKENS = 32_000  # the longest answer that an agent is told to plan for; a quarter of a smaller context


@dataclass(frozen=True, kw_only=True)
class AgentTarget:
    """The server and models that an agent is to use. api_key is empty where the server wants none."""

    url: str
    api_key: str
    model: str
    small_model: str
    context_tokens: int | None
    """None while the model has not been loaded yet: agents then go by what they assume."""
    folder: Path
    """For files of this run."""

    @property
    def key(self) -> str:
        """A key in any case."""
        return self.api_key or NO_KEY

    @property
    def answer_tokens(self) -> int:
        """The longest answer to plan for; needs context_tokens."""
        assert self.context_tokens is not None
        return min(_ANSWER_TOKENS, self.context_tokens // 4)


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """What one run of an agent gets: options that stand before the user's, variables, and files of the run's folder by name."""

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """One agent: its program, how people get it, and its setup. `own_tokens`: about what its prompt and tools take, measured."""

    title: str
    program: str
    own_tokens: int
    install: str
    setup: Callable[[AgentTarget], AgentSetup]


def _claude(target: AgentTarget) -> AgentSetup:
    """Settings of the run, not variables alone: the `env` of the user's own settings would outdo those."""
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
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line at the top of the prompt that changes
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if target.context_tokens is not None:  # of a model it does not know it believes a million
        environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(target.context_tokens)
    settings = target.folder / "settings.json"
    return AgentSetup(
        options=("--settings", str(settings)), environment=environment, files={settings.name: _document({"env": environment})}
    )


def _codex(target: AgentTarget) -> AgentSetup:
    provider = {"name": "Holdfast", "base_url": f"{target.url}/v1", "wire_api": "responses"}
    if target.api_key:
        provider["env_key"] = "HOLDFAST_SERVER_API_KEY"
    values: dict[str, Any] = {"model": target.model, "model_provider": _PROVIDER}
    values |= {f"model_providers.{_PROVIDER}.{name}": value for name, value in provider.items()}
    if target.context_tokens is not None:
        values["model_context_window"] = target.context_tokens
    # JSON texts and numbers are TOML too.
    options = tuple(part for name, value in values.items() for part in ("-c", f"{name}={json.dumps(value, ensure_ascii=False)}"))
    return AgentSetup(options=options, environment={"HOLDFAST_SERVER_API_KEY": target.api_key} if target.api_key else {})


def _opencode(target: AgentTarget) -> AgentSetup:
    models: dict[str, Any] = {name: {"name": name, "tool_call": True} for name in (target.model, target.small_model)}
    if target.context_tokens is not None:
        models[target.model]["limit"] = {"context": target.context_tokens, "output": target.answer_tokens}
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
    """A file of variables, since those of the project's and the user's .env would outdo the environment."""
    model, small = f"openai/{target.model}", f"openai/{target.small_model}"
    variables, limits = target.folder / "aider.env", target.folder / "models.json"
    named = {"OPENAI_API_KEY": target.key, "AIDER_OPENAI_API_KEY": target.key}
    options = ["--env-file", str(variables), "--openai-api-base", f"{target.url}/v1", "--model", model, "--weak-model", small]
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
    options = ("--auth-type", "openai", "--openai-base-url", f"{target.url}/v1", "--model", target.model)
    return AgentSetup(options=options, environment={"OPENAI_API_KEY": target.key})


def _document(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


AGENTS: Mapping[str, CodingAgent] = {
    "claude": CodingAgent(
        title="Claude Code",
        program="claude",
        own_tokens=17_000,
        install="npm install -g @anthropic-ai/claude-code",
        setup=_claude,
    ),
    "codex": CodingAgent(title="Codex", program="codex", own_tokens=13_000, install="npm install -g @openai/codex", setup=_codex),
    "opencode": CodingAgent(
        title="opencode", program="opencode", own_tokens=11_000, install="npm install -g opencode-ai", setup=_opencode
    ),
    "aider": CodingAgent(
        title="aider", program="aider", own_tokens=4_000, install="uv tool install --python 3.12 aider-chat", setup=_aider
    ),
    "qwen": CodingAgent(
        title="Qwen Code", program="qwen", own_tokens=17_000, install="npm install -g @qwen-code/qwen-code", setup=_qwen
    ),
}
