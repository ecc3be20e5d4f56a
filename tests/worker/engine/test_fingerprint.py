"""A fingerprint changes exactly if keys and values would."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.models.file_hashing import FileHashing, HashCache, ModelChanged
from holdfast.worker.engine import fingerprint
from holdfast.worker.engine.fingerprint import (
    files_of_identity,
    model_fingerprint,
    runs_own_code,
)
from tests.fakes.tiny_models import write_tiny


def print_of(
    folder: Path, *, computed_as: str = "float32", version: str = "1", own_code: bool = False
) -> str:
    hashes = hashes_of(folder, own_code=own_code)
    return model_fingerprint(folder, hashes, computed_as=computed_as, versions=(version,))


def hashes_of(folder: Path, *, own_code: bool = False) -> Mapping[str, str]:
    with FileHashing(
        lambda: files_of_identity(folder, runs_own_code=own_code), cache=HashCache(None)
    ) as hashing:
        return hashing.result()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "model", "llama")


def flip_a_weight(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    "added",
    [
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja"),
        *("adapters.safetensors", "adapter_config.json", "hf_quant_config.json"),
        "",
    ],
)
def test_every_part_of_a_model_changes_the_fingerprint(model: Path, added: str) -> None:
    prints = {print_of(model)}
    if added:
        (model / added).parent.mkdir(exist_ok=True)
        with (model / added).open("a") as file:
            file.write(" ")
    else:
        flip_a_weight(model)
        prints.add(print_of(model))
        change_config(model, rope_theta=12345.0)
    prints.add(print_of(model))
    assert len(prints) == (2 if added else 3)


def test_the_way_of_computing_changes_the_fingerprint(model: Path) -> None:
    prints = {
        print_of(model),
        print_of(model, computed_as="bfloat16"),
        print_of(model, version="2"),
    }
    assert len(prints) == 3


def test_two_models_of_one_geometry_differ(tmp_path: Path) -> None:
    assert print_of(write_tiny(tmp_path / "a", "llama", seed=1)) != print_of(
        write_tiny(tmp_path / "b", "llama", seed=2)
    )


def test_dates_and_irrelevant_settings_do_not_change_it(model: Path, tmp_path: Path) -> None:
    before = print_of(model)
    copy = shutil.copytree(model, tmp_path / "copy", copy_function=shutil.copyfile)
    change_config(copy, _name_or_path="elsewhere")
    (copy / "README.md").write_text("words")
    (copy / "generation_config.json").write_text('{"temperature": 0.5}')
    (copy / "modeling.py").write_text("print('nobody runs this')")
    assert print_of(copy) == before


def test_links_to_blobs_count_as_their_targets(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        file.rename(tmp_path / f"blob{number}")
        (snapshot / file.name).symlink_to(Path("..", f"blob{number}"))
    shutil.copytree(snapshot, tmp_path / "copy")
    before = print_of(snapshot)
    assert before == print_of(tmp_path / "copy")
    flip_a_weight(snapshot)
    assert print_of(snapshot) != before


def test_weights_in_several_files_all_count(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    shutil.copy(
        model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"
    )
    before = print_of(model)
    with (model / "model-00002-of-00002.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"!")
    assert print_of(model) != before


@pytest.mark.parametrize("name", ["modeling.py", "layers/attention.py", "tables.npz", "README.md"])
def test_with_custom_code_every_file_of_the_folder_counts(model: Path, name: str) -> None:
    before = print_of(model, own_code=True)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("x = 1")
    first = print_of(model, own_code=True)
    (model / name).write_text("x = 2")
    assert len({before, first, print_of(model, own_code=True)}) == 3


def test_links_to_folders_are_followed_once(model: Path, tmp_path: Path) -> None:
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "one.txt").write_text("1")
    (model / "tables").symlink_to(tmp_path / "tables")
    (model / "round").symlink_to(model)
    before = print_of(model, own_code=True)
    (tmp_path / "tables" / "one.txt").write_text("2")
    assert print_of(model, own_code=True) != before


def test_hidden_files_of_tools_do_not_count(model: Path) -> None:
    before = print_of(model, own_code=True)
    (model / ".cache").mkdir()
    (model / ".cache" / "download.lock").write_text("")
    (model / ".DS_Store").write_text("")
    assert print_of(model, own_code=True) == before


def test_custom_code_runs_if_configured_and_trusted(model: Path) -> None:
    assert not runs_own_code(model, trust_remote_code=True)
    change_config(model, model_file="modeling.py")
    assert runs_own_code(model, trust_remote_code=True)
    assert not runs_own_code(model, trust_remote_code=False)
    assert not runs_own_code(model / "nowhere", trust_remote_code=True)


def test_mlx_lms_own_code_counts_by_content(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = importlib.util.find_spec("mlx_lm")
    assert installed is not None
    assert installed.submodule_search_locations is not None
    changed = shutil.copytree(
        installed.submodule_search_locations[0],
        tmp_path / "mlx_lm",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    monkeypatch.setattr(fingerprint.importlib.util, "find_spec", lambda _: _At(changed))  # type: ignore[attr-defined]
    prints = {print_of(model)}
    parts = ("llama", "base", "cache", "rope_utils", "switch_layers")
    names = [*(f"models/{part}.py" for part in parts), "utils.py"]
    for name in names:
        with (changed / name).open("a") as file:
            file.write("\n")
        prints.add(print_of(model))
    assert len(prints) == 1 + len(names)


class _At:
    """Where a package is."""

    def __init__(self, folder: Path) -> None:
        self.submodule_search_locations = [str(folder)]


def test_all_our_code_that_shapes_states_counts() -> None:
    files = files_of_identity(Path("nowhere"), runs_own_code=False)
    package = Path(fingerprint.__file__).parents[2]
    patterns = [pattern for pattern in fingerprint._OWN_CODE if not list(package.glob(pattern))]
    assert patterns == []
    assert {
        "holdfast/worker/engine/mlx_lm_hooks.py",
        "holdfast/worker/cpu/host_attention.py",
        "holdfast/worker/cpu/kernels/decoder.h",
    } <= files.keys()


def test_a_configuration_changed_after_hashing_is_detected(model: Path) -> None:
    hashes = hashes_of(model)
    change_config(model, rope_theta=12345.0)
    with pytest.raises(ModelChanged):
        model_fingerprint(model, hashes, computed_as="", versions=())
