from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.config import (
    CatalogSettings,
    ModelSettings,
    ResidencySettings,
    Settings,
)
from holdfast.errors import ConfigError
from holdfast.front.fleet.catalog import Catalog, catalog_of, read_catalog_file
from tests.fakes.adapters import write_tiny_adapter
from tests.fakes.model_folders import write_bare_model


def model_folder(parent: Path, name: str = "kelp") -> Path:
    return write_bare_model(parent / name)


def read(folder: Path, text: str, settings: Settings | None = None) -> Catalog:
    file = folder / "models.toml"
    file.write_text(text, encoding="utf-8")
    return read_catalog_file(file, settings or Settings())


def reason(folder: Path, text: str) -> str:
    """The reason why the only left-out model is left out."""
    found = read(folder, text)
    (left_out,) = found.excluded
    assert left_out.is_asked_for
    assert left_out.origin == str(folder / "models.toml")
    return left_out.reason


def test_an_entry_can_set_everything(tmp_path: Path) -> None:
    model_folder(tmp_path)
    text = """
    [models.coder]
    path = "kelp"
    aliases = ["gpt-4o", "sonnet"]
    context = 4096
    dtype = "float32"
    kv_bits = 8
    idle = "15 min"
    pin = true
    speculation = "kelp"
    sampling = { temperature = 0.2, top_k = 20 }
    template = { enable_thinking = false }
    """
    (entry,) = read(tmp_path, text).entries
    assert entry.name == entry.model.name == "coder"
    assert entry.model.path == str(tmp_path / "kelp")
    assert (entry.model.context_tokens, entry.model.dtype, entry.model.kv_bits) == (
        4096,
        "float32",
        "8",
    )
    assert (entry.aliases, entry.idle_seconds, entry.is_pinned, entry.model.speculation) == (
        ("gpt-4o", "sonnet"),
        900.0,
        True,
        str(tmp_path / "kelp"),
    )
    assert entry.sampling == {"temperature": 0.2, "top_k": 20}
    assert entry.template_arguments == {"enable_thinking": False}
    assert entry.origin == str(tmp_path / "models.toml")


def test_an_entry_inherits_the_servers_settings(tmp_path: Path) -> None:
    settings = Settings(
        model=ModelSettings(context_tokens=512, threads=3, revision="v1"),
        residency=ResidencySettings(idle_seconds=60.0),
    )
    found = read(
        tmp_path,
        '[models.a]\nid = "owner/name"\n[models.b]\nid = "owner/other@v2"\nidle = "never"',
        settings,
    )
    first, second = found.entries
    assert (first.model.context_tokens, first.model.threads) == (512, 3)
    assert (first.model.path, first.model.revision) == ("owner/name", "")
    assert (second.model.path, second.model.revision) == ("owner/other", "v2")
    assert (first.idle_seconds, second.idle_seconds) == (60.0, None)


def test_entries_keep_the_order_of_the_file(tmp_path: Path) -> None:
    text = "".join(f'[models."{name}"]\nid = "o/{name}"\n' for name in "zax")
    assert [entry.name for entry in read(tmp_path, text).entries] == ["z", "a", "x"]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ('path = "gone"', "there is no model folder"),
        ('path = "kelb"', "did you mean"),
        ('path = "empty"', "has no config.json"),
        ('path = "unweighted"', "has no weights"),
        ('path = "small.gguf"', "is a GGUF file"),
        ('id = "no id at all"', "the id of a model on the Hub has the form owner/name"),
        ("", "either path (a folder) or id"),
        ('path = "kelp"\nid = "o/n"', "either path (a folder) or id"),
        ('path = "kelp"\nrevision = "v1"', "revision can be set only together with id"),
        ("path = 3", "path = 3 is not allowed; allowed: a string"),
        ('id = "o/n"\ncontxt = 4096', "unknown key contxt; did you mean context?"),
        ('id = "o/n"\ncontext = "much"', 'context = "much" is not allowed'),
        ('id = "o/n"\ncontext = 0', "context = 0 is not allowed"),
        ('id = "o/n"\nmemory = 0', "memory = 0 is not allowed"),
        ('id = "o/n"\ncontext = 1', "at least 64"),
        ('id = "o/n"\nkv_bits = 5', "allowed: auto | native | 8 | 8/4 | 4"),
        ('id = "o/n"\nidle = "soon"', "or never"),
        ('id = "o/n"\nidle = -1', "at least 0"),
        ('id = "o/n"\npin = "yes"', "allowed: true or false"),
        ('id = "o/n"\naliases = [1]', "a list of texts"),
        (
            'id = "o/n"\nsampling = { temprature = 1 }',
            "unknown key sampling.temprature; did you mean temperature?",
        ),
        ('id = "o/n"\nsampling = { temperature = -1 }', "a number from 0 to 100"),
        ('id = "o/n"\nsampling = { top_k = 1.5 }', "sampling.top_k = 1.5"),
        ('id = "o/n"\nsampling = { top_p = nan }', "a number from 0 to 1"),
        ('id = "o/n"\nsampling = 1', "sampling = 1 is not allowed"),
        ('id = "o/n"\ntemplate = "x"', "template = x is not allowed"),
        (
            'id = "o/n"\ntemplate = { tools = 1 }',
            "template.tools cannot have a default: each request sets it",
        ),
        (
            'id = "o/n"\ntemplate = { date = 2026-01-01 }',
            "template.date = 2026-01-01 is not allowed",
        ),
        ('id = "o/n"\nspeculation = 1', "speculation = 1 is not allowed"),
        ('path = "~nobody-has-this-name/kelp"', "there is no model folder"),
        (f'path = "{"x" * 300}"', "cannot be read: File name too long"),
    ],
)
def test_a_wrong_entry_is_left_out_with_its_reason(tmp_path: Path, table: str, words: str) -> None:
    model_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    (model_folder(tmp_path, "unweighted") / "model.safetensors").unlink()
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    text = f'[models.good]\npath = "kelp"\n[models.bad]\n{table}\n'
    assert words in reason(tmp_path, text)
    assert [entry.name for entry in read(tmp_path, text).entries] == ["good"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[model.a]\nid = 'o/n'\n", "unknown section [model]; did you mean models?"),
        ("models = 3\n", "write each model as [models.NAME]"),
        ("[models]\na = 3\n", "must be a table: write the header [models.a]"),
        ("[models.'']\nid = 'o/n'\n", "a model's name must not be empty"),
        (
            "[models.kelp2.5-7b]\nid = 'o/n'\n",
            'unknown key 5-7b; quote a name that contains a dot: [models."kelp2.5-7b"]',
        ),
    ],
)
def test_an_invalid_file_does_not_stop_the_server(tmp_path: Path, text: str, words: str) -> None:
    assert words in reason(tmp_path, text)
    assert read(tmp_path, text).entries == ()


def test_of_two_equal_aliases_the_second_entry_is_left_out(tmp_path: Path) -> None:
    aliases = {"a": ["x", "x"], "b": ["y", "x"], "c": ["y"]}
    text = "".join(
        f'[models.{name}]\nid = "o/{name}"\naliases = {given}\n' for name, given in aliases.items()
    )
    found = read(tmp_path, text)
    assert [entry.name for entry in found.entries] == ["a", "c"]
    assert [(left_out.name, left_out.reason) for left_out in found.excluded] == [
        ("b", "its alias x is already an alias of a")
    ]


def test_an_alias_equal_to_a_models_name_is_left_out(tmp_path: Path) -> None:
    text = "[models.a]\nid = 'o/a'\naliases = ['b', 'a']\n[models.b]\nid = 'o/b'\n"
    found = read(tmp_path, text)
    assert [entry.name for entry in found.entries] == ["b"]
    assert found.excluded[0].reason == "its alias b is the name of another model"


def test_an_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"models\.toml cannot be read: No such file"):
        read_catalog_file(tmp_path / "models.toml", Settings())


# -- adapters


def adapter_folder(parent: Path, name: str) -> Path:
    return write_tiny_adapter(parent / name, "llama", seed=1, keys=["self_attn.q_proj"])


def test_adapters_are_found_by_model_name_or_alias(tmp_path: Path) -> None:
    model_folder(tmp_path)
    adapter_folder(tmp_path, "trained")
    text = '[models.demo]\npath = "kelp"\naliases = ["d"]\nadapters = { sql = "trained" }'
    catalog = read(tmp_path, text)
    (entry,) = catalog.entries
    assert entry.adapters == ("sql",)
    assert entry.adapter_folders == {"sql": tmp_path / "trained"}
    for name in ("demo:sql", "d:sql"):
        named = catalog.named(name)
        assert named is not None
        assert (named.entry, named.adapter, named.id) == (entry, "sql", "demo:sql")
        assert catalog.find(name) is None, "what is done to the model would be done to an adapter"
    assert catalog.named("demo:tone") is None
    assert "did you mean demo:sql" in str(catalog.unknown("demo:sqll"))
    base = catalog.named("d")
    assert base is not None
    assert base.id == "demo"


def test_adapters_of_the_servers_settings_belong_to_no_listed_model(tmp_path: Path) -> None:
    model_folder(tmp_path)
    adapter_folder(tmp_path, "trained")
    file = tmp_path / "models.toml"
    file.write_text('[models.demo]\npath = "kelp"\n')
    settings = Settings(
        model=ModelSettings(adapters=(f"sql={tmp_path / 'trained'}",)),
        catalog=CatalogSettings(file=str(file), folders=(), hub_cache=False),
    )
    with pytest.raises(ConfigError, match="needs the name of its model"):
        catalog_of(settings, {})
    named = replace(settings, model=replace(settings.model, path="demo"))
    assert catalog_of(named, {}).entries[0].adapters == ("sql",)


def test_a_wrong_adapter_is_a_reason(tmp_path: Path) -> None:
    model_folder(tmp_path)
    demo = '[models.demo]\npath = "kelp"\nadapters = '
    assert "adapter sql: there is no folder" in reason(tmp_path, demo + '{ sql = "none" }')
    assert "allowed: NAME=FOLDER" in reason(tmp_path, demo + '{ "a:b" = "none" }')
    assert "such as { sql" in reason(tmp_path, demo + '["sql=none"]')
    assert "adapters.sql = 1 is not allowed" in reason(tmp_path, demo + "{ sql = 1 }")


def test_an_adapter_does_not_take_a_models_name(tmp_path: Path) -> None:
    model_folder(tmp_path)
    adapter_folder(tmp_path, "trained")
    text = '[models.demo]\npath = "kelp"\nadapters = { sql = "trained" }\n'
    taken = '[models."demo:sql"]\npath = "kelp"\n'
    assert reason(tmp_path, text + taken) == "its adapter demo:sql is the name of another model"
