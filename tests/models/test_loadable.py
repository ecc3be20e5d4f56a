from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.errors import UnusableModel
from holdfast.models.download import DEMO_IDS, demo_folder
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import is_supported
from tests.fakes.model_folders import write_bare_model
from tests.fakes.tiny_configs import TINY


@pytest.mark.parametrize("name", DEMO_IDS)
def test_the_bundled_models_can_be_loaded(name: str) -> None:
    assert check_loadable(demo_folder(name))["model_type"]


def test_tested_and_remapped_types_are_supported() -> None:
    assert all(is_supported(str(config["model_type"])) for config in TINY.values())
    assert is_supported("mistral")  # as llama, by mlx-lm's table
    assert not is_supported("bert")
    assert not is_supported("../llama")
    assert not is_supported("")


def test_all_shards_are_there(tmp_path: Path) -> None:
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert check_loadable(write_bare_model(tmp_path, *files)) == {"model_type": "llama"}


@pytest.mark.parametrize(
    ("files", "changes", "words"),
    [
        (("model-00001-of-00002.safetensors",), {}, "only 1 of 2 weight files"),
        (
            ("pytorch_model.bin",),
            {},
            "has no model*.safetensors, only pytorch_model.bin; convert the model first: mlx_lm.convert",
        ),
        ((), {}, "has no weights"),
        (("model.safetensors",), {"model_type": "bert"}, "mlx-lm has no models of the type bert"),
        (("model.safetensors",), {"model_type": None}, "has no model_type"),
    ],
)
def test_an_unloadable_model_is_refused_with_the_reason(
    tmp_path: Path, files: tuple[str, ...], changes: dict[str, object], words: str
) -> None:
    folder = write_bare_model(tmp_path, *files, **changes)
    if "model.safetensors" not in files:
        (folder / "model.safetensors").unlink(missing_ok=True)
    with pytest.raises(UnusableModel) as caught:
        check_loadable(folder)
    assert words in str(caught.value)


def test_a_type_with_its_own_code_is_not_refused(tmp_path: Path) -> None:
    folder = write_bare_model(tmp_path, model_type="kelp", model_file="kelp.py")
    assert check_loadable(folder)["model_type"] == "kelp"
