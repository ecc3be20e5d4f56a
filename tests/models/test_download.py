from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.models.download import model_source, resolve_model, served_id
from holdfast.models.hub import ModelSource, check_reachable
from tests.fakes.foreign_weights import safetensors_bytes
from tests.fakes.hub import HubState, hub_in_place
from tests.fakes.server_process import python_output

MODEL = "coast/kelp-small"
WEIGHTS = safetensors_bytes({"w": ("F32", np.arange(1 << 18, dtype=np.float32))})  # 1 MiB


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        state.repositories[MODEL] = {
            "config.json": b'{"model_type": "llama"}',
            "model.safetensors": WEIGHTS,
            "tokenizer.json": b"{}",
            "modeling_kelp.py": b"print('hello')",
            "pytorch_model.bin": b"x" * 100,
        }
        yield state


def fetch(model: str = MODEL, **settings: object) -> tuple[Path, list[float]]:
    fractions: list[float] = []
    folder = resolve_model(
        ModelSettings(path=model, **settings),
        progress=lambda stage, fraction: fractions.append(fraction),
    )  # type: ignore[arg-type]
    return folder, fractions


def fetched_files(hub: HubState) -> list[str]:
    gets = [each for each in hub.requests if each.startswith("GET") and "/resolve/" in each]
    return [each.rpartition("/")[2] for each in gets]


def test_only_the_files_mlx_needs_are_fetched_and_no_code(hub: HubState) -> None:
    folder, fractions = fetch()
    names = sorted(file.name for file in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert fractions == sorted(fractions)
    # all bytes were counted
    assert (fractions[0], fractions[-2:]) == (0.0, [0.999, 1.0])


@pytest.mark.parametrize("is_lfs", [True, False])
def test_a_file_damaged_in_transit_is_fetched_again(hub: HubState, is_lfs: bool) -> None:
    hub.lfs_files = {"model.safetensors"} if is_lfs else set()
    hub.damaged_files = {"model.safetensors"}
    with pytest.raises(
        ModelLoadError, match=r"files damaged by the download were removed: model\.safetensors"
    ):
        fetch()
    hub.damaged_files = set()
    folder, _ = fetch()
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_code_is_fetched_only_if_trusted(hub: HubState) -> None:
    folder, _ = fetch(trust_remote_code=True)
    assert (folder / "modeling_kelp.py").exists()


def test_existing_files_are_not_fetched_again(hub: HubState) -> None:
    first, _ = fetch()
    hub.requests.clear()
    second, fractions = fetch()
    assert second == first
    assert fractions == []
    assert not fetched_files(hub)


def test_a_second_start_fetches_only_unfinished_files(hub: HubState) -> None:
    more = safetensors_bytes({"v": ("F32", np.ones(256, np.float32))})
    hub.repositories[MODEL]["model-2.safetensors"] = more
    hub.failing_files.add("model-2.safetensors")
    with pytest.raises(ModelLoadError, match="the Hub answered 503"):
        fetch()
    hub.failing_files.clear()
    hub.requests.clear()
    folder, fractions = fetch()
    assert fetched_files(hub) == ["model-2.safetensors"]
    assert (folder / "model-2.safetensors").read_bytes() == more
    assert fractions[-1] == 1.0


@pytest.mark.parametrize("trouble", ["offline", "failing", "unreachable"])
def test_without_a_working_hub_the_cache_is_used(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    online, _ = fetch()
    if trouble == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif trouble == "failing":
        hub.failing_status = 500
    else:
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert fetch()[0] == online


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        ("~nobody-at-all/models/x", {}, "nobody-at-all"),
        ("coast/nowhere", {}, "no folder coast/nowhere here and no model coast/nowhere on the Hub"),
        (f"{MODEL}@v9", {}, "has no revision v9 on the Hub"),
        (MODEL, {"gated": {MODEL}}, "is gated: accept its terms"),
        (MODEL, {"failing_status": 404}, "404"),
        (MODEL, {"repositories": {MODEL: {"a.png": b"x"}}}, "no files of an MLX model"),
    ],
)
def test_a_model_that_cannot_be_fetched_is_reported(
    hub: HubState, model: str, changes: dict[str, object], said: str
) -> None:
    for name, value in changes.items():
        setattr(hub, name, value)
    with pytest.raises(ModelLoadError, match=said):
        fetch(model)


def test_a_revision_comes_from_the_id_or_the_settings(hub: HubState) -> None:
    hub.revisions[MODEL] = {"v2"}
    assert fetch(f"{MODEL}@v2")[0] == fetch(revision="v2")[0]
    assert any("/revision/v2" in request for request in hub.requests)


def test_a_token_is_needed_and_used(hub: HubState, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelLoadError, match="it is private and HF_TOKEN is not set"):
        fetch()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert fetch()[0].exists()


def test_a_missing_network_without_cache_is_reported(
    hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE forbids"):
        fetch()


@pytest.mark.parametrize(
    ("endpoint", "said"),
    [
        ("http://127.0.0.1:1", "the Hub cannot be reached"),
        ("http://hub.invalid", r"the Hub cannot be reached.*hub\.invalid"),
        ("http://127.0.0.1:1\x00", "InvalidURL"),
    ],
)
def test_an_unreachable_hub_is_reported_in_one_line(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, endpoint: str, said: str
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(ModelLoadError, match=said) as caught:
        fetch()
    assert "\n" not in str(caught.value)


def test_an_unreachable_hub_is_asked_only_once(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:  # accepts connections and never answers
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("holdfast.models.hub._PATIENCE_SECONDS", 0.1)
        monkeypatch.setattr("holdfast.models.hub._REACH_SECONDS", 1.0)
        with pytest.raises(ModelLoadError, match=r"the Hub cannot be reached.*no answer|timed out"):
            fetch()
        silent.setblocking(False)
        connections = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
                connections += 1
    assert connections <= 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_slow_hub_is_awaited(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("holdfast.models.hub._PATIENCE_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as slow:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{slow.getsockname()[1]}")
        asking = threading.Thread(target=check_reachable)
        asking.start()
        connection, _ = slow.accept()
        with connection:
            asking.join(0.5)
            assert asking.is_alive()
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            asking.join()
    assert "slow to answer" in caplog.text


def test_a_full_disk_is_reported_before_anything_is_fetched(
    hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.models.download._SPARE_BYTES", 1 << 60)
    with pytest.raises(ModelLoadError, match="GB are free in"):
        fetch()
    assert not fetched_files(hub)


def test_every_failure_is_one_line(hub: HubState) -> None:
    for status in (400, 401, 403, 404, 429, 500, 503):
        hub.failing_status = status
        with pytest.raises(ModelLoadError) as caught:
            fetch(f"coast/kelp-{status}")
        assert "\n" not in str(caught.value)


def test_the_hub_librarys_variables_are_respected(hub: HubState, tmp_path: Path) -> None:
    code = (
        "from holdfast.models.download import resolve_model; from holdfast.config import "
        "ModelSettings\n"
        f"print(resolve_model(ModelSettings(path={MODEL!r}), progress=lambda *_: None))\n"
        "import sys; print('mlx.core' in sys.modules)"
    )
    home = str(tmp_path / "home")
    out = python_output(code, HF_ENDPOINT=hub.endpoint, HF_HOME=home, HF_HUB_CACHE="")
    folder, imports_mlx = out.split()
    assert Path(folder).is_relative_to(tmp_path / "home")
    assert imports_mlx == "False"


def test_folders_bundled_ids_and_hub_ids_are_distinguished(tmp_path: Path) -> None:
    assert model_source(str(tmp_path)) == ModelSource(kind="folder", name=str(tmp_path))
    assert model_source("") == ModelSource(kind="bundled", name="holdfast-demo")
    assert model_source("holdfast-demo-draft").kind == "bundled"
    assert model_source("a/b") == ModelSource(kind="hub", name="a/b")
    assert model_source("a/b@refs/pr/1") == ModelSource(
        kind="hub", name="a/b", revision="refs/pr/1"
    )
    assert model_source("a/b", revision="v1").revision == "v1"
    for wrong in ("/no/such/folder", "./kelp", "~/no/such", "kelp", "a/b/c"):
        with pytest.raises(ModelLoadError, match="there is no model folder"):
            model_source(wrong)


@pytest.mark.parametrize("base", ["holdfast-demo", "a/b", ""])
def test_an_adapters_name_is_refused_with_serving_advice(base: str, tmp_path: Path) -> None:
    base = base or str(tmp_path)
    with pytest.raises(ModelLoadError, match=f"holdfast serve {base} --adapter sql=FOLDER"):
        model_source(f"{base}:sql")


def test_an_existing_folder_comes_before_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "coast" / "kelp").mkdir(parents=True)
    assert model_source("coast/kelp").kind == "folder"


def test_the_served_id_is_the_name_or_the_source(tmp_path: Path) -> None:
    assert served_id(ModelSettings(path=str(tmp_path / "."), name="kelp")) == "kelp"
    assert served_id(ModelSettings(path=str(tmp_path))) == tmp_path.name
    assert served_id(ModelSettings(path="a/b@v1")) == "a/b"
    assert served_id(ModelSettings()) == "holdfast-demo"


def test_a_misspelled_bundled_model_is_refused_with_its_name() -> None:
    with pytest.raises(ModelLoadError, match=r"did you mean the bundled holdfast-demo\?"):
        model_source("holdfast-dmo")
