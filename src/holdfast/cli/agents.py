"""The coding agents of `holdfast launch`, and how each is configured for a server.

An agent is a function from the server to an AgentSetup, and an entry in AGENTS. Agents are configured
by variables, options, and files in a temporary folder; their own configuration is never changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.models.context_window import LONGEST_ANSWER_TOKENS, planned_answer_tokens

NO_KEY = "none"  # some agents insist on a key
_PROVIDER = "holdfast"
# Claude Code keeps them free in addition to the longest answer, in a context of any size
_CLAUDE_SPARE_TOKENS = 13_000
# share of the context; its default of 0.7 is less than its first prompt in 32,768 tokens
_QWEN_COMPACTS_AT = 0.9


@dataclass(frozen=True, kw_only=True)
class AgentTarget:
    """The server and the models for an agent. api_key is empty if the server needs none."""

    url: str
    api_key: str
    model: str
    small_model: str
    context_tokens: int | None
    """None before the model was loaded: the agent then uses its own assumption."""
    folder: Path
    """For temporary files."""

    @property
    def key(self) -> str:
        """The key, or a placeholder."""
        return self.api_key or NO_KEY

    @property
    def answer_tokens(self) -> int:
        """The longest answer to plan for; needs context_tokens."""
        assert self.context_tokens is not None
        return planned_answer_tokens(self.context_tokens)


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """Options to put before the user's, variables, and files (name → text) in the target's folder."""

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """One agent: its program, how to install it, and its setup.

    own_tokens: approximate size of its prompt and tools, as measured
        (docs/reference/tested-agents.md).
    usable_share: the part of the context after which it compacts, with the setup below.
    resume: arguments that continue a conversation, that of the latest one first.
    """

    title: str
    program: str
    own_tokens: int
    usable_share: float
    install: str
    resume: tuple[str, ...]
    setup: Callable[[AgentTarget], AgentSetup]


def _claude(target: AgentTarget) -> AgentSetup:
    """Uses a settings file: variables alone would lose to `env` in the user's settings."""
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
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a changing line at the top of the prompt
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "true",  # off by default for other hosts than Anthropic's
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
    answer (at most 20,000) - 13,000. With the true size of a context of 32,768 tokens it would compact
    before every turn, as its own prompt is longer than that. So it gets a larger size, with which an
    eighth of the real context stays free for the answer, and another eighth in reserve.
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
    """Uses a file of variables: the environment would lose to the project's and the user's .env."""
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
    """The context goes into a file of defaults: there is no option or variable for it."""
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
