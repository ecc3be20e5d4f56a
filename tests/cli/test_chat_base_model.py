"""A base model is refused before it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.chat import NotAModel, _may_be_available
from holdfast.config import ModelSettings


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize("settings_file", [None, "{}", '{"chat_template": null}'])
def test_a_model_without_chat_template_is_refused_before_loading(
    settings_file: str | None, tmp_path: Path
) -> None:
    folder = model_folder(tmp_path)
    if settings_file is not None:
        (folder / "tokenizer_config.json").write_text(settings_file)
    with pytest.raises(NotAModel, match="no chat template: it is a base model"):
        _may_be_available(ModelSettings(path=str(folder)))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", "x"),
        ("chat_template.json", '{"chat_template": "x"}'),
        ("tokenizer_config.json", '{"chat_template": "x"}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": "x"}]}'),
        ("additional_chat_templates/tool_use.jinja", "x"),
    ],
)
def test_a_model_with_a_chat_template_is_not_refused(
    name: str, content: str, tmp_path: Path
) -> None:
    path = model_folder(tmp_path) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    assert _may_be_available(ModelSettings(path=str(tmp_path)))


@pytest.mark.parametrize("path", ["", "no/such-model", "/missing/folder"])
def test_a_model_that_is_not_local_is_not_checked(path: str) -> None:
    _may_be_available(ModelSettings(path=path))
