"""Which models may draft for each other: the contents of their tokenizers decide."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.models import draft_pairs
from holdfast.models.download import demo_folder
from holdfast.models.draft_pairs import (
    LocalModel,
    check_pair,
    check_speculation,
    draft_of,
    found_draft,
)

DEMO = LocalModel(name="holdfast-demo", folder=demo_folder())
DRAFT_ID = "holdfast-demo-draft"


def copied(folder: Path, change: Callable[[dict[str, Any]], None] = lambda tokenizer: None) -> Path:
    """A copy of the bundled draft model with another tokenizer.json."""
    shutil.copytree(demo_folder(DRAFT_ID), folder)
    file = folder / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    change(tokenizer)
    file.write_text(json.dumps(tokenizer))
    return folder


def allow_small_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_pairs, "_LEAST_MODEL_BYTES", 1 << 20)
    monkeypatch.setattr(draft_pairs, "_LARGEST_DRAFT_SHARE", 0.25)


def swap_two(tokenizer: dict[str, Any]) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


def add_one(tokenizer: dict[str, Any]) -> None:
    last = dict(tokenizer["added_tokens"][-1], id=1536, content="<|another|>")
    tokenizer["added_tokens"].append(last)


def make_ordinary(tokenizer: dict[str, Any]) -> None:
    tokenizer["added_tokens"][1]["special"] = False


def test_the_bundled_models_are_a_pair() -> None:
    check_pair(DEMO, LocalModel(name=DRAFT_ID, folder=demo_folder(DRAFT_ID)))


def test_file_names_and_formats_do_not_matter(tmp_path: Path) -> None:
    check_pair(DEMO, LocalModel(name="a copy", folder=copied(tmp_path / "something else")))


@pytest.mark.parametrize("change", [swap_two, add_one, make_ordinary])
def test_models_with_different_tokens_are_not_a_pair(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    other = LocalModel(name="other", folder=copied(tmp_path / "other", change))
    with pytest.raises(ModelLoadError, match="other cannot draft for holdfast-demo"):
        check_pair(DEMO, other)


def test_the_setting_accepts_bundled_folder_and_catalog_models(tmp_path: Path) -> None:
    folder = copied(tmp_path / "copy")
    listed = [ModelSettings(path=str(folder), name="small")]
    for setting, expected in (
        (DRAFT_ID, demo_folder(DRAFT_ID)),
        (str(folder), folder),
        ("small", folder),
    ):
        found = draft_of(DEMO, setting, listed=listed, environ={"HF_HOME": str(tmp_path)})
        assert found == LocalModel(name=setting, folder=expected)
    assert draft_of(DEMO, "off", listed=listed, environ={}) is None


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nothing", "there is no model folder nothing"),
        ("ON", "there is no model folder ON"),
        ("/nowhere/none", "there is no model folder /nowhere/none"),
        ("holdfast-demo", "a model cannot draft for itself"),
        (str(demo_folder()), "a model cannot draft for itself"),
    ],
)
def test_a_setting_that_names_the_same_model_is_refused(setting: str, reason: str) -> None:
    with pytest.raises(ModelLoadError) as raised:
        draft_of(DEMO, setting, environ={})
    assert str(raised.value).startswith(f"speculation = {setting}: {reason}")
    assert str(raised.value).endswith("Allowed: auto, off, or a model (its name, folder or Hub id)")
    settings = ModelSettings(path=str(demo_folder()), speculation=setting)
    if setting != "holdfast-demo":  # with another name, only the folder tells
        with pytest.raises(ModelLoadError, match=reason):
            check_speculation(settings)


def test_a_draft_model_is_found_by_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"HF_HOME": str(tmp_path / "hub")}
    # the bundled model is too small for a profitable draft model
    assert draft_of(DEMO, "auto", environ=environ) is None
    allow_small_models(monkeypatch)
    found = draft_of(DEMO, "auto", environ=environ)
    assert found == LocalModel(name=DRAFT_ID, folder=demo_folder(DRAFT_ID))
    snapshot = tmp_path / "hub" / "hub" / "models--coast--other" / "snapshots" / "1"
    copied(snapshot, swap_two)
    assert draft_of(DEMO, "auto", environ=environ) == found


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 3}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": 3}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": 7}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"content": "\\ud800"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {}, "07": {}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [7]}'),
        ("tokenizer_config.json", '{"eos_token": "\\ud800"}'),
        ("tokenizer_config.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "\x00"),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", ""),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", None),
        ("tokenizer_config.json", None),
        ("special_tokens_map.json", None),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors.index.json", None),
    ],
)
def test_a_damaged_model_does_not_hide_another_candidate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str | None
) -> None:
    """None: the file cannot be read."""
    allow_small_models(monkeypatch)
    folder = copied(tmp_path / "broken")
    (folder / file).unlink(missing_ok=True)
    if content is None:
        (folder / file).symlink_to("long" * 1000)  # even root gets OSError
    else:
        (folder / file).write_text(content)
    broken = LocalModel(name="broken", folder=folder)
    sound = LocalModel(name=DRAFT_ID, folder=demo_folder(DRAFT_ID))
    assert found_draft(DEMO, [broken, sound]) == sound
    assert found_draft(DEMO, [broken]) is None


def test_a_model_in_an_unreadable_folder_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allow_small_models(monkeypatch)
    listed = [ModelSettings(path=str(tmp_path / ("long" * 1000)))]
    found = draft_of(DEMO, "auto", listed=listed, environ={"HF_HOME": str(tmp_path)})
    assert found == LocalModel(name=DRAFT_ID, folder=demo_folder(DRAFT_ID))


def test_models_that_are_not_much_smaller_are_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_pairs, "_LEAST_MODEL_BYTES", 1 << 20)
    copy = shutil.copytree(DEMO.folder, tmp_path / "copy")
    same = LocalModel(name="same", folder=copy)
    broken = LocalModel(name="broken", folder=tmp_path)
    assert found_draft(DEMO, [same, broken]) is None
