"""House rules beyond those of linters."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.project.sources import PACKAGE, ROOT, Source, product_sources, sources, texts

MAY_CATCH_ALL = {
    "src/holdfast/front/images/fetch.py": 1,  # a thread pool passes on every error
    "src/holdfast/front/server/dialect.py": 1,  # every error gets a response
    # a request must not harm another one; the cache costs no answer
    "src/holdfast/worker/loop/device_steps.py": 2,
    "src/holdfast/worker/vision/image_worker.py": 1,  # third-party code that reads an untrusted image
    "src/holdfast/worker/vision/load.py": 1,  # without it, the model still reads text
}
LONGEST_POLL_SECONDS = 0.01  # between two polls
MAY_SLEEP = {
    "tests/fakes/front_main.py": 1,  # the passing of time is tested
    "tests/fakes/slow_steps/sitecustomize.py": 1,  # a slow machine
    "tests/fakes/waiting_server.py": 1,
    "tests/slow/test_soak.py": 1,
    "bench/tests/test_scenarios.py": 1,  # a slow server and engine, for measurements
    "bench/tests/test_engine_steps.py": 1,
}
CATCHES = re.compile(r"\bexcept\s*:|\b(Base)?Exception\b")
CLASS = re.compile(r"^ *class (\w+)[(:]", re.MULTILINE)
IMPORT_OF_TESTS = re.compile(r"^ *(?:from|import) (tests\b[\w.]*)", re.MULTILINE)
JUNK_DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "base", "shared"}
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|X" + r"XX|HA" + r"CK)\b")
EXEMPTION = re.compile(
    r"#\s*(ruff|flake8):\s*noqa|#\s*mypy:\s*ignore-errors|#\s*type:\s*ignore(?!\[)|#\s*noqa(?!:)"
)


def comments_with(pattern: re.Pattern[str]) -> Iterator[Source]:
    """Where such a comment is; most files contain no such text and need not be tokenized (4 s)."""
    for source in sources():
        if pattern.search(source.text):
            for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
                if token.type == tokenize.COMMENT and pattern.search(token.string):
                    yield source


def catches_all(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    # cleans up and passes on the error
    if isinstance(last, ast.Raise) and last.exc is None:
        return False
    if handler.type is None:
        return True
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException") for kind in caught
    )


def is_table_of_handlers_for_all(node: ast.AST) -> bool:
    """As Starlette has them: what the exception is -> who handles it."""
    return isinstance(node, ast.Dict) and any(
        isinstance(key, ast.Name) and key.id == "Exception" for key in node.keys
    )


def test_modules_run_without_the_current_folder_on_their_path() -> None:
    starts = re.compile(r'(.{6})"-m", (?:"holdfast|module)')
    product = [source for source in product_sources() if source.path.is_relative_to(PACKAGE)]
    found = [
        (source.name, match[1]) for source in product for match in starts.finditer(source.text)
    ]
    assert len(found) >= 7
    assert [name for name, before in found if before != '"-P", '] == []


def test_every_package_has_an_empty_init_file() -> None:
    rooms = {path.parent for path in PACKAGE.rglob("*.py")} - {PACKAGE}
    assert [
        str(room)
        for room in rooms
        if not (room / "__init__.py").is_file() and "bundled" not in room.parts
    ] == []
    inits = [
        source
        for source in product_sources()
        if source.path.name == "__init__.py" and source.path.parent != PACKAGE
    ]
    assert [source.name for source in inits if source.text] == []


def test_exceptions_are_caught_broadly_only_at_boundaries() -> None:
    found = Counter(
        source.name
        for source in product_sources()
        if CATCHES.search(source.text)
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.ExceptHandler) and catches_all(node))
        or is_table_of_handlers_for_all(node)
    )
    assert {
        name: count for name, count in found.items() if count > MAY_CATCH_ALL.get(name, 0)
    } == {}


def test_comments_contain_no_todos() -> None:
    assert [source.name for source in comments_with(UNFINISHED)] == []


def test_no_product_file_is_exempt_from_a_rule() -> None:
    ruff = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]
    patterns = [
        *ruff["lint"].get("per-file-ignores", {}),
        *ruff.get("extend-exclude", []),
        *ruff.get("exclude", []),
    ]
    assert [
        pattern
        for pattern in patterns
        if not pattern.startswith(("tests/", "bench/tests/", "tools/", "demo_model/"))
    ] == []
    assert [source.name for source in comments_with(EXEMPTION) if source in product_sources()] == []


def test_mypy_excludes_no_product_module() -> None:
    overrides = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"].get(
        "overrides", []
    )
    assert [
        module
        for override in overrides
        for module in override["module"]
        if module.startswith("holdfast")
    ] == []


def test_modules_and_classes_have_specific_names() -> None:
    modules = [
        source
        for source in product_sources()
        if source.path.stem in JUNK_DRAWERS or source.path.parent.name in JUNK_DRAWERS
    ]
    assert [source.name for source in modules] == []
    classes = [
        f"{source.name}: {name}"
        for source in product_sources()
        for name in CLASS.findall(source.text)
        if name.endswith(("Manager", "Helper", "Util", "Utils"))
    ]
    assert classes == []


def test_tests_use_fakes_and_no_mocks() -> None:
    mocked = [
        source.name
        for source in sources()
        if re.search(r"^\s*(from|import) (unittest\.mock|mock)\b", source.text, re.MULTILINE)
    ]
    assert mocked == []


ROOMS = sorted(
    str(path.parent.relative_to(PACKAGE))
    for path in PACKAGE.rglob("__init__.py")
    if path.parent != PACKAGE
)


@pytest.mark.parametrize("room", ROOMS)
def test_each_test_file_mirrors_a_source_file(room: str) -> None:
    tested = [path.stem.removeprefix("test_") for path in (ROOT / "tests" / room).glob("test_*.py")]
    modules = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert [
        name
        for name in tested
        if not any(name == module or name.startswith(f"{module}_") for module in modules)
    ] == []


def test_no_file_names_the_machine_it_was_written_on() -> None:
    begins = ("/ro" + "ot/", "/wo" + "rk/", "/Use" + "rs/", "/ho" + "me/")
    home = re.compile(r"/(root|work|Users|home/[a-z]+)/")
    assert [
        str(path.relative_to(ROOT))
        for path, text in texts().items()
        if any(begin in text for begin in begins) and home.search(text)
    ] == []


def test_class_names_in_the_package_are_unique() -> None:
    homes: dict[str, list[str]] = {}
    for source in product_sources():
        if source.path.is_relative_to(PACKAGE):
            for name in CLASS.findall(source.text):
                homes.setdefault(name, []).append(source.name)
    assert len(homes) > 300
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_tests_import_from_fakes_only() -> None:
    mine = ("tests.fakes.", "tests.project.sources.", "tests.simulation.")
    found = {
        (source.name, module)
        for source in sources()
        for module in IMPORT_OF_TESTS.findall(source.text)
    }
    assert len(found) > 300
    assert {(name, module) for name, module in found if not f"{module}.".startswith(mine)} == set()


def sleeps(source: Source) -> Iterator[ast.Call]:
    if "sleep" not in source.text:
        return
    for node in ast.walk(source.tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "sleep"
        ):
            seconds = (
                node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            )
            if not isinstance(seconds, int | float) or seconds > LONGEST_POLL_SECONDS:
                yield node


def test_tests_wait_for_events_not_for_time() -> None:
    found = Counter(
        source.name
        for source in sources()
        if "tests" in source.name.split("/")
        for _ in sleeps(source)
    )
    assert {name: count for name, count in found.items() if count > MAY_SLEEP.get(name, 0)} == {}


def test_large_raw_benchmark_results_are_not_in_the_repository() -> None:
    sizes = {
        str(path.relative_to(ROOT)): path.stat().st_size for path in (ROOT / "docs").rglob("*.json")
    }
    assert {name: size for name, size in sizes.items() if size > 100_000} == {}
