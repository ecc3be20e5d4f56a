"""The documentation agrees with the project."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast.config import all_specs
from holdfast.config_sources import SettingSpec, allowed, describe
from tests.project.sources import PACKAGE, ROOT
from tools import file_index

DEFAULTS_OFF_A_MAC = {"residency.idle_seconds": None}
TYPES = {  # a type in messages → its name on the page, which explains each type once
    "a list of texts (separated by commas in a variable or flag)": "list",
    "seconds or a duration such as 250 ms": "duration",
    "a size such as 512MB or 8 GiB": "size",
    "a whole number": "integer",
    "a text": "text",
}


def documented_row(spec: SettingSpec) -> str:
    values = allowed(spec).replace("|", "\\|")
    for described, named in TYPES.items():
        values = values.replace(described, named)
    default = describe(spec, DEFAULTS_OFF_A_MAC.get(spec.key, spec.default))
    cells = (
        f"`{spec.key}`",
        ", ".join(f"`{name}`" for name in (spec.flag, spec.short) if name),
        f"`{default}`" if default else "",
        values,
        spec.doc,
    )
    return "| " + " | ".join(cells) + " |"


def test_every_setting_is_documented() -> None:
    lines = set(
        (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8").splitlines()
    )
    missing = [
        documented_row(spec) for spec in all_specs().values() if documented_row(spec) not in lines
    ]
    assert missing == [], "put these rows into docs/reference/configuration.md:\n" + "\n".join(
        missing
    )


def test_every_documented_setting_exists() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` ", text, re.MULTILINE)) == set(all_specs())


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{holdfast.__version__}]" in text or "## [Unreleased]" in text


def test_links_between_documents_resolve() -> None:
    documents = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    targets = [
        (document, target)
        for document in documents
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
    ]
    assert [
        f"{document.name} → {target}"
        for document, target in targets
        if not (document.parent / target).exists()
    ] == []


def test_every_makefile_target_is_explained_in_its_header() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert targets is not None
    explained = re.findall(r"^# make ([\w-]+)", text, re.MULTILINE)
    assert set(targets[1].split()) - {"help"} == set(explained)


def makefile_targets(text: str) -> list[str]:
    """The targets of `make` commands in a document: in blocks of code and within sentences."""
    block = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
    code = block.findall(text) + re.findall(r"`[^`]+`", block.sub("", text))
    command = re.compile(r"(?:^|[`;&|$])\s*make\s+([a-z][\w-]*)", re.MULTILINE)
    return [target for each in code for target in command.findall(each)]


def test_every_make_target_named_in_a_document_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = [
        (document.name, target)
        for document in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for target in makefile_targets(document.read_text(encoding="utf-8"))
    ]
    assert len(named) > 40
    assert [each for each in named if each[1] not in targets] == []


def required_packages() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    assert [name for name in required_packages() if not re.search(r">=[\d.]+,<[\d.]+", name)] == []


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    names = {
        re.split(r"[\[><=; ]", name)[0].lower().replace("_", "-") for name in required_packages()
    }
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names - pinned == set()


HOW_IT_WORKS = ROOT / "docs" / "how-it-works"
NAMED_PATH = re.compile(r"`((?:[a-z0-9_-]+/)+(?:[a-z0-9_]+\.py)?|[a-z0-9_]+\.py)`")


def existing(name: str, *homes: Path) -> Path | None:
    return next((home / name for home in homes if (home / name).exists()), None)


def missing_paths(line: str) -> list[str]:
    """Paths in a line that do not exist; a bare file name belongs to a folder earlier in the line."""
    missing: list[str] = []
    folders: list[Path] = []
    for name in NAMED_PATH.findall(line):
        found = existing(name, PACKAGE, ROOT, *folders)
        if found is None:
            missing.append(name)
        else:
            folders.append(found if found.is_dir() else found.parent)
    return missing


def test_the_list_of_source_files_is_current() -> None:
    found = file_index.PAGE.read_text(encoding="utf-8")
    assert found == file_index.page(found), "run python -m tools.file_index"


def test_every_path_in_the_architecture_page_exists() -> None:
    lines = (HOW_IT_WORKS / "architecture.md").read_text(encoding="utf-8").splitlines()
    assert sum(len(NAMED_PATH.findall(line)) for line in lines) > 60
    assert [name for line in lines for name in missing_paths(line)] == []


@pytest.mark.parametrize("page", sorted(path.name for path in HOW_IT_WORKS.glob("*.md")))
def test_every_source_file_named_in_the_documentation_exists(page: str) -> None:
    text = (HOW_IT_WORKS / page).read_text(encoding="utf-8")
    files = [name for name in NAMED_PATH.findall(text) if name.endswith(".py") and "/" in name]
    assert [name for name in files if existing(name, PACKAGE, ROOT) is None] == []
