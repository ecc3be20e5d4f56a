from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ModelLoadError, UnusableModel
from holdfast.models.download import demo_folder
from holdfast.models.fit import size_of_folder, size_on_hub
from holdfast.models.hub import ModelSource
from tests.fakes.foreign_weights import (
    Quantize,
    awq,
    bare_fp8,
    fp8_tensor,
    is_linear,
    replaced,
    safetensors_bytes,
    write_safetensors,
)
from tests.fakes.hub import HubState, hub_in_place
from tests.fakes.tiny_models import make_tiny, write_tiny

SOURCE = ModelSource(kind="hub", name="coast/kelp-small")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        yield state


def parameters(name: str) -> int:
    from mlx.utils import tree_flatten

    return sum(array.size for _, array in tree_flatten(make_tiny(name).parameters()))


def test_a_hub_models_size_is_known_without_a_download(hub: HubState, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", "qwen3")
    hub.repositories[SOURCE.name] = {file.name: file.read_bytes() for file in folder.iterdir()}
    found, here = size_on_hub(SOURCE), size_of_folder(folder)
    assert found == here
    assert here.parameters == parameters("qwen3")
    assert here.weight_bytes == 4 * here.parameters
    assert here.bits_per_weight == 32
    assert not (tmp_path / "cache").exists()
    weights = [line for line in hub.requests if "model.safetensors" in line]
    assert weights == [f"GET /{SOURCE.name}/resolve/main/model.safetensors bytes=0-100000"]


@pytest.mark.parametrize("group_size", [32, 64])
def test_quantized_weights_count_one_by_one(tmp_path: Path, group_size: int) -> None:
    plain = size_of_folder(write_tiny(tmp_path / "plain", "llama"))
    packed = size_of_folder(
        write_tiny(tmp_path / "packed", "llama", {"group_size": group_size, "bits": 4})
    )
    assert packed.parameters == plain.parameters
    assert packed.weight_bytes < plain.weight_bytes / 2


def test_the_bundled_models_size_is_that_of_its_file() -> None:
    stored = size_of_folder(demo_folder())
    assert stored.weight_bytes == pytest.approx(
        (demo_folder() / "model.safetensors").stat().st_size, rel=0.01
    )


@pytest.mark.parametrize(
    ("files", "gated", "said"),
    [
        ({"kelp.Q4_K_M.gguf": b"GGUF"}, False, r"has no files of an MLX model.*only GGUF files"),
        ({}, True, "is gated: accept its terms on the Hub and set HF_TOKEN"),
        (None, False, "no model coast/kelp-small on the Hub"),
    ],
)
def test_a_model_whose_size_is_unknown_is_explained(
    hub: HubState, files: dict[str, bytes] | None, gated: bool, said: str
) -> None:
    hub.repositories = {} if files is None else {SOURCE.name: files}
    hub.gated = {SOURCE.name} if gated else set()
    with pytest.raises(ModelLoadError, match=said):
        size_on_hub(SOURCE)


def test_weights_in_another_tools_format_are_counted_unpacked(tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "plain", "llama")
    parameters_of_plain = size_of_folder(plain).parameters
    folder = write_tiny(tmp_path / "awq", "llama")
    quantized_with_awq(folder)
    assert size_of_folder(folder).parameters == parameters_of_plain


def quantized_with_awq(folder: Path) -> None:
    import mlx.core as mx

    loaded = mx.load(str(folder / "model.safetensors"))
    assert isinstance(loaded, dict)
    tensors = {name: np.array(array) for name, array in loaded.items()}
    foreign, _ = replaced(tensors, awq(), is_quantized=is_linear)
    write_safetensors(folder / "model.safetensors", foreign)
    config = json.loads((folder / "config.json").read_text())
    method = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


@pytest.mark.parametrize(
    ("quantize", "file", "said"),
    [
        (bare_fp8, "", "quantized as FP8"),
        (fp8_tensor(), "hf_quant_config.json", r"quantized as ModelOpt \(FP8\)"),
    ],
)
def test_unreadable_weights_are_reported_before_a_download(
    hub: HubState, quantize: Quantize, file: str, said: str
) -> None:
    weights = {"model.layers.0.self_attn.q_proj.weight": np.ones((32, 32), np.float32)}
    foreign, _ = replaced(weights, quantize, is_quantized=is_linear)
    files = {
        "config.json": b'{"model_type": "llama"}',
        "model.safetensors": safetensors_bytes(foreign),
    }
    if file:
        files[file] = b'{"quantization": {"quant_algo": "FP8"}}'
    hub.repositories[SOURCE.name] = files
    with pytest.raises(UnusableModel, match=said):
        size_on_hub(SOURCE)
