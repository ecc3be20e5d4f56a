"""The configuration that each agent gets."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.agents import AGENTS, AgentTarget

TARGET = AgentTarget(
    url="http://127.0.0.1:8321",
    api_key="secret",
    model="org/Model-4bit",
    small_model="org/Small-4bit",
    context_tokens=40_000,
    folder=Path("/run-folder"),
)
names = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=30)


def codex_settings(target: AgentTarget) -> dict[str, Any]:
    """Codex's options, parsed as Codex does: each value is TOML."""
    options = AGENTS["codex"].setup(target).options
    assert set(options[::2]) == {"-c"}
    settings: dict[str, Any] = {}
    for option in options[1::2]:
        name, _, value = option.partition("=")
        settings[name] = tomllib.loads(f"value = {value}")["value"]
    return settings


@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("context_tokens", [40_000, None])
def test_every_agent_gets_address_model_and_key(name: str, context_tokens: int | None) -> None:
    setup = AGENTS[name].setup(dataclasses.replace(TARGET, context_tokens=context_tokens))
    told = json.dumps([setup.options, dict(setup.environment), dict(setup.files)])
    for fact in (TARGET.url, TARGET.model, TARGET.api_key):
        assert fact in told
    # Claude Code and pi get larger numbers, because they keep 13,000 and 16,384 free
    limit = {"claude": "48000", "pi": "46384"}.get(name, "40000")
    assert (limit in told) == (context_tokens is not None)


@pytest.mark.parametrize("name", AGENTS)
def test_the_key_is_never_in_the_command_line(
    name: str,
) -> None:
    assert "secret" not in " ".join(AGENTS[name].setup(TARGET).options)


@pytest.mark.parametrize("name", AGENTS)
def test_files_are_temporary_and_named_in_options_or_variables(name: str) -> None:
    setup = AGENTS[name].setup(TARGET)
    told = [*setup.options, *setup.environment.values()]
    beside = {"models.json"} if name == "cline" else set()  # where Cline looks by itself
    assert all(str(TARGET.folder / file) in told for file in setup.files.keys() - beside)


def test_claude_codes_settings_override_the_users_and_name_all_models() -> None:
    setup = AGENTS["claude"].setup(TARGET)
    environment = json.loads(setup.files["settings.json"])["env"]
    assert environment == setup.environment
    assert environment["ANTHROPIC_BASE_URL"] == TARGET.url  # it adds /v1 itself
    assert environment["ANTHROPIC_API_KEY"] == ""
    models = {name: value for name, value in environment.items() if name.endswith("_MODEL")}
    small = {name for name, value in models.items() if value == TARGET.small_model}
    assert small == {"ANTHROPIC_DEFAULT_HAIKU_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"}
    assert set(models.values()) == {TARGET.model, TARGET.small_model}


@pytest.mark.parametrize("context_tokens", [32_768, 40_960, 65_536, 131_072, 262_144])
def test_claude_code_compacts_between_its_prompt_and_the_context(
    context_tokens: int,
) -> None:
    environment = (
        AGENTS["claude"]
        .setup(dataclasses.replace(TARGET, context_tokens=context_tokens))
        .environment
    )
    answer = int(environment["CLAUDE_CODE_MAX_OUTPUT_TOKENS"])
    # as Claude Code computes it
    compacts_at = int(environment["CLAUDE_CODE_MAX_CONTEXT_TOKENS"]) - min(answer, 20_000) - 13_000
    assert compacts_at >= AGENTS["claude"].usable_share * context_tokens
    assert compacts_at >= AGENTS["claude"].own_tokens + 4_000
    assert compacts_at + min(answer, 20_000) < context_tokens


def test_qwen_code_compacts_when_most_of_the_context_is_used() -> None:
    setup = AGENTS["qwen"].setup(TARGET)
    (file,) = setup.files
    assert setup.environment["QWEN_CODE_SYSTEM_DEFAULTS_PATH"] == str(TARGET.folder / file)
    model = json.loads(setup.files[file])["model"]
    assert model["generationConfig"]["contextWindowSize"] == 40_000
    assert model["chatCompression"]["contextPercentageThreshold"] == AGENTS["qwen"].usable_share


def test_codex_uses_responses_with_a_separate_provider() -> None:
    settings = codex_settings(TARGET)
    provider = settings["model_provider"]
    assert settings["model"] == TARGET.model
    assert settings["model_context_window"] == 40_000
    assert settings[f"model_providers.{provider}.base_url"] == f"{TARGET.url}/v1"
    assert settings[f"model_providers.{provider}.wire_api"] == "responses"
    assert AGENTS["codex"].setup(TARGET).environment == {
        settings[f"model_providers.{provider}.env_key"]: "secret"
    }


def test_without_a_key_codex_gets_no_key_variable() -> None:
    target = dataclasses.replace(TARGET, api_key="")
    assert not any(name.endswith("env_key") for name in codex_settings(target))
    assert AGENTS["codex"].setup(target).environment == {}


@given(name=names)
def test_any_model_name_reaches_codex_unchanged(name: str) -> None:
    assert codex_settings(dataclasses.replace(TARGET, model=name))["model"] == name


def test_opencode_may_attach_images_if_the_model_takes_them() -> None:
    target = dataclasses.replace(TARGET, can_see=True)
    config = json.loads(AGENTS["opencode"].setup(target).environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, _ = config["model"].partition("/")
    model = config["provider"][provider]["models"][TARGET.model]
    assert model["modalities"]["input"] == ["text", "image"]


def test_opencode_knows_both_models_with_the_firsts_context() -> None:
    config = json.loads(AGENTS["opencode"].setup(TARGET).environment["OPENCODE_CONFIG_CONTENT"])
    provider, _, model = config["model"].partition("/")
    models = config["provider"][provider]["models"]
    assert model == TARGET.model
    assert set(models) == {TARGET.model, TARGET.small_model}
    assert models[model]["limit"] == {"context": 40_000, "output": 10_000}


def test_aider_gets_model_limits_and_does_not_complain_without() -> None:
    setup = AGENTS["aider"].setup(TARGET)
    limits = json.loads(setup.files["models.json"])
    assert limits[f"openai/{TARGET.model}"]["max_input_tokens"] == 40_000
    unknown = AGENTS["aider"].setup(dataclasses.replace(TARGET, context_tokens=None))
    assert "models.json" not in unknown.files
    assert "--no-show-model-warnings" in unknown.options


def pi_provider(target: AgentTarget) -> dict[str, Any]:
    """What pi's extension registers."""
    text = AGENTS["pi"].setup(target).files["pi-provider.js"]
    before, _, after = text.partition(", ")
    assert before == "export default (pi) => pi.registerProvider('holdfast'"
    return dict(json.loads(after.removesuffix(");\n")))


def test_pi_gets_an_extension_and_a_key_variable() -> None:
    setup = AGENTS["pi"].setup(TARGET)
    assert setup.options[-4:] == ("--provider", "holdfast", "--model", TARGET.model)
    provider = pi_provider(TARGET)
    assert provider["baseUrl"] == f"{TARGET.url}/v1"
    assert setup.environment[provider["apiKey"]] == TARGET.api_key
    assert [model["id"] for model in provider["models"]] == [TARGET.model, TARGET.small_model]


@pytest.mark.parametrize("context_tokens", [8_192, 32_768, 65_536, 131_072])
def test_pi_compacts_between_its_prompt_and_the_context(
    context_tokens: int,
) -> None:
    model = pi_provider(dataclasses.replace(TARGET, context_tokens=context_tokens))["models"][0]
    compacts_at = model["contextWindow"] - 16_384
    assert AGENTS["pi"].own_tokens < compacts_at
    assert compacts_at + model["maxTokens"] <= context_tokens


@pytest.mark.parametrize(("can_see", "kinds"), [(True, ["text", "image"]), (False, ["text"])])
def test_pi_may_attach_images_if_the_model_takes_them(can_see: bool, kinds: list[str]) -> None:
    provider = pi_provider(dataclasses.replace(TARGET, can_see=can_see))
    assert provider["models"][0]["input"] == kinds


def test_cline_gets_a_separate_provider_and_no_daemon() -> None:
    setup = AGENTS["cline"].setup(TARGET)
    assert setup.environment["CLINE_SESSION_BACKEND_MODE"] == "local"
    providers = json.loads(setup.files["providers.json"])["providers"]
    settings = providers["openai-compatible"]["settings"]
    assert (settings["baseUrl"], settings["apiKey"]) == (f"{TARGET.url}/v1", TARGET.api_key)
    known = json.loads(setup.files["models.json"])["providers"]["openai-compatible"]["models"]
    assert known[TARGET.model]["contextWindow"] == TARGET.context_tokens
    unknown = AGENTS["cline"].setup(dataclasses.replace(TARGET, context_tokens=None))
    assert unknown.files.keys() == {"providers.json"}
