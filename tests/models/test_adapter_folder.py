from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ConfigError, ModelLoadError
from holdfast.models.adapter_folder import adapter_folders, checked_adapter, checked_adapters
from tests.fakes.adapters import RANK, SCALE, write_tiny_adapter


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny_adapter(tmp_path / "sql", "llama", seed=1, keys=["self_attn.q_proj"])


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        checked_adapter("sql", folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("adapter sql: ")
    return str(caught.value)


def test_a_setting_lists_adapters_by_name_and_folder(tmp_path: Path) -> None:
    assert adapter_folders(["sql=/a/b", "tone.2 = /c=d"]) == {
        "sql": Path("/a/b"),
        "tone.2": Path("/c=d"),
    }


@pytest.mark.parametrize("text", ["sql", "=folder", "sql=", "a b=folder", "a:b=x", "latest=folder"])
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(ConfigError, match="allowed: NAME=FOLDER"):
        adapter_folders([text])


def test_a_name_is_listed_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two adapters with the name sql"):
        adapter_folders(["sql=a", "sql=b"])


def test_an_adapter_of_mlx_lm_is_read(folder: Path) -> None:
    change_config(folder, model="someone/base")
    (files,) = checked_adapters([f"sql={folder}"])
    assert (files.kind, files.scale, files.trained_on) == ("lora", SCALE, "someone/base")
    assert all(
        {shape[-1], shape[0]} & {RANK} for each in files.shapes.values() for shape in each.values()
    )
    assert 0 < files.tensor_bytes < (folder / "adapters.safetensors").stat().st_size


def test_a_missing_folder_or_file_is_reported(folder: Path) -> None:
    assert "there is no folder" in refusal(folder.parent / "none")
    assert "adapter_config.json is not a folder" in refusal(folder / "adapter_config.json")
    (folder / "adapters.safetensors").rename(folder / "other.safetensors")
    assert "has no adapters.safetensors; an adapter is a folder with" in refusal(folder)


def test_the_format_of_peft_is_recognized(folder: Path) -> None:
    (folder / "adapters.safetensors").rename(folder / "adapter_model.safetensors")
    assert "the format of PEFT" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fine_tune_type": "full"}, ["'full'; possible: lora, dora", "mlx_lm.fuse"]),
        ({"lora_parameters": {"alpha": 16}}, ["no number lora_parameters.scale"]),
        ({"fine_tune_type": "dora"}, [".m"]),  # it has magnitudes
    ],
)
def test_an_unusable_configuration_is_refused_with_the_reason(
    folder: Path, changes: dict[str, Any], said: list[str]
) -> None:
    change_config(folder, **changes)
    assert all(text in refusal(folder) for text in said)


def test_a_truncated_file_is_reported(folder: Path) -> None:
    file = folder / "adapters.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "cut short" in refusal(folder)


def test_weights_of_no_adapter_are_refused(folder: Path) -> None:
    import mlx.core as mx

    file = str(folder / "adapters.safetensors")
    integers = {name: array.astype(mx.int32) for name, array in mx.load(file).items()}  # type: ignore[union-attr]
    mx.eval(integers)
    mx.save_safetensors(file, {"model.norm.weight": mx.ones(4)})
    assert "model.norm.weight, which is no weight of a lora adapter" in refusal(folder)
    mx.save_safetensors(file, integers)
    assert "as I32; possible: F32, F16, BF16" in refusal(folder)
