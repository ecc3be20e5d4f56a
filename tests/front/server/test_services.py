from __future__ import annotations

import pytest

from holdfast.config import ServerSettings
from holdfast.errors import UnknownModel
from holdfast.front.server.services import Services, model_of, named_model
from tests.fakes.scripted_gateway import (
    ScriptedDirectory,
    ScriptedGateway,
    model_status,
    scripted_services,
)


def services(*aliases: str, models: tuple[str, ...] = ("big", "small")) -> Services:
    """Models that each have an alias: the name with a 2."""
    directory = ScriptedDirectory(
        models=tuple(model_status(id=model, aliases=(model + "2",)) for model in models)
    )
    return scripted_services(
        ScriptedGateway(), directory=directory, server=ServerSettings(model_aliases=aliases)
    )


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (None, "big"),
        ("small", "small"),
        ("claude-haiku-4-5", "small"),
        ("claude-opus-4", "big"),
        ("small2", "small"),
        ("other", "small"),
        ("gpt", "gpt"),
        ("Claude-opus", "Claude-opus"),
        ("", ""),
    ],
)
def test_the_first_matching_pattern_selects_the_model(name: str | None, model: str) -> None:
    assert model_of(services("claude-*haiku* = small", "claude-*", "other=small2"), name) == model


def test_a_served_name_overrides_patterns() -> None:
    assert model_of(services("*", models=("big", "claude-x")), "claude-x") == "claude-x"


def test_a_pattern_that_names_a_missing_model_is_unknown() -> None:
    with pytest.raises(UnknownModel, match="claude-x"):
        named_model(services("claude-*=gone"), "claude-x")


def test_without_models_a_pattern_selects_any() -> None:
    assert model_of(services("claude-*", models=()), "claude-x") == ""
