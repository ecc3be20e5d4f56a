from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.machine import device_memory
from holdfast.worker.cpu import packed_layers
from holdfast.worker.engine import weight_format
from holdfast.worker.engine.load import LoadedModel, load_model, vocabulary_size
from tests.fakes.architectures import FAST
from tests.fakes.tiny_models import CONTEXT_TOKENS, TINY, VOCAB_SIZE, kept_tiny, write_tiny

TOKENS = mx.array([[(i * 7) % 90 + 2 for i in range(20)]])


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(folder, ModelSettings(**settings), progress=lambda stage, fraction: None)


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **settings)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "kelp", "llama")


def test_a_loaded_model_answers_like_the_saved_one(folder: Path) -> None:
    loaded = load(folder)
    assert mx.array_equal(loaded.model(TOKENS), kept_tiny("llama")(TOKENS))
    assert (loaded.model_type, loaded.context_tokens, loaded.vocab_size) == (
        "llama",
        CONTEXT_TOKENS,
        VOCAB_SIZE,
    )
    parameters = sum(array.size for _, array in tree_flatten(kept_tiny("llama").parameters()))
    assert (loaded.parameters, loaded.weight_bytes) == (parameters, 4 * parameters)
    assert loaded.weight_format.note == ""


def test_the_free_memory_does_not_change_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, "qwen3", {"group_size": 32, "bits": 4}, dtype=mx.bfloat16)
    preferred = load(folder)
    size = preferred.weight_bytes
    kept_packed = []
    for available in (size, size * 17 // 16):
        monkeypatch.setattr(device_memory, "usable_bytes", lambda _, found=available: found)
        monkeypatch.setattr(weight_format, "_gib", str)
        kept_packed.append(load(folder))
    first, second = kept_packed
    assert first.weight_format.note != second.weight_format.note
    assert first.computed_as == second.computed_as != preferred.computed_as


def test_a_quantized_model_answers_like_its_packed_self(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "qwen3", {"group_size": 32, "bits": 4}, dtype=mx.bfloat16)
    unpacked, packed = (
        load(folder, dequantize="always", dtype="float32"),
        load(folder, dequantize="never", dtype="float32"),
    )
    assert unpacked.weight_bytes > 4 * packed.weight_bytes
    assert unpacked.parameters == packed.parameters
    assert float(mx.abs(unpacked.model(TOKENS) - packed.model(TOKENS)).max()) < 1e-4


def test_the_number_format_can_be_chosen(folder: Path) -> None:
    assert load(folder, dtype="float16").compute_dtype == mx.float16


def test_progress_goes_from_zero_to_one(folder: Path) -> None:
    steps: list[tuple[str, float]] = []
    load_model(
        folder, ModelSettings(), progress=lambda stage, fraction: steps.append((stage, fraction))
    )
    assert [stage for stage, _ in steps][:2] == ["checking", "building"]
    fractions = [fraction for _, fraction in steps]
    assert fractions == sorted(fractions)
    assert steps[-1] == ("reading", 1.0)


def test_an_unknown_architecture_is_reported_with_the_version(folder: Path) -> None:
    change_config(folder, model_type="kelp9")
    assert "'kelp9' is not supported by mlx-lm 0." in refusal(folder)
    change_config(folder, model_type="../../evil")
    assert "is not supported" in refusal(folder)


def test_a_module_that_exits_at_import_is_survived(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # its module calls exit(1) if a package is missing; another test may have imported both
    for module in ("hf_olmo", "mlx_lm.models.olmo"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    change_config(folder, model_type="olmo")
    assert "'olmo' cannot be imported" in refusal(folder)


def test_missing_unexpected_and_misshapen_weights_are_reported(folder: Path) -> None:
    weights = dict(mx.load(str(folder / "model.safetensors")))
    mx.eval(weights)
    norm = weights.pop("model.norm.weight")
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    assert "model.norm.weight" in refusal(folder)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        {**weights, "model.norm.weight": norm, "model.extra": norm},
    )
    assert "model.extra" in refusal(folder)
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**weights, "model.norm.weight": norm[:5]}
    )
    assert "model.norm.weight" in refusal(folder)


def test_an_unusable_configuration_is_reported(folder: Path) -> None:
    for wrong in (
        {"hidden_size": None},
        {"num_attention_heads": "four"},
        {"rope_scaling": {"type": "no"}},
        {"quantization": 7},
    ):
        saved = (folder / "config.json").read_text()
        change_config(folder, **wrong)
        message = refusal(folder)
        assert "cannot be loaded" in message or "does not fit mlx-lm" in message
        (folder / "config.json").write_text(saved)
    config = json.loads((folder / "config.json").read_text())
    del config["intermediate_size"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "intermediate_size" in refusal(folder)


def test_a_truncated_file_is_reported_before_it_is_read(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "cut short" in refusal(folder)


def test_a_window_beyond_the_models_own_is_refused(folder: Path) -> None:
    assert load(folder, context_tokens=100).context_tokens == 100
    assert "more than the model's own" in refusal(folder, context_tokens=CONTEXT_TOKENS + 1)


def test_a_models_own_code_runs_only_if_trusted(folder: Path) -> None:
    (folder / "kelp.py").write_text("from mlx_lm.models.llama import Model, ModelArgs\n")
    change_config(folder, model_type="kelp", model_file="kelp.py")
    assert "trust_remote_code" in refusal(folder)
    before = sorted(folder.rglob("*"))
    loaded = load(folder, trust_remote_code=True)
    assert mx.array_equal(loaded.model(TOKENS), kept_tiny("llama")(TOKENS))
    assert sorted(folder.rglob("*")) == before


def test_the_models_folder_is_never_written_to(folder: Path) -> None:
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()}
    folder.chmod(0o500)
    try:
        load(folder)
    finally:
        folder.chmod(0o700)
    assert {
        file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.iterdir()
    } == before


PACKED = {"group_size": 32, "bits": 4}
UNPACKED_DAILY = {"llama", "gpt_oss", "qwen3_next", "mamba2"}


@pytest.mark.parametrize(
    ("name", "quantize"),
    [
        pytest.param(name, quantize, marks=[] if name in daily else pytest.mark.slow)
        for daily, quantize in ((FAST, PACKED), (UNPACKED_DAILY, None))
        for name in sorted(TINY)
    ],
)
def test_every_tiny_architecture_loads(
    name: str,
    quantize: dict[str, Any] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_tiny(tmp_path, name, quantize)
    loaded = load(folder)
    assert (loaded.vocab_size, loaded.context_tokens) == (VOCAB_SIZE, CONTEXT_TOKENS)
    monkeypatch.setattr(packed_layers, "unavailable", lambda: "MLX is to compute this")
    expected = (
        load(folder, dequantize="never").model(TOKENS) if quantize else kept_tiny(name)(TOKENS)
    )
    assert float(mx.abs(loaded.model(TOKENS) - expected).max()) < 1e-3


@pytest.mark.parametrize("name", ["llama", "llama4_text", "mamba", "qwen3_5"])
def test_the_vocabulary_size_is_the_width_of_the_logits(name: str) -> None:
    assert vocabulary_size(kept_tiny(name), {}) == VOCAB_SIZE
    assert vocabulary_size(kept_tiny(name), {"vocab_size": 5}) == VOCAB_SIZE
