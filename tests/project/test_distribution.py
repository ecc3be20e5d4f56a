"""The distribution is called holdfast-mlx.

`holdfast` on PyPI is another project; nothing here may send a reader to it.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import holdfast
from holdfast_bench import machine
from tests.project.sources import ROOT, texts

NAME = "holdfast-mlx"
# The other project as an installer's argument, an extra, a requirement, installed, or a page of the
# index.
OTHER = re.compile(
    r"""(?:pip3?|pipx|uv|uvx|poetry|conda|brew|install)\s[^\n`]*?(?<![\w./~:-])holdfast(?=$|[\s'"`;,)=<>~!]|\[)(?!\s+(?:serve|chat|\[))
      | (?<![\w.-])["']?holdfast\[[a-z]
      | (?<![\w.-])holdfast\s*(?:==|>=|<=|~=|@\s*(?:https?|git))\s*[\w"']
      | (?:version|distribution|metadata|requires|files)\(\s*["']holdfast["']
      | pypi\.org/(?:project|simple)/holdfast(?!-mlx)
    """,
    re.VERBOSE | re.MULTILINE,
)


def test_no_text_tells_readers_to_install_the_other_project() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0].strip()}"
        for path, text in texts().items()
        if path != Path(__file__)
        for line in text.splitlines()
        if "holdfast" in line
        for match in OTHER.finditer(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install holdfast",
        "there is a GPU: pip install 'holdfast[cuda]'",
        "uv pip install --upgrade holdfast==0.1.0",
        "pipx run holdfast",
        "uv tool install holdfast",
        "needs holdfast[cuda]",
        "holdfast >= 0.1",
        'version("holdfast")',
        "https://pypi.org/project/holdfast/",
    ],
)
def test_the_search_finds_its_target(text: str) -> None:
    assert OTHER.search(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'holdfast-mlx[cuda]'",
        "pip install -c constraints.txt '.[cuda]'",
        "`make` installs Holdfast",
        "from holdfast import LLM",
        "pip install . && .venv/bin/holdfast serve",
    ],
)
def test_the_search_ignores_everything_else(text: str) -> None:
    assert not OTHER.search(text)


def test_the_project_has_its_name_and_its_command_is_holdfast() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == holdfast.DISTRIBUTION == machine.DISTRIBUTION == NAME
    assert list(project["scripts"]) == ["holdfast"]


def test_this_distribution_is_installed() -> None:
    assert importlib.metadata.version(NAME) == holdfast.__version__
    assert [script.value for script in importlib.metadata.distribution(NAME).entry_points] == [
        "holdfast.cli.main:app"
    ]
