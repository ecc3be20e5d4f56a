"""The coding agents that `holdfast launch` knows: what each has to be told so that it speaks to
this server.

An agent is a function from the server to what is added for one run, and a line in AGENTS. Nothing
here writes to the agent's own
configuration: settings come as variables, as options, or as files of a folder that is gone after
    the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.models.context_window import LONGEST_ANSWER_TOKENS, planned_answer_tokens

NO_KEY = "none"  # for agents that want some key, where the server wants none
_PROVIDER = "holdfast"
# Claude Code keeps them free beside the longest answer, however small the context is
_CLAUDE_SPARE_TOKENS = 13_000
# of the context; its own default is 0.7, which is less than its first prompt takes of 32,768 tokens
_QWEN_COMPACTS_AT = 0.9


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
        return planned_answer_tokens(self.context_tokens)


@dataclass(frozen=True, kw_only=True)
class AgentSetup:
    """What one run of an agent gets: options that stand before the user's, variables, and files of
    the run's folder by name.
    """

    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CodingAgent:
    """One agent: its program, how people get it, and its setup.

    own_tokens: about what its prompt and tools take, measured (docs/reference/tested-agents.md).
    usable_share: the part of the context after which it compacts the conversation, with the setup
        that it gets here.
    resume: the arguments that continue a conversation, the latest one first.
    """

    title: str
    program: str
    own_tokens: int
    usable_share: float
    install: str
    resume: tuple[str, ...]
    setup: Callable[[AgentTarget], AgentSetup]


def _claude(target: AgentTarget) -> AgentSetup:
    """Settings of the run, not variables alone: the `env` of the user's own settings would outdo
    those.
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
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",  # a line at the top of the prompt that changes
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "ENABLE_TOOL_SEARCH": "true",  # off by default for hosts other than Anthropic's
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
    """Have Claude Code compact when three quarters of the context are used (a larger part of a
    large context).

    It assumes a million tokens for a model that it does not know, and compacts at: context -
    longest answer (20,000 at most)
    - 13,000. In a context of 32,768 tokens its own prompt is longer than that, so it would compact
      before every turn. So a small
    context is named larger than it is: an eighth of the real one stays free for the answer, and an
    eighth to spare.
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
    # JSON texts and numbers are TOML too.
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
    """A file of variables, since those of the project's and the user's .env would outdo the
    environment.
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
    """The context goes into a file of defaults, which the user's own settings outdo: no option or
    variable takes it.
    """
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
