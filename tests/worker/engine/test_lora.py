from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.models.adapter_folder import checked_adapters
from holdfast.worker.engine.fingerprint import (
    adapter_fingerprint,
    files_of_identity,
    model_fingerprint,
)
from holdfast.worker.engine.load import LoadedModel, load_model
from holdfast.worker.engine.lora import Adapters, attach
from holdfast.worker.engine.mlx_lm_hooks import ProjectionHook
from tests.fakes.adapters import adapted_by_mlx_lm, write_tiny_adapter
from tests.fakes.tiny_models import TINY, make_tiny, write_tiny

IDS = mx.array([[(i * 7) % 90 + 2 for i in range(12)]])


def attached(model: Any, *folders: Path) -> Adapters:
    listed = [f"{folder.name}={folder}" for folder in folders]
    adapters = attach(model, checked_adapters(listed), compute_dtype=mx.float32)
    assert adapters is not None
    return adapters


def load(folder: Path, *adapters: Path, **settings: Any) -> LoadedModel:
    listed = tuple(f"{adapter.name}={adapter}" for adapter in adapters)
    return load_model(
        folder, ModelSettings(adapters=listed, **settings), progress=lambda stage, fraction: None
    )


def refusal(model: Any, folder: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        attached(model, folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_different_adapters_share_a_pass(tmp_path: Path, name: str) -> None:
    """Each row is a separate sequence here; qwen2 has layers with a bias."""
    model = make_tiny(name)
    rows = mx.array([[5], [9], [5], [70], [9]])
    plain = model(rows)
    keys = ["self_attn.v_proj", "mlp.down_proj"]
    adapters = attached(
        model,
        write_tiny_adapter(tmp_path / "sql", name, seed=1),
        write_tiny_adapter(tmp_path / "tone", name, seed=2, rank=6, keys=keys, scale=2.0),
        write_tiny_adapter(tmp_path / "dora", name, seed=3, kind="dora", keys=keys[:1]),
    )
    with adapters.applied([("", 1), ("sql", 2), ("tone", 1), ("dora", 1)]):
        mixed = model(rows)
    assert mx.array_equal(mixed[0], plain[0])
    for row, adapter in ((1, "sql"), (2, "sql"), (3, "tone"), (4, "dora")):
        alone = adapters.call(adapter, model, rows[row : row + 1])[0]
        assert float(mx.abs(mixed[row] - alone).max()) < 1e-4
        assert float(mx.abs(mixed[row] - plain[row]).max()) > 0.05


def test_parameters_and_their_names_do_not_change(tmp_path: Path) -> None:
    model = make_tiny("llama")
    names = [path for path, _ in tree_flatten(model.parameters())]
    attached(model, write_tiny_adapter(tmp_path / "sql", "llama", seed=1))
    assert [path for path, _ in tree_flatten(model.parameters())] == names


def test_the_projection_hook_and_a_head_adapter_work_together(tmp_path: Path) -> None:
    folder = write_tiny_adapter(tmp_path / "sql", "stablelm", seed=1, keys=["lm_head"])
    model = make_tiny("stablelm")
    plain = model(IDS)
    adapters = attached(model, folder)
    head = ProjectionHook(model)
    expected = adapted_by_mlx_lm(make_tiny("stablelm"), folder)(IDS)
    with adapters.applied([("sql", IDS.size)]), head.selecting(mx.array([3])):
        selected = model(IDS)
    assert head.used
    assert float(mx.abs(selected[0] - expected[0, 3]).max()) < 1e-4
    assert float(mx.abs(selected[0] - plain[0, 3]).max()) > 0.1
    assert mx.array_equal(model(IDS), plain)


def test_adapters_count_as_memory_of_weights(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    adapter = write_tiny_adapter(tmp_path / "sql", "llama", seed=1)
    (files,) = checked_adapters([f"sql={adapter}"])
    assert load(folder, adapter).weight_bytes - load(folder).weight_bytes == files.tensor_bytes


@pytest.mark.parametrize("dequantize", ["never", "always"])
def test_an_adapter_of_a_quantized_model_is_applied(tmp_path: Path, dequantize: str) -> None:
    quantize = {"group_size": 32, "bits": 4}
    folder = write_tiny(tmp_path / "model", "qwen3", quantize, dtype=mx.bfloat16)
    adapter = write_tiny_adapter(tmp_path / "sql", "qwen3", seed=1)
    loaded = load(folder, adapter, dequantize=dequantize, dtype="float32")
    plain_model = load(folder, dequantize=dequantize, dtype="float32").model
    plain = loaded.model(IDS)
    expected = adapted_by_mlx_lm(plain_model, adapter)(IDS)
    assert loaded.adapters is not None
    assert float(mx.abs(loaded.adapters.call("sql", loaded.model, IDS) - expected).max()) < 1e-4
    assert float(mx.abs(expected - plain).max()) > 0.1
    assert mx.array_equal(loaded.model(IDS), plain)


# -- adapters of other models


def test_an_adapter_of_a_larger_model_is_refused_with_both_shapes(tmp_path: Path) -> None:
    wide = make_tiny("llama", hidden_size=2 * TINY["llama"]["hidden_size"])
    folder = write_tiny_adapter(tmp_path / "sql", "llama", seed=1, model="someone/base")
    said = refusal(wide, folder)
    assert said.startswith(f"adapter sql in {folder} does not fit this model: model.layers.0.")
    assert "down_proj.lora_b has the shape 4 × 64, but the model needs 4 × 128" in said
    assert said.endswith("(it was trained on someone/base)")


def test_an_adapter_of_a_deeper_model_is_refused_with_the_depth(tmp_path: Path) -> None:
    layers = TINY["llama"]["num_hidden_layers"]
    shallow = make_tiny("llama", num_hidden_layers=layers - 1)
    said = refusal(shallow, write_tiny_adapter(tmp_path / "sql", "llama", seed=1))
    assert f"has no layer model.layers.{layers - 1}." in said
    assert f"; it has {layers - 1} layers" in said


def test_an_adapter_of_another_architecture_is_refused(tmp_path: Path) -> None:
    said = refusal(make_tiny("llama"), write_tiny_adapter(tmp_path / "sql", "mamba2", seed=1))
    assert "the model has no layer backbone.layers.0." in said


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_an_adapter_whose_training_diverged_is_refused(tmp_path: Path, bad: float) -> None:
    folder = write_tiny_adapter(tmp_path / "sql", "llama", seed=1)
    file = folder / "adapters.safetensors"
    weights = {**mx.load(str(file))}  # type: ignore[dict-item]
    name = next(name for name in weights if name.endswith("q_proj.lora_b"))
    weights[name][0, 0] = bad
    mx.save_safetensors(str(file), weights)
    said = refusal(make_tiny("llama"), folder)
    assert said.startswith(f"adapter sql in {folder} is unusable: {name} contains NaN or infinity")


def test_an_overflowing_adapter_leaves_other_rows_alone(tmp_path: Path) -> None:
    model = make_tiny("llama")
    rows = mx.array([[5], [9]])
    plain = model(rows)
    huge = write_tiny_adapter(tmp_path / "huge", "llama", seed=1)
    file = huge / "adapters.safetensors"
    weights = {
        name: array if name.endswith("lora_b") else mx.full(array.shape, 3e38)
        for name, array in mx.load(str(file)).items()  # type: ignore[union-attr]
    }
    mx.save_safetensors(str(file), weights)
    adapters = attached(model, huge)
    with adapters.applied([("", 1), ("huge", 1)]):
        mixed = model(rows)
    assert mx.array_equal(mixed[0], plain[0])
    assert not mx.isfinite(mixed[1]).all().item()


def test_adapters_beyond_memory_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "model", "llama")
    adapter = write_tiny_adapter(tmp_path / "sql", "llama", seed=1)
    monkeypatch.setattr("holdfast.machine.device_memory.usable_bytes", lambda working_set: 1000)
    with pytest.raises(ModelLoadError, match=r"the largest is sql in .*sql with 0\.0 GiB"):
        load(folder, adapter)


# -- fingerprints


def test_only_parts_that_affect_an_adapters_kv_change_its_fingerprint(tmp_path: Path) -> None:
    base = write_tiny(tmp_path / "model", "llama")
    first = write_tiny_adapter(tmp_path / "a", "llama", seed=1)
    twin = write_tiny_adapter(tmp_path / "b", "llama", seed=1, iters=1000, data="elsewhere")
    other = write_tiny_adapter(tmp_path / "c", "llama", seed=2)
    rescaled = write_tiny_adapter(tmp_path / "d", "llama", seed=1)
    config = rescaled / "adapter_config.json"
    config.write_text(config.read_text().replace('"scale": 4.0', '"scale": 5.0'))
    folders = {path.name: path for path in (first, twin, other, rescaled)}
    files = files_of_identity(base, runs_own_code=False, adapters=folders)
    hashes = {name: _hash(path) for name, path in files.items()}
    without = {name: value for name, value in hashes.items() if not name.startswith("adapter/")}
    versions = ("1", "2")
    model = model_fingerprint(base, hashes, computed_as="", versions=versions)
    assert model == model_fingerprint(base, without, computed_as="", versions=versions)
    checked = checked_adapters(f"{name}={folder}" for name, folder in folders.items())
    found = {each.name: adapter_fingerprint(model, each, hashes) for each in checked}
    assert found["a"] == found["b"]
    assert len({model, found["a"], found["c"], found["d"]}) == 4
    assert adapter_fingerprint("another model", checked[0], hashes) != found["a"]


def _hash(path: Path) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(path.read_bytes())
