"""Doctor loads and probes a model in a separate process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from holdfast.cli.doctor import check_model
from holdfast.config import ModelSettings
from holdfast.errors import HoldfastError
from tests.fakes.tiny_models import write_tiny
from tests.fakes.vision_models import write_vision_model


def test_it_finds_the_layout_and_the_reason(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_next")
    found = check_model(ModelSettings(path=str(tmp_path)))
    assert found.layout == "split"
    assert "recurrent" in found.layout_reason
    assert found.model_type == "qwen3_next"
    assert found.parameters > 0
    assert found.attention.startswith(("the C kernel", "MLX"))
    assert found.kept_layers == 0
    assert found.vision is None


def test_it_tells_that_a_model_takes_images(tmp_path: Path) -> None:
    write_vision_model(tmp_path / "seeing", "llava")
    seeing = check_model(ModelSettings(path=str(tmp_path / "seeing")))
    assert seeing.vision is not None and not (seeing.vision.refused or seeing.vision.reuse_refused)


@pytest.mark.parametrize("switch", ["1", "0"])
def test_it_tells_whether_quantized_weights_stay_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    monkeypatch.setenv("HOLDFAST_KERNELS", switch)
    write_tiny(tmp_path, "llama", {"group_size": 32, "bits": 4})
    found = check_model(ModelSettings(path=str(tmp_path)))
    if switch == "0":
        assert found.weights_note == "quantized weights are unpacked: HOLDFAST_KERNELS is 0"
    assert bool(found.kept_layers) == (not found.weights_note)


def test_a_missing_model_is_one_line_and_no_module_in_the_current_folder_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('poisoned')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HoldfastError, match="there is no model folder"):
        check_model(ModelSettings(path=str(tmp_path / "none")))


def test_a_model_that_loads_too_slowly_is_reported_in_one_line(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", "qwen3")
    settings = ModelSettings(path=str(tmp_path / "model"))
    with pytest.raises(HoldfastError, match=r"took more than 0 s; .* raise model\.startup_seconds"):
        check_model(dataclasses.replace(settings, startup_seconds=0.01))
