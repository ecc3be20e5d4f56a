from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.conversion import Conversion, convert_model
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.models.demo import demo_folder


def test_a_model_is_quantized_and_what_comes_out_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "new" / "packed"
    size = convert_model(
        Conversion(source=str(demo_folder()), target=str(target), bits=4, group_size=32)
    )
    assert (
        size
        == (target / "model.safetensors").stat().st_size
        < 0.4 * (demo_folder() / "model.safetensors").stat().st_size
    )
    quantization = json.loads((target / "config.json").read_text())["quantization"]
    assert (quantization["bits"], quantization["group_size"]) == (4, 32)
    assert [path.name for path in target.parent.iterdir()] == ["packed"]


def test_what_cannot_be_converted_leaves_nothing_and_says_why(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "kelp"}')
    (source / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="could not be converted: "):
        convert_model(Conversion(source=str(source), target=str(tmp_path / "packed"), bits=4))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_that_is_there_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is there already"):
        convert_model(Conversion(source=str(demo_folder()), target=str(tmp_path)))


def test_a_place_where_nothing_can_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"packed cannot be made: (File exists|Not a directory)"):
        convert_model(
            Conversion(source=str(demo_folder()), target=str(tmp_path / "file" / "packed"))
        )
