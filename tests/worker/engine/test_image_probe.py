from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from holdfast.worker.engine import image_probe
from holdfast.worker.engine.image_probe import probe_images
from holdfast.worker.kv.full import FullKV
from holdfast.worker.vision.model import SequenceImages, VisionModel, text_positions
from tests.fakes.slow import slow
from tests.fakes.vision_models import FAMILIES
from tests.fakes.vision_worker import VisionBeside

# MLX multiplies by the weights of experts only in float32 on a CPU
OTHERS_IN_16_BITS = sorted(set(FAMILIES) - {"qwen3_vl", "llava_next", "qwen3_vl_moe"})


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> VisionBeside:
    return VisionBeside.load("qwen3_vl", tmp_path_factory.mktemp("vision"))


@pytest.mark.parametrize("name", ["qwen3_vl", *slow(*OTHERS_IN_16_BITS)])
def test_rounding_to_16_bits_refuses_no_model(name: str, tmp_path: Path) -> None:
    info = VisionBeside.load(name, tmp_path, dtype=mx.bfloat16).processor.info
    assert (info.refused, info.reuse_refused) == ("", "")


def test_a_model_whose_features_mismatch_its_tokens_gets_no_images(tmp_path: Path) -> None:
    """mlx-vlm 0.7.10 makes 384 embeddings of 136 image tokens of llava_next."""
    assert VisionBeside.load("llava_next", tmp_path).processor.info.refused


def test_the_verdict_is_the_same_each_time() -> None:
    first, second = (image_probe._picture((12, 8)).tobytes() for _ in range(2))
    assert first == second


def test_wrong_positions_are_found(qwen: VisionBeside, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(self: VisionModel, layout: Any) -> Any:
        return text_positions(0, len(layout.token_ids))

    monkeypatch.setattr(VisionModel, "relative_positions", counted)
    assert "computed whole" in probe_images(qwen.runner, qwen.worker_images()).refused


def test_features_missing_in_some_layers_are_found(
    qwen: VisionBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = VisionModel.arguments

    def without_later_layers(*args: Any, **more: Any) -> dict[str, Any]:
        found = plain(*args, **more)
        if "deepstack_visual_embeds" in found:
            found["deepstack_visual_embeds"] = found["deepstack_visual_embeds"][:1]
        return found

    monkeypatch.setattr(VisionModel, "arguments", without_later_layers)
    assert probe_images(qwen.runner, qwen.worker_images()).refused


def test_wrong_decode_positions_in_a_batch_are_found(
    qwen: VisionBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = SequenceImages.positions_of

    def shifted(self: SequenceImages, start: int, tokens: int) -> Any:
        return plain(self, start, tokens) + (tokens == 1)

    monkeypatch.setattr(SequenceImages, "positions_of", shifted)
    assert "beside another one" in probe_images(qwen.runner, qwen.worker_images()).refused


def test_wrong_restored_states_disable_only_reuse(
    qwen: VisionBeside, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = FullKV.restore

    def changed(self: FullKV, arrays: Any, layout: Any, *, end: int) -> None:
        plain(self, iter([next(arrays) * 1.5, next(arrays)]), layout, end=end)

    monkeypatch.setattr(FullKV, "restore", changed)
    info = probe_images(qwen.runner, qwen.worker_images())
    assert not info.refused
    assert "from a copy of the state" in info.reuse_refused
