"""Counts the package: lines of code (no blanks, comments, docstrings) and classes, room by room, and holds them to their limits.

Run by `make check`: `python -m tools.code_size`. A limit is raised when what has come in is worth it, in the same change.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "holdfast"
MOST_CODE_LINES = 39_900
MOST_CLASSES = 790

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_lines(text: str) -> int:
    """Lines that hold code: a statement over three lines counts three, a docstring none."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    with_code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            with_code.update(range(token.start[0], token.end[0] + 1))
    return len(with_code - docstrings)


def classes(text: str) -> int:
    """Classes, private and nested ones too."""
    return sum(isinstance(node, ast.ClassDef) for node in ast.walk(ast.parse(text)))


def main() -> int:
    """Print the table; 1 when a limit is exceeded."""
    lines_of: Counter[str] = Counter()
    classes_of: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        text, room = path.read_text(encoding="utf-8"), path.relative_to(PACKAGE).parts[0]
        lines_of[room] += code_lines(text)
        classes_of[room] += classes(text)
    for room, lines in lines_of.most_common():
        sys.stdout.write(f"{lines:7,} lines  {classes_of[room]:4} classes  {room}\n")
    lines, number = lines_of.total(), classes_of.total()
    sys.stdout.write(f"{lines:7,} lines  {number:4} classes  in all; at most {MOST_CODE_LINES:,} and {MOST_CLASSES}\n")
    return int(lines > MOST_CODE_LINES or number > MOST_CLASSES)


if __name__ == "__main__":
    sys.exit(main())
