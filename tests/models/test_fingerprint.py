"""A fingerprint changes with everything that changes keys and values, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.models import fingerprint
from holdfast.models.fingerprint import model_fingerprint
from tests.fakes.tiny_models import write_tiny


def print_of(folder: Path, *, computed_as: str = "float32", mlx_lm_version: str = "1") -> str:
    return model_fingerprint(folder, computed_as=computed_as, mlx_lm_version=mlx_lm_version)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "llama")


def _flip_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def _change_rope(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 12345.0}))


def _change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")


@pytest.mark.parametrize("change", [_flip_a_weight, _change_rope, _change_tokenizer])
def test_what_changes_the_computation_changes_the_fingerprint(model: Path, change: Callable[[Path], None]) -> None:
    before = print_of(model)
    change(model)
    assert print_of(model) != before


def test_how_it_is_computed_is_part_of_it(model: Path) -> None:
    prints = {print_of(model), print_of(model, computed_as="bfloat16"), print_of(model, mlx_lm_version="2")}
    assert len(prints) == 3


def test_two_models_of_one_geometry_differ(tmp_path: Path) -> None:
    assert print_of(write_tiny(tmp_path / "a", "llama", seed=1)) != print_of(write_tiny(tmp_path / "b", "llama", seed=2))


def test_a_copy_with_another_template_and_date_has_the_same(model: Path, tmp_path: Path) -> None:
    before = print_of(model)
    copy = shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "_name_or_path": "elsewhere"}, indent=1))
    assert print_of(copy) == before


def test_a_large_file_is_sampled_over_its_whole_length(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "_WHOLE_BYTES", 1000)
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 4096)
    before = print_of(model)
    _flip_a_weight(model)
    assert print_of(model) != before
