"""Special files are refused: opening a FIFO waits for a writer, forever if there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.config import Settings, all_specs
from holdfast.config_sources import values_in_file
from holdfast.errors import HoldfastError, ModelLoadError
from holdfast.files import open_regular, read_regular
from holdfast.front.fleet.catalog import read_catalog_file
from holdfast.front.prompt.template import load_template
from holdfast.front.server.access import read_keys
from holdfast.models.image_files import open_image
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import check_is_folder, read_json
from holdfast.models.sentence_modules import own_pooling
from holdfast.models.weight_files import checked_tensor_bytes, read_header
from holdfast.worker.sessions.session_file import SessionFile

MODEL_FILES = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "1_Pooling/config.json",
    "adapters.safetensors",
    "modeling_own.py",
)
READERS: dict[str, Callable[[Path], object]] = {
    "any file": read_regular,
    "an open file": open_regular,
    "JSON of a model": read_json,
    "weights": read_header,
    "a key file": read_keys,
    "a settings file": lambda path: values_in_file(all_specs(), path),
    "models.toml": lambda path: read_catalog_file(path, Settings()),
    "an image": open_image,
    "a session's file": lambda path: SessionFile(path, most_tokens=10),
}


def model_folder(folder: Path) -> Path:
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def fifo(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", MODEL_FILES)
def test_no_file_of_a_model_may_be_a_fifo(name: str, tmp_path: Path) -> None:
    path = fifo(model_folder(tmp_path) / name)
    for check in (check_is_folder, check_loadable):
        with pytest.raises(ModelLoadError, match=f"{path} is not a regular file"):
            check(tmp_path)


def test_a_link_to_a_fifo_or_a_device_is_refused(tmp_path: Path) -> None:
    target = fifo(tmp_path / "outside")
    folder = tmp_path / "model"
    folder.mkdir()
    for place in (target, Path("/dev/zero")):
        link = model_folder(folder) / "tokenizer.json"
        link.symlink_to(place)
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json is not a regular file"):
            check_is_folder(folder)
        link.unlink()


def test_files_folders_and_links_are_fine(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    (folder / "original").mkdir()
    (folder / "link.json").symlink_to(folder / "config.json")
    (folder / "dangling.json").symlink_to(folder / "missing")
    check_is_folder(folder)


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS.keys())
def test_every_reader_refuses_a_fifo_without_blocking(
    reader: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises((HoldfastError, OSError), match="regular file"):
        reader(fifo(tmp_path / "file"))


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/random"])
def test_an_endless_device_is_refused(path: str) -> None:
    with pytest.raises(OSError, match="it is not a regular file"):
        read_regular(path)


def test_the_null_device_is_an_empty_file(tmp_path: Path) -> None:
    assert read_regular(os.devnull) == b""
    assert values_in_file(all_specs(), Path(os.devnull)) == {}
    with pytest.raises(IsADirectoryError):
        read_regular(tmp_path)


def test_a_fifo_that_appears_after_the_check_does_not_block(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    fifo(folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match="regular file"):
        checked_tensor_bytes(folder)
    fifo(folder / "chat_template.jinja")
    with pytest.raises(ModelLoadError, match="regular file"):
        load_template(folder)
    fifo(folder / "modules.json")
    own_pooling(folder)
