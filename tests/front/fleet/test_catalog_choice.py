from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.config import CatalogSettings, ModelSettings, Settings
from holdfast.errors import ConfigError, ModelLoadError
from holdfast.front.fleet.catalog import Catalog, catalog_of
from holdfast.models.download import DEMO_ID, demo_folder
from tests.fakes.model_folders import write_bare_model

TWO = "[models.a]\nid = 'o/a'\naliases = ['x']\n[models.b]\nid = 'o/b'\n"


def written(folder: Path, text: str = TWO) -> Path:
    folder.mkdir(exist_ok=True)
    file = folder / "models.toml"
    file.write_text(text)
    return file


def chosen(
    model: str = "", *, file: Path | None = None, environ: dict[str, str] | None = None
) -> Catalog:
    catalog = CatalogSettings(file="" if file is None else str(file), folders=(), hub_cache=False)
    return catalog_of(Settings(model=ModelSettings(path=model), catalog=catalog), environ or {})


def names(catalog: Catalog) -> list[str]:
    return [entry.name for entry in catalog.entries]


def test_without_settings_the_bundled_model_is_loaded_at_the_start() -> None:
    catalog = chosen()
    assert names(catalog) == [DEMO_ID]
    assert catalog.at_start == (DEMO_ID,)


def test_a_configured_files_models_are_loaded_on_demand(tmp_path: Path) -> None:
    catalog = chosen(file=written(tmp_path))
    assert names(catalog) == ["a", "b"]
    assert catalog.at_start == ()


def test_pinned_models_are_loaded_at_the_start(tmp_path: Path) -> None:
    assert chosen(file=written(tmp_path, TWO + "pin = true\n")).at_start == ("b",)


def test_the_users_own_file_is_found_next_to_the_settings(tmp_path: Path) -> None:
    written(tmp_path / "holdfast")
    assert names(chosen(environ={"XDG_CONFIG_HOME": str(tmp_path)})) == ["a", "b"]


@pytest.mark.parametrize("model", ["b", "x"])
def test_a_named_model_of_the_file_is_first_and_loaded(tmp_path: Path, model: str) -> None:
    catalog = chosen(
        model,
        file=written(
            tmp_path, TWO.replace("'x'", "'y'").replace("[models.b]", "[models.b]\naliases = ['x']")
        ),
    )
    assert names(catalog) == ["b", "a"]
    assert catalog.at_start == ("b",)


def test_another_named_model_is_served_alone(tmp_path: Path) -> None:
    written(tmp_path / "holdfast")
    catalog = chosen("o/other", environ={"XDG_CONFIG_HOME": str(tmp_path)})
    assert names(catalog) == ["o/other"]
    assert catalog.at_start == ("o/other",)


def test_another_named_model_precedes_those_of_the_set_file(tmp_path: Path) -> None:
    catalog = chosen("o/other", file=written(tmp_path))
    assert names(catalog) == ["o/other", "a", "b"]
    assert catalog.at_start == ("o/other",)


def test_a_file_without_usable_models_leaves_the_bundled_one(tmp_path: Path) -> None:
    catalog = chosen(file=written(tmp_path, "[models.a]\npath = 'gone'\n"))
    assert names(catalog) == [DEMO_ID]
    assert [left_out.name for left_out in catalog.excluded] == ["a"]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        chosen(file=tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            "broken",
            r"model broken of .*models\.toml cannot be served: unknown key contxt; did you mean "
            r"context\?",
        ),
        ("codr", r"there is no model folder codr; .*; did you mean coder\?"),
        ("quite-another", r"models\.toml: unknown key contxt"),
    ],
)
def test_the_error_for_an_unusable_model_quotes_the_file(
    tmp_path: Path, model: str, words: str
) -> None:
    file = written(
        tmp_path, "[models.coder]\nid = 'o/a'\n[models.broken]\nid = 'o/b'\ncontxt = 1\n"
    )
    with pytest.raises(ModelLoadError, match=words):
        chosen(model, file=file)


def test_models_in_watched_folders_have_their_listed_names(tmp_path: Path) -> None:
    folder = tmp_path / "watched" / "o" / "kelp"
    write_bare_model(folder)
    settings = Settings(
        model=ModelSettings(path="o/kelp"),
        catalog=CatalogSettings(folders=(str(tmp_path / "watched"),), hub_cache=False),
    )
    (entry,) = catalog_of(settings, {}).entries
    assert (entry.name, entry.model.path) == ("o/kelp", str(folder))


def test_a_user_without_a_home_directory_gets_available_models(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(user: object) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", nobody)
    assert names(catalog_of(Settings(), {})) == [DEMO_ID]


def test_an_entry_with_a_missing_draft_model_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    table = f'path = "{demo_folder()}"\nspeculation = '
    drafts = {"small": "auto", "a": "small", "b": "nonsense", "c": "c", "d": "holdfast-demo-draft"}
    folder = demo_folder("holdfast-demo-draft")
    text = "".join(f'[models.{name}]\n{table}"{draft}"\n' for name, draft in drafts.items())
    file.write_text(text.replace(str(demo_folder()), str(folder), 1))
    found = catalog_of(Settings(catalog=CatalogSettings(file=str(file), hub_cache=False)), {})
    assert names(found)[:3] == ["small", "a", "d"]
    assert [(each.name, each.reason.partition(".")[0]) for each in found.excluded] == [
        (
            "b",
            "speculation = nonsense: there is no model folder nonsense; the id of a model on the "
            "Hub has the form owner/name",
        ),
        ("c", "speculation = c: a model cannot draft for itself"),
    ]
    assert all(each.is_asked_for for each in found.excluded)


@pytest.mark.parametrize("path", ["", "holdfast-demo"])
@pytest.mark.parametrize("speculation", ["nonsense", "holdfast-demo"])
def test_a_server_with_a_missing_draft_model_does_not_start(path: str, speculation: str) -> None:
    model = ModelSettings(path=path, speculation=speculation)
    settings = Settings(model=model, catalog=CatalogSettings(hub_cache=False))
    with pytest.raises(ModelLoadError, match=f"speculation = {speculation}: "):
        catalog_of(settings, {})


def test_a_draft_model_for_all_does_not_draft_for_itself(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(
        f'[models.large]\npath = "{demo_folder()}"\n'
        f'[models.small]\npath = "{demo_folder("holdfast-demo-draft")}"\n'
    )
    catalog = CatalogSettings(file=str(file), hub_cache=False)
    settings = Settings(model=ModelSettings(speculation="small"), catalog=catalog)
    found = catalog_of(settings, {}).entries
    assert [entry.model.speculation for entry in found] == ["small", "auto"]
