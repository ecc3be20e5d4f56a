"""A store whose files are damaged in every way that disks and people do: no wrong answer, no failed
request.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.wire.events import FinishReason
from holdfast.worker.engine.layouts import RowsRunner
from tests.fakes.caching_worker import CachingWorker, greedy
from tests.fakes.tiny_models import VOCAB_SIZE, kept_tiny

DAMAGES = int(os.environ.get("DAMAGES", "1000"))
AT_ONCE = 4  # damages between two lives of the worker

log = logging.getLogger(__name__)


def flip(rng: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 8])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)


def truncate(rng: random.Random, file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content))])


def extend(rng: random.Random, file: Path) -> None:
    file.write_bytes(file.read_bytes() + rng.randbytes(rng.randint(1, 5000)))


def blank(rng: random.Random, file: Path) -> None:
    content = bytearray(file.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 4096] = bytes(len(content[start : start + 4096]))
    file.write_bytes(content)


def swap(rng: random.Random, file: Path) -> None:
    other = rng.choice(sorted(file.parent.iterdir()))
    if other.is_file() and other != file:
        aside = file.with_suffix(".aside")
        file.rename(aside)
        other.rename(file)
        aside.rename(other)


def replace(rng: random.Random, file: Path) -> None:
    other = rng.choice(sorted(file.parent.iterdir()))
    if other.is_file() and other != file:
        shutil.copyfile(other, file)


def delete(rng: random.Random, file: Path) -> None:
    file.unlink()


KINDS: tuple[Callable[[random.Random, Path], None], ...] = (
    flip,
    flip,
    flip,
    truncate,
    extend,
    blank,
    swap,
    replace,
    delete,
)


def damage(rng: random.Random, folder: Path) -> str:
    """Damage one file, possibly the index."""
    files = sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and file.stat().st_size > 0 and "quarantine" not in file.parts
    )
    if not files:
        return "nothing left"
    file = rng.choice(files)
    kind = rng.choice(KINDS)
    kind(rng, file)
    return f"{kind.__name__} {file.relative_to(folder)}"


@pytest.mark.slow
@pytest.mark.timeout(300 + DAMAGES * 3)
def test_damaged_files_are_never_used_and_fail_no_request(tmp_path: Path) -> None:
    rng = random.Random(11)
    runner = RowsRunner(kept_tiny("llama"), None)
    prompts = [
        [rng.randrange(VOCAB_SIZE - 8) for _ in range(rng.randint(200, 700))] for _ in range(4)
    ]
    prompts += [prompt[:300] + prompts[0][:200] for prompt in prompts[:2]]

    def answers(folder: Path | None) -> tuple[list[list[int]], int]:
        worker = CachingWorker(runner, folder)
        inbox = worker.serve([[greedy(str(index), prompt) for index, prompt in enumerate(prompts)]])
        ends = [inbox.finished(str(index)) for index in range(len(prompts))]
        assert [end.reason for end in ends] == [FinishReason.LENGTH] * len(prompts)
        return [inbox.tokens(str(index)) for index in range(len(prompts))], sum(
            end.cached_tokens for end in ends
        )

    expected, _ = answers(None)
    cached = 0
    for number in range(0, DAMAGES, AT_ONCE):
        done = [damage(rng, tmp_path / "store") for _ in range(AT_ONCE)] if number else []
        got, found = answers(tmp_path / "store")
        assert got == expected, f"after {done}"
        cached += found
    log.info("%d damages, %d tokens were still found", DAMAGES, cached)
    assert cached > 0
