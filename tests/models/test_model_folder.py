from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.model_folder import checked_config
from holdfast.models.weight_files import checked_tensor_bytes


def write_safetensors(file: Path, values: int = 4) -> bytes:
    header = json.dumps(
        {
            "w": {"dtype": "F32", "shape": [values], "data_offsets": [0, 4 * values]},
            "__metadata__": {"a": "b"},
        }
    ).encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4 * values)
    file.write_bytes(content)
    return content


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    write_safetensors(tmp_path / "model.safetensors")
    return tmp_path


def inspect(folder: Path) -> None:
    checked_config(folder)
    checked_tensor_bytes(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        inspect(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_complete_folder_is_described(folder: Path) -> None:
    write_safetensors(folder / "model-00002.safetensors", values=8)
    assert checked_config(folder) == {"model_type": "llama"}
    assert checked_tensor_bytes(folder) == 48


def test_a_missing_folder_or_a_file_instead_is_reported(folder: Path) -> None:
    assert "there is no model folder" in refusal(folder / "nowhere")
    assert f"use its folder instead: {folder}" in refusal(folder / "model.safetensors")
    assert "is a file" in refusal(Path(__file__))


def test_a_mistyped_path_gets_the_nearest_name_as_hint(tmp_path: Path) -> None:
    (tmp_path / "Qwen3-4B-4bit").mkdir()
    assert f"did you mean {tmp_path / 'Qwen3-4B-4bit'}?" in refusal(tmp_path / "Qwen-4B-4bit")
    assert "did you mean" not in refusal(tmp_path / "something else")


def test_a_gguf_file_is_refused_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "Model.GGUF").write_bytes(b"GGUF")
    said = refusal(tmp_path / "Model.GGUF")
    assert all(part in said for part in ("GGUF", "llama.cpp", "mlx-community", "mlx_lm.convert"))
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "model.gguf").write_bytes(b"GGUF")
    assert "mlx_lm.convert" in refusal(tmp_path / "inner")


def test_the_folder_of_an_adapter_gets_a_hint(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = refusal(tmp_path)
    assert said.endswith(f"an adapter; to serve it: holdfast serve MODEL --adapter NAME={tmp_path}")


def test_the_parent_of_a_model_folder_gets_a_hint(folder: Path) -> None:
    above = folder / "above"
    (above / "snapshots" / "abc").mkdir(parents=True)
    (above / "snapshots" / "abc" / "config.json").write_text("{}")
    assert f"did you mean {above / 'snapshots' / 'abc'}?" in refusal(above)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b"[]", "does not contain a JSON object"),
        (b"{}", "model_type"),
    ],
)
def test_a_broken_configuration_is_reported(folder: Path, content: bytes, expected: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert expected in refusal(folder)


def test_a_missing_configuration_is_reported(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(folder)


def test_a_file_truncated_anywhere_is_reported(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    for length in range(len(content)):
        (folder / "model.safetensors").write_bytes(content[:length])
        assert "damaged" in refusal(folder)


def test_trailing_bytes_and_a_foreign_header_are_reported(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"more")
    assert "bytes expected" in refusal(folder)
    for header in (
        b'{"w": 1}',
        b"[1, 2]  ",
        b'{"w": {"data_offsets": ["a", "b"]}}',
        b'{"w": {"data_offsets": []}}',
        b"not json",
    ):
        file.write_bytes(struct.pack("<Q", len(header)) + header)
        assert "damaged" in refusal(folder)


def test_a_git_lfs_pointer_is_reported(folder: Path) -> None:
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    )
    assert "git lfs pull" in refusal(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    names = {f"w{i}": f"model-{i}.safetensors" for i in range(5)}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"w": "model.safetensors", **names}})
    )
    message = refusal(folder)
    assert "lacks 5 of 6 weight files" in message
    assert "model-0.safetensors, model-1.safetensors, model-2.safetensors and 2 more" in message


@pytest.mark.parametrize("content", ["{}", '{"weight_map": 7}', "{"])
def test_a_broken_index_is_reported(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(folder)


def test_weights_of_another_format_are_reported(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert "only pytorch_model.bin" in refusal(folder)
