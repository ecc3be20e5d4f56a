"""The project's own files, read once for the tests of this folder, and parsed on demand."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "holdfast"
BENCH_PACKAGE = ROOT / "bench" / "src" / "holdfast_bench"
PYTHON_FOLDERS = ("src", "bench", "tests", "tools", "demo_model")
TEXT_FOLDERS = (*PYTHON_FOLDERS, "docs", ".ci", "changes")
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".sh", ".json", ".yml", ".jinja", ".svg", ""}


@dataclass(frozen=True)
class Source:
    """One Python file."""

    path: Path
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        """Parsing all files takes seconds: look for a word in `text` first."""
        return ast.parse(self.text)

    @property
    def name(self) -> str:
        """Path from the root, for messages."""
        return str(self.path.relative_to(ROOT))


@functools.cache
def sources() -> tuple[Source, ...]:
    """All Python files of the project."""
    paths = sorted(
        path
        for folder in PYTHON_FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if "__pycache__" not in path.parts
    )
    return tuple(Source(path, path.read_text(encoding="utf-8")) for path in paths)


@functools.cache
def texts() -> dict[Path, str]:
    """Every text file of the project."""
    # `.git` is a file in a further worktree
    files = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    files += [
        path
        for folder in TEXT_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    return {
        path: path.read_text(encoding="utf-8", errors="replace")
        for path in files
        if path.suffix in TEXT_SUFFIXES
    }


@functools.cache
def product_sources() -> tuple[Source, ...]:
    """The Python files of the package and of its benchmarks."""
    return tuple(
        source
        for source in sources()
        if source.path.is_relative_to(PACKAGE) or source.path.is_relative_to(BENCH_PACKAGE)
    )
