"""Every disk operation fails with every error, once, briefly or for long: no stored data is lost,
no answer is wrong, and everything works again after the errors.

`python -m tests.store.test_store_faults` prints the table.
"""

from __future__ import annotations

import errno
import logging
import shutil
import sqlite3
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest

from holdfast.config import ResponsesSettings
from holdfast.errors import WorkerUnavailable
from holdfast.front.images.folder import ImageFolder
from holdfast.front.records.answer_tokens import AnswerFile, StoredAnswer
from holdfast.front.records.responses import FileDamaged, RecordKey, RecordMissing, ResponseFile
from holdfast.front.telemetry.history import PerformanceHistory
from holdfast.front.telemetry.history_file import HistoryFile, write_history
from holdfast.models.image_files import image_name
from holdfast.store.block import BadBlock, ReadFailed
from holdfast.store.folder import StoreFolder
from holdfast.store.io_thread import RETRY_SECONDS
from holdfast.store.store import BlockStore
from holdfast.worker.vision.feature_cache import FeatureCache
from holdfast.worker.vision.model import ImageFeatures
from tests.fakes.failing_disk import ERRORS, OPERATIONS, FailingDisk, failing_disk
from tests.fakes.moved_clock import MovedClock
from tests.fakes.stored_blocks import FINGERPRINT, bytes_of, make_block, make_chain, unusable_files

DURATIONS = {"once": 1, "for a moment": 6, "for long": 10**9}
FEW_ERRORS = (errno.EIO, errno.ENOENT)
FEW_DURATIONS = ("once", "for long")
CHAIN = make_chain(6)
NEW = make_block([77], after=CHAIN[-1])
RECORDS = {f"{number:032x}": f"session {number}".encode() for number in range(3)}
COUNT = 5


@dataclass(frozen=True)
class Kept:
    """One kind of stored data.

    use: reads everything and writes more, like the server; returns how many old items were served
    during the errors, and how many afterwards by the same process. check: returns how many old
    items a new process finds.
    """

    total: int
    fill: Callable[[Path], None]
    use: Callable[[Path, FailingDisk], tuple[int, int]]
    check: Callable[[Path], int]


# -- blocks and session records


def fill_store(folder: Path) -> None:
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        for block in CHAIN:
            store.put(block)
        for name, data in RECORDS.items():
            store.put_record(name, data)
        assert store.flush()


def read_blocks(store: BlockStore) -> int:
    served = 0
    for block in CHAIN:
        try:
            assert bytes_of(store.read(block.key).result(60)) == block
            served += 1
        except ReadFailed as failure:
            assert not isinstance(failure, BadBlock), "an error says nothing about the content"
    return served


def use_store(folder: Path, disk: FailingDisk) -> tuple[int, int]:
    clock = MovedClock()
    with BlockStore(folder, fingerprint=FINGERPRINT, clocks=clock.clocks()) as store:
        store.entries()
        served = read_blocks(store)
        for block in (*CHAIN, NEW):
            store.put(block)
        store.put_record(next(iter(RECORDS)), b"changed")
        store.touch([CHAIN[0].key])
        store.flush()
        store.records()
        store.put(make_block([78]))
        store.flush()
        disk.heal()
        clock.moved_seconds += RETRY_SECONDS + 1
        for block in (*CHAIN, NEW):
            store.put(block)
        store.flush()
        again = read_blocks(store)
        assert store.statistics().mode == "writing"
        store.check_invariants()
    return served, again


def check_store(folder: Path) -> int:
    assert unusable_files(folder) == {}
    assert not list((folder / "quarantine").iterdir())
    assert not list((folder / "incoming").iterdir())
    with BlockStore(folder, fingerprint=FINGERPRINT) as store:
        records = store.records()
        assert records is not None
        assert records.found.keys() == RECORDS.keys()
        assert records.found[next(iter(RECORDS))] == b"changed", "it was tried again"
        assert not any(entry.is_missing for entry in store.entries())
        assert NEW.key in {entry.block.key for entry in store.entries()}
        store.check_invariants()
        return read_blocks(store)


# -- known answers


def secret(number: int) -> bytes:
    return bytes([number]) * 32


def fill_answers(folder: Path) -> None:
    StoreFolder(folder).prepare()
    file = AnswerFile(folder)
    for number in range(COUNT):
        file.put(secret(number), StoredAnswer(b"tag", b"body"))
    file.close()


def find_answers(file: AnswerFile) -> int:
    return sum(
        file.find(secret(number)) == (StoredAnswer(b"tag", b"body"),) for number in range(COUNT)
    )


def use_answers(folder: Path, disk: FailingDisk) -> tuple[int, int]:
    file = AnswerFile(folder)
    served = find_answers(file)
    file.put(secret(99), StoredAnswer(b"tag", b"more"))
    served = max(served, find_answers(file))
    disk.heal()
    again = find_answers(file)
    file.close()
    return served, again


def check_answers(folder: Path) -> int:
    file = AnswerFile(folder)
    found = find_answers(file)
    file.close()
    return found


# -- stored responses


def fill_responses(folder: Path) -> None:
    StoreFolder(folder).prepare()
    file = ResponseFile(folder, ResponsesSettings())
    for number in range(COUNT):
        file.put(RecordKey("", str(number)), {"id": str(number)}, items=[{"id": "i"}])
    file.close()


def find_responses(file: ResponseFile) -> int:
    found = 0
    for number in range(COUNT):
        try:
            found += file.record(RecordKey("", str(number))).body == {"id": str(number)}
            found += 0 * len(file.items(RecordKey("", str(number))))
        except (OSError, sqlite3.Error, MemoryError):
            continue  # a 503 that says so
        except RecordMissing:
            pytest.fail("it is said not to exist")
    return found


def use_responses(folder: Path, disk: FailingDisk) -> tuple[int, int]:
    file = ResponseFile(folder, ResponsesSettings())
    served = find_responses(file)
    with suppress(OSError, sqlite3.Error, MemoryError, FileDamaged):
        file.put(RecordKey("", "new"), {"id": "new"})
    disk.heal()
    again = find_responses(file)
    file.close()
    return served, again


def check_responses(folder: Path) -> int:
    file = ResponseFile(folder, ResponsesSettings())
    found = find_responses(file)
    file.close()
    assert not list(folder.rglob("*.damaged"))
    return found


# -- images, their features, the history


def picture(number: int) -> bytes:
    return b"a picture" * number + b"!"


def fill_images(folder: Path) -> None:
    images = ImageFolder(folder, max_bytes=10**6)
    for number in range(COUNT):
        images.hold_image(picture(number))


def hold_images(images: ImageFolder) -> int:
    """The number of usable images."""
    held = 0
    for number in range(COUNT):
        with suppress(WorkerUnavailable):
            images.hold_image(picture(number))
            held += 1
    return held


def use_images(folder: Path, disk: FailingDisk) -> tuple[int, int]:
    images = ImageFolder(folder, max_bytes=10**6)
    served = hold_images(images)
    with suppress(WorkerUnavailable):
        images.hold_image(picture(50))
    disk.heal()
    return served, hold_images(images)


def check_images(folder: Path) -> int:
    path = ImageFolder(folder, max_bytes=10**6).path
    files = [path / image_name(picture(number), tenant="") for number in range(COUNT)]
    return sum(
        file.is_file() and image_name(file.read_bytes(), tenant="") == file.name for file in files
    )


def features(folder: Path) -> FeatureCache:
    return FeatureCache(folder, fingerprint="f" * 32, ram_bytes=1, disk_bytes=10**6)


def feature(number: int) -> ImageFeatures:
    return ImageFeatures.of_arrays(
        {
            name: array + number if array.dtype == mx.float32 else array
            for name, array in FEATURES.items()
        }
    )


FEATURES = {"embeddings": mx.ones((2, 4)), "is_visual": mx.array([True, True])}


def fill_features(folder: Path) -> None:
    for number in range(COUNT):
        features(folder).add(str(number), feature(number))


def find_features(folder: Path) -> int:
    cache = features(folder)
    return sum(
        cache.has(str(number)) and cache.find(str(number)) is not None for number in range(COUNT)
    )


def use_features(folder: Path, disk: FailingDisk) -> tuple[int, int]:
    served = find_features(folder)
    features(folder).add("new", feature(9))
    disk.heal()
    return served, find_features(folder)


def fill_history(folder: Path) -> None:
    write_history(folder / "h.history", PerformanceHistory().serialize())


KINDS = {
    "blocks and sessions": Kept(len(CHAIN), fill_store, use_store, check_store),
    "known answers": Kept(COUNT, fill_answers, use_answers, check_answers),
    "stored responses": Kept(COUNT, fill_responses, use_responses, check_responses),
    "images": Kept(COUNT, fill_images, use_images, check_images),
    "features of images": Kept(COUNT, fill_features, use_features, find_features),
}
ALL_OPERATIONS = (*OPERATIONS, "sqlite")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("sound"))


def filled(place: Path) -> Path:
    for name, kind in KINDS.items():
        (place / name).mkdir()
        kind.fill(place / name / "s")
    return place


@dataclass(frozen=True)
class Outcome:
    name: str
    operation: str
    error: str
    duration: str
    failed: int
    served: int  # during the errors
    again: int  # in the same process, afterwards
    left: int  # on disk, found by a new process
    total: int


def outcome(
    sound: Path, place: Path, name: str, operation: str, error: int, duration: str
) -> Outcome:
    kind = KINDS[name]
    folder = place / "s"
    shutil.copytree(sound / name / "s", folder)
    with failing_disk(folder) as disk:
        disk.fail(operation, error, times=DURATIONS[duration])
        served, again = kind.use(folder, disk)
        failed = disk.failed
    left = kind.check(folder)
    shutil.rmtree(folder)
    code = errno.errorcode[error]
    return Outcome(name, operation, code, duration, failed, served, again, left, kind.total)


def outcomes(
    sound: Path,
    place: Path,
    *,
    name: str,
    operation: str,
    errors: tuple[int, ...] = ERRORS,
    durations: tuple[str, ...] = tuple(DURATIONS),
) -> Iterator[Outcome]:
    for error in errors:
        for duration in durations:
            yield outcome(sound, place, name, operation, error, duration)


def assert_nothing_is_lost(found: Iterator[Outcome]) -> None:
    assert [each for each in found if min(each.left, each.again) < each.total] == []


@pytest.mark.parametrize("operation", ALL_OPERATIONS)
@pytest.mark.parametrize("name", KINDS)
def test_no_error_loses_stored_data(sound: Path, tmp_path: Path, name: str, operation: str) -> None:
    assert_nothing_is_lost(
        outcomes(
            sound,
            tmp_path,
            name=name,
            operation=operation,
            errors=FEW_ERRORS,
            durations=FEW_DURATIONS,
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("operation", ALL_OPERATIONS)
@pytest.mark.parametrize("name", KINDS)
def test_no_error_of_the_full_list_loses_stored_data(
    sound: Path, tmp_path: Path, name: str, operation: str
) -> None:
    assert_nothing_is_lost(outcomes(sound, tmp_path, name=name, operation=operation))


def test_an_unreadable_history_is_not_replaced(tmp_path: Path) -> None:
    fill_history(tmp_path)
    for operation in OPERATIONS:
        for error in FEW_ERRORS:
            with failing_disk(tmp_path) as disk:
                disk.fail(operation, error)
                disk.only = ".history"
                HistoryFile(PerformanceHistory(), tmp_path / "h.history").open()
            assert (tmp_path / "h.history").stat().st_size > 0


def table() -> None:
    """Print the outcomes, with the errors of the same outcome in one row."""
    logging.disable(logging.CRITICAL)

    def write(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "sound").mkdir()
        sound = filled(place / "sound")
        write(
            "| kept | operation | errors | duration | served meanwhile | served afterwards | left |"
        )
        write("|---|---|---|---|---|---|---|")
        for name in KINDS:
            for operation in ALL_OPERATIONS:
                rows: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
                for each in outcomes(sound, place, name=name, operation=operation):
                    if each.failed:
                        key = (each.duration, each.served, each.again, each.left, each.total)
                        rows[key].append(each.error)
                for (duration, served, again, left, total), codes in rows.items():
                    shown = "all 16" if len(codes) == len(ERRORS) else ", ".join(codes)
                    write(
                        f"| {name} | {operation} | {shown} | {duration} | {served} of {total} | "
                        f"{again} of {total} | {left} of {total} |"
                    )


if __name__ == "__main__":
    table()
