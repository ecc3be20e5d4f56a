"""`holdfast models …`, with a Hub on loopback and a separate cache."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

from holdfast.models.download import DEMO_ID, demo_folder
from holdfast.worker.cpu.kernels import packed_products
from tests.fakes.adapters import write_tiny_adapter
from tests.fakes.command_line import invoked
from tests.fakes.echo_server import EchoServer
from tests.fakes.hub import HubState, add_demo, hub_in_place
from tests.fakes.tiny_models import write_tiny

MODEL = "coast/kelp-small"
DRAFT_ID = "holdfast-demo-draft"


@pytest.fixture(autouse=True)
def _no_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the servers of the user who runs the tests."""
    monkeypatch.setattr("holdfast.front.run.running_servers.running_servers", lambda environ: [])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    """A Hub with the bundled model under another name, and a cache that the catalog searches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CATALOG_HUB_CACHE", "true")
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        add_demo(state, MODEL)
        yield state


def run(*arguments: str, code: int = 0, stdin: str = "") -> click.testing.Result:
    result = invoked(["models", *arguments], input=stdin, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def listed(*arguments: str) -> Any:
    return json.loads(run("ls", "--json", *arguments).stdout)


def written(folder: Path, text: str) -> str:
    (folder / "models.toml").write_text(text)
    return str(folder / "models.toml")


def test_a_model_is_pulled_listed_and_removed(hub: HubState, tmp_path: Path) -> None:
    assert "files" in run("pull", MODEL).stdout
    (row,) = listed()["models"]
    assert (row["name"], row["state"], row["origin"]) == (MODEL, None, str(tmp_path / "cache"))
    assert row["weight_bytes"] == (demo_folder() / "model.safetensors").stat().st_size
    assert "are free again" in run("rm", MODEL, stdin="y\n").stdout
    assert [row["name"] for row in listed()["models"]] == [DEMO_ID]
    assert "is not in the Hub's cache" in run("rm", MODEL, "--yes", code=2).output


def test_adapters_are_listed_below_their_model(tmp_path: Path, hub: HubState) -> None:
    write_tiny(tmp_path / "kelp", "llama")
    adapter = write_tiny_adapter(tmp_path / "trained", "llama", seed=1)
    file = written(tmp_path, '[models.demo]\npath = "kelp"\nadapters = { sql = "trained" }\n')
    (row,) = listed("--models", file)["models"]
    assert row["adapters"] == {"sql": str(adapter)}
    lines = run("ls", "--models", file).stdout.splitlines()
    (line,) = [line for line in lines if "demo:sql" in line]
    assert "adapter" in line


def test_an_unconfirmed_removal_removes_nothing(hub: HubState) -> None:
    run("pull", MODEL)
    run("rm", MODEL, code=1, stdin="n\n")
    assert [row["name"] for row in listed()["models"]] == [MODEL]


def test_a_pull_finds_and_repairs_cache_damage(hub: HubState, tmp_path: Path) -> None:
    run("pull", MODEL)
    weights = next((tmp_path / "cache").rglob("model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    run("pull", MODEL)
    whole = hashlib.sha256((demo_folder() / "model.safetensors").read_bytes())
    assert hashlib.sha256(weights.read_bytes()).hexdigest() == whole.hexdigest()


@pytest.mark.parametrize(("state", "code"), [("ready", 2), ("unloaded", 0)])
def test_a_model_loaded_in_a_server_is_not_removed(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, state: str, code: int
) -> None:
    run("pull", MODEL)
    card = {"id": "mine", "aliases": [MODEL], "state": state, "owned_by": "holdfast"}
    monkeypatch.setattr(
        "holdfast.cli.models._served_models", lambda *_: {"http://here": {"mine": card}}
    )
    output = run("rm", MODEL, "--yes", code=code).output
    assert ("is ready in the server" in output) == (code == 2)


def test_a_models_file_is_listed_with_skipped_models_and_reasons(tmp_path: Path) -> None:
    text = (
        f"[models.first]\npath = '{demo_folder()}'\naliases = ['gpt-4o']\npin = true\n"
        f"speculation = '{DRAFT_ID}'\n"
        "[models.second]\nid = 'coast/kelp-small'\nidle = 60\n[models.bad]\npath = 'gone'\n"
    )
    file = written(tmp_path, text)
    shown = run("ls", "--models", file).stdout
    assert f"pinned, speculation {DRAFT_ID}" in shown
    assert "not fetched" in shown
    assert "left out: bad" in shown
    assert "there is no model folder" in shown
    first, second = listed("--models", file)["models"]
    assert (first["aliases"], first["speculation"]) == (["gpt-4o"], DRAFT_ID)
    assert (second["folder"], second["idle_seconds"]) == (None, 60.0)


def test_the_state_in_a_running_server_is_shown(echo: EchoServer) -> None:
    echo.models, echo.owner = [DEMO_ID], "holdfast"
    answer = json.loads(run("ls", "--json", "--url", echo.url).stdout)
    assert answer["server"] == echo.url
    assert answer["models"][0]["name"] == DEMO_ID


def test_models_are_listed_when_the_server_does_not_answer() -> None:
    shown = run("ls", "--url", "http://127.0.0.1:9")
    assert DEMO_ID in shown.stdout
    assert "the state of the models is unknown: no answer from http://127.0.0.1:9" in shown.stderr


def test_an_unknown_name_gets_the_nearest_as_a_hint(tmp_path: Path) -> None:
    file = written(tmp_path, f"[models.first]\npath = '{demo_folder()}'\n")
    assert "did you mean first?" in run("info", "frist", "--models", file, code=2).output


def test_info_shows_whether_a_hub_model_fits_without_fetching_it(
    hub: HubState, tmp_path: Path
) -> None:
    found = json.loads(run("info", MODEL, "--json").stdout)
    assert found["place"] == "on the Hub, not fetched"
    assert found["this_machine"]["fits"]
    # 6 layers of 2 heads of 64, keys and values of 4 bytes
    assert found["this_machine"]["bytes_per_token"] == 6144
    assert [choice["form"] for choice in found["choices"]] == ["as is"] * 3
    assert not (tmp_path / "cache").exists()
    text = run("info", MODEL).stdout
    assert "it fits; room for agents: " in text
    assert "16 GB" in text


def test_a_model_in_the_file_is_found_by_name(tmp_path: Path) -> None:
    file = written(tmp_path, f"[models.first]\npath = '{demo_folder()}'\n")
    assert f"model         {demo_folder()}" in run("info", "first", "--models", file).stdout


@pytest.mark.parametrize(
    ("bits", "reason", "stays_packed"),
    [(4, "", True), (4, "there is no C compiler", False), (6, "", False)],
)
def test_info_shows_whether_quantized_weights_stay_packed_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int, reason: str, stays_packed: bool
) -> None:
    monkeypatch.setattr(packed_products, "unavailable", lambda: reason)
    folder = write_tiny(tmp_path / "model", "llama", {"group_size": 32, "bits": bits})
    found = json.loads(run("info", str(folder), "--json").stdout)
    in_memory = found["this_machine"]["weight_bytes"]
    assert in_memory == (found["weight_bytes"] if stays_packed else 4 * found["parameters"])


@pytest.mark.parametrize("command", ["pull", "rm", "info"])
def test_a_model_missing_from_the_hub_is_reported(hub: HubState, command: str) -> None:
    assert (
        "coast/none"
        in run(command, "coast/none", *(["--yes"] if command == "rm" else []), code=2).output
    )


@pytest.mark.parametrize("command", ["pull", "rm"])
def test_only_models_of_the_hub_are_pulled_and_removed(hub: HubState, command: str) -> None:
    assert (
        "is not the id (owner/name) or name of a Hub model" in run(command, DEMO_ID, code=2).output
    )


def test_info_names_the_draft_model(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        f"[models.first]\npath = '{demo_folder()}'\nspeculation = 'holdfast-demo-draft'\n"
        f"[models.second]\npath = '{demo_folder()}'\nspeculation = 'off'\n"
        f"[models.third]\npath = '{demo_folder()}'\nspeculation = 'nobody/fetched-it'\n",
    )
    drafts = {"first": DRAFT_ID, "second": None, "third": "nobody/fetched-it"}
    for name, draft in drafts.items():
        found = json.loads(run("info", name, "--json", "--models", file).stdout)
        assert found["draft_model"] == draft
    text = run("info", "first", "--models", file).stdout
    assert re.search(rf"^draft model +{DRAFT_ID}$", text, re.MULTILINE)
    assert "draft model" not in run("info", "second", "--models", file).stdout


def test_a_missing_draft_model_is_listed_with_the_reason(tmp_path: Path) -> None:
    file = written(
        tmp_path, f"[models.first]\npath = '{demo_folder()}'\nspeculation = 'nonsense'\n"
    )
    shown = run("ls", "--models", file).stdout
    assert "left out: first" in shown
    assert "speculation = nonsense: there is no model folder nonsense" in shown
