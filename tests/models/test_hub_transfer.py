"""An interrupted download resumes where it stopped and leaves nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holdfast.errors import ModelLoadError
from holdfast.models.download import interrupted_downloads, pull_model, removal_of
from holdfast.models.hub import ModelSource
from tests.fakes.foreign_weights import safetensors_bytes
from tests.fakes.hub import HubState, hub_in_place

MODEL = "coast/kelp-small"
SOURCE = ModelSource(kind="hub", name=MODEL)
WEIGHTS = safetensors_bytes({"w": ("F32", np.arange(1 << 18, dtype=np.float32))})  # 1 MiB
ETAG = hashlib.sha256(WEIGHTS).hexdigest()
FILE = "model.safetensors"


class PullStopped(Exception):
    """Raised to stop a pull."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubState]:
    with hub_in_place(monkeypatch, tmp_path / "cache") as state:
        state.repositories[MODEL] = {
            "config.json": b'{"model_type": "llama"}',
            FILE: WEIGHTS,
            "tokenizer.json": b"{}",
        }
        state.lfs_files = {FILE}
        yield state


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models--coast--kelp-small"


def pulled() -> list[int]:
    """Pull the model; returns the bytes done at each step of the download."""
    steps: list[int] = []

    def note(stage: str, done: int, total: int) -> None:
        if stage == "download":
            steps.append(done)

    folder = pull_model(SOURCE, on_step=note).folder
    assert (folder / FILE).read_bytes() == WEIGHTS
    return steps


def ranges(hub: HubState) -> list[int]:
    """The offsets at which transfers of the weights began."""
    asked = [each for each in hub.requests if each.startswith("GET") and f"/{FILE}" in each]
    return [int(each.partition("bytes=")[2].rstrip("-") or 0) for each in asked]


def partial_files(repository: Path) -> list[str]:
    return sorted(file.name for file in repository.rglob("*.incomplete"))


def partial_size(repository: Path) -> int:
    return max(file.stat().st_size for file in repository.rglob("*.incomplete"))


def stop_late(stage: str, done: int, total: int) -> None:
    if done > 300_000:
        raise PullStopped


def interrupted(hub: HubState, *, after: int) -> None:
    """Pull the model until its weights have this many bytes, and stop on request."""

    def stop(stage: str, done: int, total: int) -> None:
        if done > after:
            raise PullStopped

    with pytest.raises(PullStopped):
        pull_model(SOURCE, on_step=stop)
    hub.requests.clear()


@pytest.mark.parametrize("resets", [False, True], ids=["closed", "reset"])
def test_a_broken_connection_loses_no_byte_that_has_arrived(hub: HubState, resets: bool) -> None:
    hub.resets = resets
    hub.cut_after_bytes[FILE] = 350_000
    steps = pulled()
    first, second = ranges(hub)
    assert first == 0
    # when a connection is reset, the system may drop unread data
    assert 0 < second <= 350_000 if resets else second == 350_000
    assert steps == sorted(steps)


def test_a_download_survives_repeatedly_broken_connections(hub: HubState) -> None:
    hub.cuts_each_after = 100_000
    steps = pulled()
    assert ranges(hub) == [*range(0, len(WEIGHTS), 100_000)]
    assert steps == sorted(steps)


def test_a_download_fails_if_the_hub_stops_sending(hub: HubState, repository: Path) -> None:
    hub.cut_after_bytes[FILE] = 350_000
    interrupted(hub, after=349_000)
    hub.repositories[MODEL][FILE] = WEIGHTS
    hub.sends_nothing = True
    with pytest.raises(ModelLoadError, match="was interrupted") as failed:
        pulled()
    assert str(failed.value).endswith(f"from there: holdfast models pull {MODEL}")
    assert 1 <= len(ranges(hub)) <= 6
    hub.sends_nothing = False
    hub.requests.clear()
    pulled()
    assert ranges(hub) == [350_000]
    assert partial_files(repository) == []


@pytest.mark.parametrize("status", [429, 503])
def test_a_resumed_download_survives_a_temporarily_failing_server(
    hub: HubState, repository: Path, status: int
) -> None:
    interrupted(hub, after=300_000)
    size = partial_size(repository)
    hub.passing_failures = [status] * 5
    hub.passing_failures_of_heads = [status] * 3
    pulled()
    assert set(ranges(hub)) == {size}
    assert partial_files(repository) == []


def test_a_permanently_failing_server_ends_the_pull_resumably(
    hub: HubState, repository: Path
) -> None:
    interrupted(hub, after=300_000)
    size = partial_size(repository)
    hub.passing_failures = [503] * 100
    with pytest.raises(ModelLoadError) as failed:
        pulled()
    assert str(failed.value) == (
        f"the download of {MODEL} was interrupted (the Hub answered 503); what has arrived is kept, "
        f"and this command continues from there: holdfast models pull {MODEL}"
    )
    hub.passing_failures.clear()
    hub.requests.clear()
    pulled()
    assert ranges(hub) == [size]


def test_a_forbidden_file_is_requested_once(hub: HubState) -> None:
    hub.passing_failures_of_heads = [403]
    with pytest.raises(ModelLoadError, match="HF_TOKEN"):
        pulled()


def test_a_file_longer_than_announced_is_refused_without_advice(
    hub: HubState, repository: Path
) -> None:
    hub.surplus[FILE] = b"more"
    with pytest.raises(ModelLoadError) as failed:
        pulled()
    size = len(WEIGHTS)
    assert str(failed.value) == f"the Hub sent more than the {size:,} bytes of {FILE} of {MODEL}"
    hub.surplus.clear()
    hub.requests.clear()
    pulled()
    assert ranges(hub) == [0]
    assert partial_files(repository) == []


@pytest.mark.parametrize("etag", ["5f3.gz", "a:b", "x" * 250])
def test_a_download_with_an_odd_etag_is_resumed_too(
    hub: HubState, repository: Path, etag: str
) -> None:
    hub.etags[FILE] = etag
    interrupted(hub, after=300_000)
    size = partial_size(repository)
    pulled()
    assert ranges(hub) == [size]
    assert partial_files(repository) == []


def test_a_stopped_pull_resumes_where_it_stopped(hub: HubState, repository: Path) -> None:
    interrupted(hub, after=300_000)
    size = partial_size(repository)
    assert size > 250_000
    assert not (repository / "snapshots").exists(), "an incomplete model is in no snapshot"
    assert not (repository / "refs").exists()
    steps = pulled()
    assert ranges(hub) == [size]
    assert any(after - before >= size for before, after in pairwise(steps))  # the progress, too
    assert partial_files(repository) == []


def test_a_server_without_ranges_sends_the_file_again(hub: HubState) -> None:
    hub.ignores_ranges = True
    hub.cut_after_bytes[FILE] = 350_000
    pulled()
    assert len(ranges(hub)) > 1


@pytest.mark.parametrize(
    ("content", "begins"),
    [(b"x" * 1000, [1000, 0]), (WEIGHTS, []), (WEIGHTS + b"x", [0])],
    ids=["damaged", "complete", "too long"],
)
def test_a_partial_file_of_another_process_is_completed_or_fetched_again(
    hub: HubState, repository: Path, content: bytes, begins: list[int]
) -> None:
    (repository / "blobs").mkdir(parents=True)
    (repository / "blobs" / f"{ETAG}.incomplete").write_bytes(content)
    pulled()
    assert ranges(hub) == begins
    assert partial_files(repository) == []


def test_unused_partial_files_of_a_killed_process_are_removed(
    hub: HubState, repository: Path
) -> None:
    blobs = repository / "blobs"
    blobs.mkdir(parents=True)
    locks = repository.parent / ".locks" / repository.name
    locks.mkdir(parents=True)
    for name in (f"{ETAG}.1a2b3c4d", "0123.1a2b3c4d", "4567", "89ab.5e6f7a8b"):
        (blobs / f"{name}.incomplete").write_bytes(b"x")
    with (locks / "89ab.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pulled()
    assert partial_files(repository) == ["89ab.5e6f7a8b.incomplete"]


def test_two_concurrent_pulls_fetch_each_file_once(hub: HubState, repository: Path) -> None:
    hub.sends_files.clear()
    results: list[list[int]] = []
    threads = [threading.Thread(target=lambda: results.append(pulled())) for _ in range(2)]
    for thread in threads:
        thread.start()
    hub.sends_files.set()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert ranges(hub) == [0]
    assert partial_files(repository) == []


def test_an_interrupted_update_keeps_the_old_model(hub: HubState, repository: Path) -> None:
    pulled()
    before = (repository / "refs" / "main").read_text()
    newer = hashlib.sha1(b"newer").hexdigest()
    hub.commits[MODEL] = newer
    hub.repositories[MODEL][FILE] = WEIGHTS[:-4] + b"more"
    with pytest.raises(PullStopped):
        pull_model(SOURCE, on_step=stop_late)
    assert (repository / "refs" / "main").read_text() == before
    pull_model(SOURCE, on_step=lambda *_: None)
    assert (repository / "refs" / "main").read_text() == newer
    assert os.listdir(repository / "snapshots").count(newer) == 1


def test_a_truncated_file_in_the_cache_is_fetched_again(hub: HubState) -> None:
    pulled()
    hub.requests.clear()
    blob = (pull_model(SOURCE, on_step=lambda *_: None).folder / FILE).resolve()
    blob.write_bytes(WEIGHTS[:-100])
    pulled()
    assert ranges(hub) == [0]


def test_the_remains_of_a_download_can_be_removed(hub: HubState, repository: Path) -> None:
    interrupted(hub, after=300_000)
    assert list(interrupted_downloads(repository.parent)) == [MODEL]
    removal = removal_of(MODEL, repository.parent)
    assert removal.expected_freed_size > 250_000
    removal.execute()
    assert not repository.exists()
    assert interrupted_downloads(repository.parent) == {}
