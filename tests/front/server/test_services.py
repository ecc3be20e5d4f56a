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
    """Of models of which each has an alias as well: its name and a 2."""
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
def test_the_first_pattern_that_fits_tells_the_model(name: str | None, model: str) -> None:
    assert model_of(services("claude-*haiku* = small", "claude-*", "other=small2"), name) == model


def test_a_name_that_is_served_is_nobody_elses() -> None:
    assert model_of(services("*", models=("big", "claude-x")), "claude-x") == "claude-x"


def test_a_model_that_a_pattern_names_in_vain_is_not_there() -> None:
    with pytest.raises(UnknownModel, match="claude-x"):
        named_model(services("claude-*=gone"), "claude-x")


def test_without_models_no_name_means_any() -> None:
    assert model_of(services("claude-*", models=()), "claude-x") == ""
