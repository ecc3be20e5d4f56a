"""The chat templates of a model folder: lists them, and checks that they can be parsed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from holdfast.errors import DamagedModel
from holdfast.models.model_folder import opened, read_json

_MOST_CHECKED_CHARACTERS = (
    1 << 20
)  # longer templates are not checked; parsing a template of that size takes a second


class GenerationBlock(Extension):
    """Renders {% generation %}…{% endgeneration %} as its content.

    The block marks answers for training.
    """

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements within the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# the extensions of chat templates, as in `transformers`
EXTENSIONS = (GenerationBlock, loopcontrols)


def template_sources(folder: Path) -> dict[str, str]:
    """The chat templates of a model by name; empty if it has none. Raises UnusableModel."""
    sources: dict[str, str] = {}
    for name in ("tokenizer_config.json", "chat_template.json"):
        if os.path.lexists(folder / name):
            sources |= _named_templates(read_json(folder / name).get("chat_template"))
    if os.path.lexists(path := folder / "chat_template.jinja"):
        sources["default"] = _read(path)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = _read(path)
    return sources


def check_templates(folder: Path) -> None:
    """Raise DamagedModel if a chat template cannot be parsed. Templates are not executed."""
    environment = ImmutableSandboxedEnvironment(extensions=EXTENSIONS)
    for name, source in template_sources(folder).items():
        if len(source) > _MOST_CHECKED_CHARACTERS:
            continue
        try:
            environment.parse(source)
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {error.message}"
            raise DamagedModel(
                f"{folder}: its chat template {name!r} is broken: {reason}"
            ) from None
        except RecursionError:
            raise DamagedModel(f"{folder}: its chat template {name!r} is nested too deep") from None


def _named_templates(value: Any) -> dict[str, str]:
    """The templates by name.

    `value` (`chat_template`) is one template, or a list of {"name": …, "template": …}.
    """
    if isinstance(value, str) and value:
        return {"default": value}
    if isinstance(value, list):
        return {
            str(item["name"]): str(item["template"])
            for item in value
            if isinstance(item, dict) and "template" in item and "name" in item
        }
    return {}


def _read(path: Path) -> str:
    """The text of a template. Raises UnusableModel, and ModelLoadError if it cannot be read now."""
    with opened(path) as file:
        content = file.read()
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise DamagedModel(f"{path} is not UTF-8: {error}") from error
