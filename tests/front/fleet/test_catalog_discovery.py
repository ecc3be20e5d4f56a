from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config import CatalogSettings, Settings
from holdfast.front.fleet.catalog import Catalog, catalog_of
from holdfast.models.download import DEMO_ID
from tests.fakes.model_folders import write_bare_model


def model(folder: Path, *, weights: str = "model.safetensors", model_type: str = "llama") -> Path:
    write_bare_model(folder, weights, model_type=model_type)
    return folder


def in_hub_cache(home: Path, hub_id: str) -> Path:
    repository = home / "hub" / f"models--{hub_id.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c1")
    return model(repository / "snapshots" / "c1")


def found(place: Path, *, text: str = "", hub_cache: bool = True) -> Catalog:
    """The catalog of the folder `watched` and the Hub's cache in `hf` below `place`, and a file
    with this text.
    """
    file = place / "models.toml"
    file.write_text(text)
    catalog = CatalogSettings(
        file=str(file), folders=(str(place / "watched"),), hub_cache=hub_cache
    )
    return catalog_of(Settings(catalog=catalog), {"HF_HOME": str(place / "hf")})


def names(catalog: Catalog) -> list[str]:
    return [entry.name for entry in catalog.entries]


def test_discovered_models_follow_those_of_the_file(tmp_path: Path) -> None:
    snapshot = in_hub_cache(tmp_path / "hf", "o/kelp")
    watched = model(tmp_path / "watched" / "lmstudio-community" / "Wrack-4bit")
    model(tmp_path / "watched" / "plain")
    catalog = found(tmp_path, text="[models.first]\nid = 'o/first'\n")
    assert names(catalog) == ["first", "o/kelp", "lmstudio-community/Wrack-4bit", "plain"]
    assert [entry.model.path for entry in catalog.entries[1:3]] == [str(snapshot), str(watched)]
    assert [entry.origin for entry in catalog.entries[1:3]] == [
        str(tmp_path / "hf" / "hub"),
        str(tmp_path / "watched"),
    ]
    assert catalog.at_start == ()
    assert {entry.own_context_tokens for entry in catalog.entries} == {0}
    (watched / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    assert [entry.own_context_tokens for entry in found(tmp_path).entries] == [0, 4096, 0]
    assert names(found(tmp_path, hub_cache=False)) == ["lmstudio-community/Wrack-4bit", "plain"]


def test_models_without_chat_template_are_known_as_base_models(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hf", "o/kelp")
    watched = model(tmp_path / "watched" / "plain")
    listed = model(tmp_path / "listed")
    text = f"[models.here]\npath = '{listed}'\n[models.elsewhere]\nid = 'o/first'\n"
    entries = found(tmp_path, text=text).entries
    assert {entry.name for entry in entries if not entry.can_chat} == {"here", "o/kelp", "plain"}
    for folder in (watched, listed):
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    entries = found(tmp_path, text=text).entries
    assert [entry.name for entry in entries if not entry.can_chat] == ["o/kelp"]


def test_the_only_found_model_is_loaded_at_the_start(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hf", "o/kelp")
    assert found(tmp_path).at_start == ("o/kelp",)


def test_if_nothing_can_be_served_the_bundled_model_is(tmp_path: Path) -> None:
    model(tmp_path / "watched" / "bert", model_type="bert")
    catalog = found(tmp_path)
    assert names(catalog) == [DEMO_ID]
    assert catalog.at_start == (DEMO_ID,)
    assert [left_out.name for left_out in catalog.excluded] == ["bert"]


def test_an_unloadable_model_is_left_out_with_the_reason(tmp_path: Path) -> None:
    gguf = tmp_path / "watched" / "TheBloke" / "kelp-GGUF"
    gguf.mkdir(parents=True)
    (gguf / "kelp.Q4_K_M.gguf").write_bytes(b"GGUF")
    model(tmp_path / "watched" / "half", weights="model-00001-of-00003.safetensors")
    (tmp_path / "watched" / "notes").mkdir()
    (bert, half) = found(tmp_path).excluded
    assert (bert.name, bert.is_asked_for) == ("TheBloke/kelp-GGUF", False)
    assert "GGUF files, the format of llama.cpp" in bert.reason
    assert "only 1 of 3 weight files" in half.reason


@pytest.mark.parametrize(
    "text", ["[models.mine]\nid = 'o/kelp'\n", "[models.mine]\npath = 'watched/o/kelp'\n"]
)
def test_a_discovered_model_of_the_file_is_not_listed_twice(tmp_path: Path, text: str) -> None:
    if "id" in text:
        in_hub_cache(tmp_path / "hf", "o/kelp")
    else:
        model(tmp_path / "watched" / "o" / "kelp")
    catalog = found(tmp_path, text=text)
    assert names(catalog) == ["mine"]
    assert catalog.excluded == ()


def test_a_discovered_model_with_a_taken_name_is_left_out(tmp_path: Path) -> None:
    in_hub_cache(tmp_path / "hf", "o/kelp")
    model(tmp_path / "watched" / "o" / "kelp")
    catalog = found(tmp_path)
    assert names(catalog) == ["o/kelp"]
    assert (
        catalog.excluded[0].reason == f"o/kelp of {tmp_path / 'hf' / 'hub'} already has this name"
    )


def test_a_model_of_the_file_also_has_its_hub_id(tmp_path: Path) -> None:
    text = (
        "[models.a]\nid = 'o/kelp@v1'\n[models.b]\nid = 'o/kelp'\n[models.c]\nid = "
        "'o/x'\n[models.d]\nid='o/y'\naliases=['o/x']\n"
    )
    catalog = found(tmp_path, text=text)
    assert [entry.aliases for entry in catalog.entries] == [("o/kelp",), (), (), ("o/x", "o/y")]
    assert catalog.find("o/kelp") is catalog.entries[0]
