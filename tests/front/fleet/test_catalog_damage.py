"""Damaged user files never end the server with a traceback: a damaged model or adapter is left out,
and a `models.toml` that cannot be read at all is refused.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.config import ModelSettings, Settings, load_settings
from holdfast.errors import ConfigError, HoldfastError, ModelLoadError
from holdfast.front.fleet.catalog import Catalog, catalog_of, read_catalog_file
from holdfast.front.prompt.tokenizer_bundle import load_tokenizer_bundle
from holdfast.front.server.access import read_keys
from holdfast.models.adapter_folder import checked_adapter
from holdfast.models.download import demo_folder, resolve_model
from holdfast.models.loadable import check_loadable
from holdfast.models.model_folder import known_context_tokens
from tests.fakes.foreign_weights import stored, write_safetensors
from tests.fakes.model_folders import DAMAGES, write_bare_model
from tests.fakes.slow import slow

_MODEL_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "hf_quant_config.json",
    "chat_template.jinja",
)
_IGNORED = ("modules.json", "1_Pooling/config.json")  # if damaged, they count as missing
_DAILY = ("empty", "nested lists", "a list", "cut", "a dangling link", "a pipe")
_EACH_DAMAGE = [name if name in _DAILY else slow(name)[0] for name in DAMAGES]
_SHAPE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


def whole_model(folder: Path) -> Path:
    shutil.copytree(demo_folder("holdfast-demo-draft"), folder)
    return folder


def whole_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"lora_parameters": {"scale": 2.0}}))
    parts = {
        f"model.layers.0.q_proj.{part}": stored(np.ones((1, 1))) for part in ("lora_a", "lora_b")
    }
    write_safetensors(folder / "adapters.safetensors", parts)
    return folder


def header_of(entry: Any) -> bytes:
    text = json.dumps({"model.layers.0.q_proj.lora_a": entry}).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


def one_line(error: HoldfastError) -> str:
    assert "\n" not in str(error)
    assert str(error)
    return str(error)


def served(folder: Path) -> Catalog:
    environ = {"XDG_CONFIG_HOME": str(folder), "HF_HUB_CACHE": str(folder / "hub")}
    settings = load_settings(file=None, environ={}, flags={"catalog.folders": ""}).settings
    return catalog_of(settings, environ)


def models_file(folder: Path) -> Path:
    (folder / "holdfast").mkdir(exist_ok=True)
    return folder / "holdfast" / "models.toml"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        # daily, each file with half of the damages, and each damage with half of the files
        (name, damage) if damage in _DAILY and (place + kind) % 2 else slow((name, damage))[0]
        for place, name in enumerate((*_MODEL_FILES, *_IGNORED))
        for kind, damage in enumerate(DAMAGES)
    ],
)
def test_a_damaged_file_leaves_out_only_its_model(tmp_path: Path, name: str, damage: str) -> None:
    whole_model(tmp_path / "good")
    bad = whole_model(tmp_path / "bad")
    (bad / name).parent.mkdir(exist_ok=True)
    DAMAGES[damage](bad / name)
    models_file(tmp_path).write_text(
        f"[models.good]\npath = '{tmp_path}/good'\n[models.bad]\npath = '{bad}'\n"
    )
    catalog = served(tmp_path)
    assert catalog.entries[0].name == "good"
    left_out = {each.name: each.reason for each in catalog.excluded}
    if left_out:
        assert name in left_out["bad"] or str(bad) in left_out["bad"]
        assert "\n" not in left_out["bad"]
    try:  # what the front reads when the model is first used
        load_tokenizer_bundle(bad)
    except ModelLoadError as error:
        one_line(error)


def cut(name: str, size: int) -> Callable[[Path], None]:
    """Truncate a file to this size, or by this many bytes if negative."""

    def damage(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:size])

    return damage


def damaged(name: str, damage: str) -> Callable[[Path], None]:
    return lambda folder: DAMAGES[damage](folder / name)


def as_shards(folder: Path) -> None:
    """The first of two shards, and an index that names both."""
    (folder / _WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    places = {f"w{number}": f"model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))


def without_index(folder: Path) -> None:
    as_shards(folder)
    (folder / "model.safetensors.index.json").unlink()


# what interrupted downloads, full disks and clones without Git LFS leave in the Hub's cache
_WEIGHTS = "model.safetensors"
_SNAPSHOTS: dict[str, Callable[[Path], None]] = {
    "weights: a dangling link": damaged(_WEIGHTS, "a dangling link"),
    "weights: a Git LFS pointer": damaged(_WEIGHTS, "a Git LFS pointer"),
    "weights: a web page": damaged(_WEIGHTS, "a web page"),
    "weights: empty": damaged(_WEIGHTS, "empty"),
    "weights: cut in the header": cut(_WEIGHTS, 1000),
    "weights: cut in the data": cut(_WEIGHTS, -1000),
    "weights: missing": lambda folder: (folder / _WEIGHTS).unlink(),
    "weights: a shard is missing": as_shards,
    "weights: a shard is missing, and the index": without_index,
    "tokenizer: missing": lambda folder: (folder / "tokenizer.json").unlink(),
    "tokenizer: cut": cut("tokenizer.json", -1000),
    "tokenizer: a dangling link": damaged("tokenizer.json", "a dangling link"),
    "tokenizer_config: a web page": damaged("tokenizer_config.json", "a web page"),
    "config: cut": cut("config.json", -10),
    "config: a dangling link": damaged("config.json", "a dangling link"),
    "config: missing": lambda folder: (folder / "config.json").unlink(),
    "generation_config: empty": damaged("generation_config.json", "empty"),
    "template: cut": cut("chat_template.jinja", 400),
    "template: a dangling link": damaged("chat_template.jinja", "a dangling link"),
}


@pytest.mark.parametrize("state", _SNAPSHOTS)
def test_a_damaged_hub_model_is_left_out_with_the_remedy(tmp_path: Path, state: str) -> None:
    repository = tmp_path / "hub" / "models--coast--kelp"
    snapshot = whole_model(repository / "snapshots" / "c1")
    assert [entry.name for entry in served(tmp_path).entries] == ["coast/kelp"]
    _SNAPSHOTS[state](snapshot)
    catalog = served(tmp_path)
    assert [entry.name for entry in catalog.entries] == ["holdfast-demo"]
    (left_out,) = catalog.excluded
    assert left_out.name == "coast/kelp"
    assert str(snapshot) in left_out.reason
    assert left_out.reason.endswith("again: holdfast models pull coast/kelp")
    assert "\n" not in left_out.reason
    with pytest.raises(ModelLoadError):
        resolve_model(ModelSettings(path=str(snapshot)), progress=lambda *_: None)


@pytest.mark.parametrize("damage", _EACH_DAMAGE)
@pytest.mark.parametrize("name", ["adapter_config.json", "adapters.safetensors"])
def test_a_damaged_adapter_leaves_out_only_its_model(
    tmp_path: Path, name: str, damage: str
) -> None:
    whole_model(tmp_path / "kelp")
    DAMAGES[damage](whole_adapter(tmp_path / "sql") / name)
    check_adapter_is_left_out(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {"shape": [1], "data_offsets": [0, 4]},
        {**_SHAPE, "dtype": None},
        {**_SHAPE, "dtype": ["F32"]},
        {"dtype": "F32", "data_offsets": [0, 4]},
        {**_SHAPE, "shape": 1},
        {**_SHAPE, "shape": [-1]},
        {**_SHAPE, "shape": [1.0]},
        {**_SHAPE, "shape": [True]},
        {**_SHAPE, "shape": [2]},
        {**_SHAPE, "data_offsets": [0, 4, 4]},
        {**_SHAPE, "data_offsets": [4, 0]},
        {**_SHAPE, "data_offsets": [0, math.nan]},
        {**_SHAPE, "data_offsets": [0, 1 << 80]},
        {**_SHAPE, "data_offsets": "04"},
        [],
        None,
        7,
    ],
)
def test_a_damaged_adapter_header_leaves_out_only_its_model(tmp_path: Path, entry: Any) -> None:
    whole_model(tmp_path / "kelp")
    (whole_adapter(tmp_path / "sql") / "adapters.safetensors").write_bytes(header_of(entry))
    check_adapter_is_left_out(tmp_path)


def check_adapter_is_left_out(folder: Path) -> None:
    models_file(folder).write_text(
        f"[models.good]\npath = '{folder}/kelp'\n"
        f"[models.bad]\npath = '{folder}/kelp'\nadapters = {{ sql = '{folder}/sql' }}\n"
    )
    catalog = served(folder)
    assert [entry.name for entry in catalog.entries] == ["good"]
    (left_out,) = catalog.excluded
    assert left_out.name == "bad"
    assert left_out.reason.startswith("adapter sql: ")
    assert "\n" not in left_out.reason


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_models_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = models_file(tmp_path)
    DAMAGES[damage](file)
    if damage == "empty":
        assert served(tmp_path).entries[0].name == "holdfast-demo"
        return
    with pytest.raises(ConfigError) as caught:
        served(tmp_path)
    assert str(file) in one_line(caught.value)


@pytest.mark.parametrize("damage", sorted(DAMAGES.keys() - {"empty"}))
def test_an_unreadable_settings_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "config.toml"
    DAMAGES[damage](file)
    with pytest.raises(ConfigError) as caught:
        load_settings(file=file, environ={}, flags={})
    one_line(caught.value)


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_unreadable_keys_file_is_refused(tmp_path: Path, damage: str) -> None:
    file = tmp_path / "keys.json"
    DAMAGES[damage](file)
    if not file.is_symlink():
        file.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        read_keys(file)
    assert str(file) in one_line(caught.value)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["llama", "fp8", "\0", "../..", 1 << 70, 1e308, -1]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
_CONFIG_KEYS = (
    *("model_type", "model_file", "vision_config", "text_config", "quantization", "rope_scaling"),
    *("quantization_config", "compression_config", "max_position_embeddings", "n_ctx"),
)


@given(config=st.dictionaries(st.sampled_from(_CONFIG_KEYS), _VALUES))
def test_no_configuration_value_raises_another_error(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-configuration"
    write_bare_model(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    try:
        assert known_context_tokens(check_loadable(folder)) >= 0
    except ModelLoadError as error:
        one_line(error)


@given(
    config=st.dictionaries(st.sampled_from(("fine_tune_type", "lora_parameters", "model")), _VALUES)
)
def test_no_adapter_configuration_value_raises_another_error(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-adapter"
    if not folder.exists():
        whole_adapter(folder)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    try:
        checked_adapter("sql", folder)
    except ModelLoadError as error:
        one_line(error)


_TABLE_KEYS = (
    *("path", "id", "adapters", "pin", "sampling", "template", "revision", "context", "dtype"),
    *("memory", "kv_bits", "speculation", "idle", "aliases", "layout", "trust_remote_code"),
)
_TOML_VALUES = (
    st.booleans()
    | st.integers(-(1 << 63), 1 << 63)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["\0", "~nobody-at-all/x", "a/b@../../x", "o/n", "x" * 5000, "."])
)
_TOML_TREES = (
    _TOML_VALUES
    | st.lists(_TOML_VALUES, max_size=2)
    | st.dictionaries(st.text(max_size=5), _TOML_VALUES, max_size=2)
)


@given(table=st.dictionaries(st.sampled_from(_TABLE_KEYS), _TOML_TREES))
def test_no_table_value_raises_an_error(
    tmp_path_factory: pytest.TempPathFactory, table: dict[str, Any]
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(f"[models.a]\nid = 'o/n'\n[models.b]\n{written(table)}\n", "utf-8")
    catalog = read_catalog_file(file, Settings())
    assert catalog.entries[0].name == "a"
    assert all("\n" not in each.reason for each in catalog.excluded)


def written(table: dict[str, Any]) -> str:
    return "\n".join(f"{key} = {_toml(value)}" for key, value in table.items())


def _toml(value: Any) -> str:
    writers: dict[type, Callable[[Any], str]] = {
        bool: lambda each: str(each).lower(),
        int: str,
        float: lambda each: repr(each),
        str: _toml_text,
        list: lambda each: f"[{', '.join(map(_toml, each))}]",
    }
    if isinstance(value, dict):
        pairs = (f"{_toml_text(key)} = {_toml(each)}" for key, each in value.items())
        return "{" + ", ".join(pairs) + "}"
    return writers[type(value)](value)


def _toml_text(text: str) -> str:
    return '"' + "".join(f"\\U{ord(each):08x}" for each in text) + '"'
