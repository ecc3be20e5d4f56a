"""House rules that no linter knows."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.project.sources import PACKAGE, ROOT, Source, product_sources, sources

MAY_CATCH_ALL = {
    "src/holdfast/worker/failures.py": 2,  # a request must not harm another one; the cache costs no answer
    "src/holdfast/sessions/transfer.py": 1,  # nor must a file
}
JUNK_DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "base", "shared"}
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
EXEMPTION = re.compile(r"#\s*(ruff|flake8):\s*noqa|#\s*mypy:\s*ignore-errors|#\s*type:\s*ignore(?!\[)|#\s*noqa(?!:)")


def comments(source: Source) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def catches_all(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:  # puts things in order and passes the error on
        return False
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in caught)


def test_every_room_has_an_empty_init_file() -> None:
    rooms = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    assert [str(room) for room in rooms if not (room / "__init__.py").is_file() and "bundled" not in room.parts] == []
    inits = [source for source in product_sources() if source.path.name == "__init__.py" and source.path.parent != PACKAGE]
    assert [source.name for source in inits if source.text] == []


def test_everything_is_caught_only_where_errors_end() -> None:
    found = Counter(
        source.name
        for source in product_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ExceptHandler) and catches_all(node)
    )
    assert {name: count for name, count in found.items() if count > MAY_CATCH_ALL.get(name, 0)} == {}


def test_nothing_is_left_for_later_in_a_comment() -> None:
    marked = [f"{source.name}:{line}" for source in sources() for line, text in comments(source) if UNFINISHED.search(text)]
    assert marked == []


def test_no_file_of_the_product_is_exempt_from_a_rule() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    patterns = [*ruff["lint"].get("per-file-ignores", {}), *ruff.get("extend-exclude", []), *ruff.get("exclude", [])]
    assert [pattern for pattern in patterns if not pattern.startswith(("tests/", "bench/tests/", "tools/"))] == []
    exempt = [
        f"{source.name}:{line}" for source in product_sources() for line, text in comments(source) if EXEMPTION.search(text)
    ]
    assert exempt == []


def test_mypy_leaves_out_no_module_of_the_product() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"].get("overrides", [])
    assert [module for override in overrides for module in override["module"] if module.startswith("holdfast")] == []


def test_there_are_no_junk_drawers() -> None:
    modules = [
        source for source in product_sources() if source.path.stem in JUNK_DRAWERS or source.path.parent.name in JUNK_DRAWERS
    ]
    assert [source.name for source in modules] == []
    classes = [
        f"{source.name}:{node.lineno} {node.name}"
        for source in product_sources()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Manager", "Helper", "Util", "Utils"))
    ]
    assert classes == []


def test_tests_use_fakes_and_no_mocks() -> None:
    mocked = [
        source.name for source in sources() if re.search(r"^\s*(from|import) (unittest\.mock|mock)\b", source.text, re.MULTILINE)
    ]
    assert mocked == []


ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_each_test_file_mirrors_a_file_of_its_room(room: str) -> None:
    tested = [path.stem.removeprefix("test_") for path in (ROOT / "tests" / room).rglob("test_*.py")]
    modules = {path.stem for path in (PACKAGE / room).rglob("*.py")} - {"__init__"}
    assert [name for name in tested if not any(name == module or name.startswith(f"{module}_") for module in modules)] == []


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    suffixes = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".yml", ""}
    folders = ("src", "tests", "tools", "docs", "bench", ".ci", "changes")
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]  # a file in a further worktree
    files += [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    home = re.compile(r"/(ro" + r"ot|wo" + r"rk|Use" + r"rs|ho" + r"me/[a-z]+)/")
    texts = {path: path.read_text(encoding="utf-8", errors="replace") for path in files if path.suffix in suffixes}
    assert [str(path.relative_to(ROOT)) for path, text in texts.items() if home.search(text)] == []


def test_no_two_classes_of_the_package_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for source in sources():
        if source.path.is_relative_to(PACKAGE):
            for node in ast.walk(source.tree):
                if isinstance(node, ast.ClassDef):
                    homes.setdefault(node.name, []).append(source.name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_tests_share_what_is_in_fakes_and_nothing_else() -> None:
    shared = re.compile(r"^\s*from ((?:holdfast_bench_)?tests(?!\.fakes)[\w.]*\.test_\w+) import", re.MULTILINE)
    found = {source.name: shared.findall(source.text) for source in sources() if shared.search(source.text)}
    assert found == {}
