"""Writes the list of all source files, each with the first sentence of its docstring or comment.

`python -m tools.file_index` rewrites the table in docs/how-it-works/files.md.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "holdfast"
PAGE = ROOT / "docs" / "how-it-works" / "files.md"
# what begins the lines of the first comment; of Python, the docstring is listed
COMMENTS = {".py": "", ".c": r"(?m)^(/\*| \*)", ".js": r"(?m)^//"}
BEGIN, END = "<!-- table: python -m tools.file_index -->", "<!-- end of table -->"


def table() -> str:
    """The rows of all files, with a heading for each folder."""
    lines: list[str] = []
    folder = None
    found = (
        path
        for path in SOURCES.rglob("*")
        if path.suffix in COMMENTS and "vendor" not in path.parts
    )
    for path in sorted(found, key=lambda path: (path.parent, path.name)):
        source = path.read_text(encoding="utf-8")
        text = (
            re.sub(COMMENTS[path.suffix], "", source)
            if path.suffix != ".py"
            else _docstring(source)
        )
        if text is None or path.name == "__init__.py":
            continue
        if path.parent != folder:
            folder = path.parent
            name = folder.relative_to(SOURCES).as_posix()
            lines += [
                "",
                f"## {'holdfast' if name == '.' else name}/",
                "",
                "| file | |",
                "|---|---|",
            ]
        lines.append(f"| `{path.name}` | {_first_sentence(text)} |")
    return "\n".join(lines)


def _docstring(source: str) -> str | None:
    return ast.get_docstring(ast.parse(source))


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z*`(])", paragraph)[0]
    return sentence.rstrip(".:").replace("|", "\\|") + "."


def page(text: str) -> str:
    """The page with a new table."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{table()}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
