"""What is written about the project agrees with the project."""

from __future__ import annotations

import re
import tomllib

import holdfast
from holdfast.config import all_specs
from holdfast.config_sources import SettingSpec, allowed, describe
from tests.project.sources import ROOT

DEFAULTS_OFF_A_MAC = {"residency.idle_seconds": None}
TYPES = {  # as messages describe a type → as the page names it, which explains each type once
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


def test_every_setting_has_its_row_in_the_documentation() -> None:
    lines = set(
        (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8").splitlines()
    )
    missing = [
        documented_row(spec) for spec in all_specs().values() if documented_row(spec) not in lines
    ]
    assert missing == [], "put these rows into docs/reference/configuration.md:\n" + "\n".join(
        missing
    )


def test_the_documentation_knows_no_setting_that_does_not_exist() -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `([a-z_]+\.[a-z_]+)` ", text, re.MULTILINE)) == set(all_specs())


def test_the_change_log_knows_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{holdfast.__version__}]" in text or "## [Unreleased]" in text


def test_links_between_documents_lead_somewhere() -> None:
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


def test_every_target_of_the_makefile_is_explained_in_its_head() -> None:
    text = (ROOT / "Makefile").read_text()
    targets = re.search(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert targets is not None
    explained = re.findall(r"^# make ([\w-]+)", text, re.MULTILINE)
    assert set(targets[1].split()) - {"help"} == set(explained)


def test_every_dependency_has_a_lower_and_an_upper_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    assert [name for name in required if not re.search(r">=[\d.]+,<[\d.]+", name)] == []


def test_every_dependency_is_pinned_in_the_constraints() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = [
        *project["dependencies"],
        *(name for extra in project["optional-dependencies"].values() for name in extra),
    ]
    names = {re.split(r"[\[><=; ]", name)[0].lower().replace("_", "-") for name in required}
    pinned = {
        line.partition("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names - pinned == set()


def test_every_file_that_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "how-it-works" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text))
    homes = (ROOT, ROOT / "src" / "holdfast", ROOT / "src" / "holdfast" / "http")
    file_names = {path.name for path in (ROOT / "src").rglob("*.py")} | {
        path.name for path in (ROOT / "bench" / "src").rglob("*.py")
    }
    unknown = [name for name in named if not any((home / name).is_file() for home in homes)]
    assert len(named) > 70
    assert sorted(name for name in unknown if "/" in name or name not in file_names) == []
