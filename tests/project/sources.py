"""The project's own files, parsed once for the tests of this folder."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
BENCH_PACKAGE = ROOT / "bench" / "src" / "holdfast_bench"
PYTHON_FOLDERS = ("src", "bench", "tests", "tools", "demo_model")


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file."""

    path: Path
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Path from the root, for messages."""
        return str(self.path.relative_to(ROOT))

    @property
    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions, nested ones too."""
        return (
            node
            for node in ast.walk(self.tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        )


@functools.cache
def sources() -> tuple[Source, ...]:
    """All Python files of the project."""
    paths = sorted(
        path
        for folder in PYTHON_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )
    texts = ((path, path.read_text(encoding="utf-8")) for path in paths)
    # a tree is all that is made here, and stays: half the time would be spent on looking for
    # garbage in it
    gc.disable()
    try:
        return tuple(Source(path, text, ast.parse(text)) for path, text in texts)
    finally:
        gc.enable()


def product_sources() -> tuple[Source, ...]:
    """The Python files of the package and of its benchmarks."""
    return tuple(
        source
        for source in sources()
        if source.path.is_relative_to(PACKAGE) or source.path.is_relative_to(BENCH_PACKAGE)
    )
