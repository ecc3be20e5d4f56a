"""The table of the code base's structure counts correctly."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.sources import PACKAGE, ROOT, product_sources
from tools.house import (
    FORMS,
    MARKERS,
    Structure,
    Text,
    calls,
    markers,
    met,
    names_of_tests,
    read,
    table,
)
from tools.house_trace import Call

MODULE = '''"""What is kept stays."""

# a comment
# in two lines
import os  # another one


class Box:
    """Its docstring."""

    size: int = 1

    def open(self, *, quickly: bool = False) -> str:
        return f"{self.size:>3} {os.sep}"


def test_boxes_open() -> None:
    """One

    more."""
    assert "text" "s"
'''


PACKAGE_FILE = """
class Box:
    pass


def boxes():
    box = Box()
    yield box
    yield box


def count(box):
    return 1


def work():
    return [count(box) for box in boxes()]
"""
PROGRAM = """
import sys
from holdfast.box import work

print(flush=True)
for line in sys.stdin:
    work()
    print(flush=True)
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    path = tmp_path / "module.py"
    path.write_text(MODULE)
    return path


def test_tokens_exclude_comments_docstrings_and_layout(module: Path) -> None:
    statements = [
        "import os",
        "class Box :",
        "size : int = 1",
        "def open ( self , * , quickly : bool = False ) -> str :",
        "return f-string",
        "def test_boxes_open ( ) -> None :",
        "assert text s",
    ]
    assert read(module).tokens == sum(len(statement.split()) for statement in statements)


def test_prose_is_docstrings_and_comments(module: Path) -> None:
    assert read(module).prose == [
        "What is kept stays.",
        "a comment in two lines",
        "another one",
        "Its docstring.",
        "One",
        "more.",
    ]


def test_names_of_tests_are_read_as_sentences(module: Path) -> None:
    assert names_of_tests([read(module)]) == ["boxes open"]


@pytest.mark.parametrize(
    "sentence",
    [
        "What is kept stays.",
        "Who comes meets one who waits.",
        "The end of it is marked.",
        "Read anew.",
        "A process of its own.",
        "It waits in vain.",
        "It is no number.",
    ],
)
def test_an_awkward_phrase_is_counted(sentence: str) -> None:
    assert any(marker.search(sentence) for marker in MARKERS)


@pytest.mark.parametrize(
    "sentence",
    [
        "What is the limit?",
        "The client that waits gets an error.",
        "Read each of them again.",
        "The cache keeps blocks on disk and evicts the oldest block first.",
        "The model is no longer loaded.",
    ],
)
def test_plain_english_is_not_counted(sentence: str) -> None:
    assert markers([sentence]) == 0


def test_markers_are_counted_per_10_000_words() -> None:
    assert markers(["read anew", "plain words here again, and some more"]) == 1111


def test_listed_names_exist_in_the_package() -> None:
    structure = Structure(
        Text(source.path, source.text)
        for source in product_sources()
        if source.path.is_relative_to(PACKAGE)
    )
    assert structure.missing() == []
    structure.names.remove("store.block.Block")
    assert structure.missing() == ["store.block.Block"]


def test_a_blocks_calls_are_those_that_handle_its_forms() -> None:
    block = FORMS["block"][0]
    run = [
        Call("worker", "store.store.BlockStore.put", frozenset({block, "store.store.Other"}), 3),
        Call("worker", "worker.loop.loop.WorkerLoop.run", frozenset(), 1),
    ]
    assert met("block", [run]) == {block}
    assert calls("block", run, "worker") == 3
    assert calls("chat", run, "worker") == 4
    assert calls("chat", run, "front") == 0


def test_the_table_shows_recorded_and_target_values() -> None:
    shown = table({"tokens": 12_000, "new": 1}, {"tokens": 13_000, "gone": 7}, {"tokens": 9_000})
    rows = [[cell.strip() for cell in line.split("|")] for line in shown.splitlines()[1:]]
    assert rows == [
        ["tokens    12,000", "13,000", "9,000"],
        ["new            1", "-", "-"],
        ["gone           -", "7", "-"],
    ]


def test_each_completed_call_is_recorded_with_its_classes(tmp_path: Path) -> None:
    package = tmp_path / "holdfast"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "box.py").write_text(PACKAGE_FILE)
    shutil.copy(ROOT / "tools" / "house_hook.py", tmp_path / "sitecustomize.py")
    with socket.create_server(("127.0.0.1", 0)) as door:
        environ = {
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "HOUSE_PORT": str(door.getsockname()[1]),
            "HOUSE_PACKAGE": f"{package}/",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()  # the package is imported
        connection, _ = door.accept()
        with process, connection, connection.makefile("rw") as link:
            assert json.loads(link.readline())[0] == process.pid
            recorded = []
            for word in ("start", "stop"):
                link.write(f"{word}\n")
                link.flush()
                recorded = json.loads(link.readline())
                process.stdin.write("again\n")
                process.stdin.flush()
                process.stdout.readline()
            process.stdin.close()
    assert sorted(recorded) == [
        ["box.boxes", ["box.Box"], 1],
        ["box.count", ["box.Box"], 2],
        ["box.work", [], 1],
    ]
