"""A Hub mirror can neither write outside the cache nor cause a traceback, and a silent Hub does not
delay a cached model.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants, get_session

from holdfast.config import ModelSettings
from holdfast.errors import ModelLoadError
from holdfast.models.download import hub_source, pull_model, resolve_model
from holdfast.models.fit import size_on_hub
from holdfast.models.hub import ModelSource
from tests.fakes.foreign_weights import safetensors_bytes
from tests.fakes.hub import HubState, hub_in_place

MODEL = "coast/kelp-small"
SOURCE = ModelSource(kind="hub", name=MODEL)
FILE = "model.safetensors"
WEIGHTS = safetensors_bytes({"w": ("F32", np.ones(4, np.float32))})
OTHER_WEIGHTS = safetensors_bytes({"w": ("F32", np.zeros(4, np.float32))})
COMMIT = hashlib.sha1(MODEL.encode()).hexdigest()
OUTSIDE = [
    *("../../../x", "..", ".", "/tmp/x", "a/b", "a\\b", "..\\..\\x", "~/x" * 30, "x" * 300),
    "%2e%2e%2fx",
]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "home" / "cache") as state:
        state.repositories[MODEL] = {
            "config.json": b'{"model_type": "llama"}',
            FILE: WEIGHTS,
            "tokenizer.json": b"{}",
        }
        yield state


def fetch() -> Path:
    return resolve_model(ModelSettings(path=MODEL), progress=lambda *_: None)


def refusal(tmp_path: Path) -> str:
    """The error message for these answers. Checks that no file is written outside the cache."""
    with pytest.raises(ModelLoadError) as caught:
        fetch()
    assert os.listdir(tmp_path) in ([], ["home"])
    assert os.listdir(tmp_path / "home") == ["cache"] if (tmp_path / "home").exists() else True
    cache = tmp_path / "home" / "cache"
    beside = {file.relative_to(cache).parts[0] for file in cache.rglob("*") if file.is_file()}
    assert beside <= {"models--coast--kelp-small", ".locks", "CACHEDIR.TAG"}
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_commit_naming_a_file_outside_the_cache_is_refused(hub: HubState, tmp_path: Path) -> None:
    for name in OUTSIDE:
        hub.commit_headers[FILE] = name
        assert "is refused" in refusal(tmp_path), name


ETAGS = [*OUTSIDE, "a:b", "a;br", ".gz", "5f3.gz", "{1,2}", "a b@c#d$e"]
ETAGS_OF_SERVERS = ["abc-7", "0x8D9ABCDEF", "d41d8cd98f00b204e9800998ecf8427e-38", "a+b=="]


@pytest.mark.parametrize(
    ("header", "name"),
    [
        *(("etags", name) for name in [*ETAGS, *ETAGS_OF_SERVERS]),
        *(("linked_etags", name) for name in ETAGS[::4]),
    ],
)
def test_any_etag_becomes_a_file_in_the_cache(
    hub: HubState, tmp_path: Path, header: str, name: str
) -> None:
    getattr(hub, header)[FILE] = name
    folder = fetch()
    assert (folder / FILE).read_bytes() == WEIGHTS
    assert (folder / FILE).resolve().parent == folder.parents[1] / "blobs"
    assert os.listdir(tmp_path) == ["home"]
    assert os.listdir(tmp_path / "home") == ["cache"]
    # another ETag is another file
    getattr(hub, header)[FILE] = name + "x"
    hub.commits[MODEL] = "0" * 40
    hub.repositories[MODEL][FILE] = OTHER_WEIGHTS
    assert (fetch() / FILE).read_bytes() == OTHER_WEIGHTS
    assert (folder / FILE).read_bytes() == WEIGHTS


def test_a_file_with_an_empty_etag_is_refused(hub: HubState, tmp_path: Path) -> None:
    hub.etags[FILE] = ""
    assert "ETag" in refusal(tmp_path)


def test_an_empty_linked_etag_counts_as_missing(hub: HubState) -> None:
    hub.linked_etags[FILE] = ""
    assert (fetch() / FILE).read_bytes() == WEIGHTS


def test_an_invalid_commit_is_refused(hub: HubState, tmp_path: Path) -> None:
    for name in (*OUTSIDE, "", None, 7, [], "main", "a" * 39, "\0" * 40):
        hub.info = {"sha": name}
        said = refusal(tmp_path)
        assert "is refused" in said or "names no commit" in said, name


def test_a_file_outside_the_model_is_refused(hub: HubState, tmp_path: Path) -> None:
    up = ["../x.json", "a/../../x.json", "/tmp/x.json", "..\\x.json", "C:\\x.json"]
    odd = ["a//b.json", "./x.json", "x\0.json", "x\n.json", "\x1b[2J.json", "", 7, None]
    for path in (*up, *odd):
        hub.tree = [
            {"type": "file", "path": name, "size": 1, "oid": "0" * 40}
            for name in ("config.json", path)
        ]
        assert path is None or "it names a file" in refusal(tmp_path), path


INVALID_ENTRIES: list[Any] = [
    {"type": "file", "path": "config.json"},
    {"type": "file", "path": "config.json", "size": -1, "oid": "../x"},
    {"path": "config.json", "size": 1, "oid": "0" * 40},
    {"type": "file", "path": FILE, "size": 1, "oid": "0", "lfs": {"oid": "../x", "size": 1}},
    {"type": "file", "path": FILE, "size": 1, "oid": "0" * 40, "xetHash": "../x"},
    {"type": "file", "path": FILE, "size": 1, "oid": "0" * 40, "lfs": 7},
    {"type": "file", "path": "config.json", "size": 1, "oid": 7},
    *([], 7, None, "config.json"),
]


def test_an_invalid_file_list_is_reported_in_one_line(hub: HubState, tmp_path: Path) -> None:
    for tree in (*([entry] for entry in INVALID_ENTRIES), {"a": 1}, "text", 7):
        hub.tree = tree
        assert refusal(tmp_path), tree


@pytest.mark.parametrize(
    "info",
    [{"id": None}, {"id": 7}, {"siblings": 7}, {"siblings": [7]}, {"siblings": [{}]}, {"tags": 7}],
)
def test_an_incomplete_description_suffices_or_is_reported(
    hub: HubState, tmp_path: Path, info: dict[str, object]
) -> None:
    hub.info = info
    if "id" in info and info["id"] is None:
        assert "did not answer as expected" in refusal(tmp_path)
        return
    with contextlib.suppress(ModelLoadError):
        fetch()


def test_a_pull_checks_answers_too(hub: HubState, tmp_path: Path) -> None:
    hub.commit_headers[FILE] = "../../../x"
    with pytest.raises(ModelLoadError, match="is refused"):
        pull_model(SOURCE, on_step=lambda *_: None)
    assert os.listdir(tmp_path) in ([], ["home"])


@pytest.mark.parametrize("place", ["", "/mirror"])
def test_a_mirror_below_a_path_is_checked_too(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
) -> None:
    hub.prefix = place
    monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint + place)
    template = f"{hub.endpoint}{place}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    hub.info = {"sha": "../../../x"}
    assert "is refused" in refusal(tmp_path)
    hub.info = {}
    fetch()


@pytest.mark.parametrize("name", ["../x", "a/b"])
def test_info_checks_answers_too(hub: HubState, name: str) -> None:
    hub.tree = [{"type": "file", "path": "config.json", "size": 1, "oid": name}]
    with pytest.raises(ModelLoadError, match="is refused"):
        size_on_hub(SOURCE)


@pytest.mark.parametrize(
    "revision", ["..", "../x", "a/../../x", "/x", "a//b", "refs/../../x", "a/"]
)
def test_a_revision_that_leads_outside_the_cache_is_refused(revision: str) -> None:
    assert hub_source(f"coast/kelp@{revision}") is None
    with pytest.raises(ModelLoadError, match="is not a branch, tag or commit"):
        hub_source("coast/kelp", revision=revision)
    assert hub_source("coast/kelp@refs/pr/1", revision="v1.0") is not None


# -- a Hub that is silent


@contextlib.contextmanager
def silent_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Accepts connections, and never answers."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.setblocking(False)
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setattr("holdfast.models.hub._ASK_SECONDS", 0.2)
        yield silent


def connections(silent: socket.socket) -> int:
    found = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            silent.accept()[0].close()
            found += 1
    return found


def test_a_silent_hub_is_asked_once_about_a_cached_model(
    hub: HubState, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = fetch()
    monkeypatch.setattr("holdfast.models.hub.check_reachable", _never)
    monkeypatch.setattr("holdfast.models.download.check_reachable", _never)
    with silent_hub(monkeypatch) as silent, caplog.at_level(logging.WARNING):
        assert fetch() == there
        assert connections(silent) <= 1
    assert "is used as it is in the cache: no answer within" in caplog.text


def test_no_request_waits_forever(hub: HubState) -> None:
    fetch()
    timeout = get_session().timeout
    assert None not in (timeout.connect, timeout.read, timeout.write, timeout.pool)


def _never() -> None:
    raise AssertionError("the Hub was asked")


def test_a_commit_in_the_cache_needs_no_hub(hub: HubState, monkeypatch: pytest.MonkeyPatch) -> None:
    there = fetch()
    hub.requests.clear()
    source = ModelSettings(path=f"{MODEL}@{COMMIT}")
    assert resolve_model(source, progress=lambda *_: None) == there
    assert hub.requests == []


def test_an_up_to_date_model_costs_one_request(hub: HubState) -> None:
    fetch()
    hub.requests.clear()
    fetch()
    assert len(hub.requests) == 1


def test_a_newer_model_is_fetched(hub: HubState) -> None:
    fetch()
    hub.commits[MODEL] = hashlib.sha1(b"newer").hexdigest()
    hub.repositories[MODEL]["generation_config.json"] = b"{}"
    assert (fetch() / "generation_config.json").exists()


def test_a_failing_update_leaves_the_cached_model_usable(
    hub: HubState, caplog: pytest.LogCaptureFixture
) -> None:
    there = fetch()
    hub.commits[MODEL] = hashlib.sha1(b"newer").hexdigest()
    hub.repositories[MODEL]["generation_config.json"] = b'{"top_k": 7}'
    hub.failing_files = {"generation_config.json"}
    for _ in range(2):
        assert fetch() == there
    assert f"{MODEL} is used as it is in the cache" in caplog.text
    with pytest.raises(ModelLoadError):
        pull_model(ModelSource(kind="hub", name=MODEL), on_step=lambda *_: None)
    hub.failing_files = set()
    assert (fetch() / "generation_config.json").exists()


def test_a_damaged_model_in_the_cache_is_not_used(hub: HubState) -> None:
    there = fetch()
    (there / FILE).resolve().unlink()  # its link dangles
    assert (fetch() / FILE).read_bytes() == WEIGHTS
