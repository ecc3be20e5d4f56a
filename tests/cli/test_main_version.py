"""`holdfast version` is quick and prints the installed versions."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from tests.fakes.command_line import invoked


def test_it_prints_the_important_versions() -> None:
    result = invoked(["version"])
    assert result.exit_code == 0
    named = f"holdfast {holdfast.__version__} (distribution holdfast-mlx: {holdfast.__version__})"
    assert result.output.splitlines()[:2] == [named, f"python {platform.python_version()}"]
    assert "\nmlx " in result.output
    assert "\nmlx-lm " in result.output


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_flag_prints_the_same(flag: str) -> None:
    said = invoked([flag])
    assert (said.exit_code, said.output) == (0, invoked(["version"]).output)


def test_it_loads_nothing_heavy(tmp_path: Path) -> None:
    program = """
import sys
from holdfast.cli.main import app
app(["version"], standalone_mode=False)
heavy = {"mlx", "mlx_lm", "starlette", "uvicorn", "httpx", "rich", "transformers", "numpy",
         "zmq", "huggingface_hub", "tokenizers"}
print("loaded:", sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.splitlines()[-1] == "loaded: []"
