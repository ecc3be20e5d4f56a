from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Each in a separate process, because earlier imports matter.
_PRELUDE = """
import resource, sys
from holdfast.worker.engine import seams

def loaded(*names):
    print(*(name in sys.modules for name in names))

def has_seam(module):
    print(hasattr(module.scaled_dot_product_attention, "_holdfast_plain_attention"))
"""


def run(code: str) -> list[str]:
    environment = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run(
        [sys.executable, "-c", _PRELUDE + code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_models_are_imported_without_transformers_and_the_hub() -> None:
    loaded = run(
        "seams.mlx_lm_utils(); import mlx_lm.models.qwen3\n"
        "loaded('mlx_lm.models.qwen3', 'transformers', 'huggingface_hub', 'mlx_lm.tokenizer_utils')"
    )
    assert loaded == ["True", "False", "False", "False"]


def test_a_worker_imports_what_it_uses_only() -> None:
    loaded = run(
        "import holdfast.worker.loop.process, holdfast.worker.loop.serving\n"
        "seams.mlx_lm_utils(); loaded('asyncio', 'ssl', 'jinja2')"
    )
    assert loaded == ["False", "False", "False"]


def test_model_modules_hold_the_attention_seam() -> None:
    assert run("seams.prepare(); import mlx_lm.models.llama as m; has_seam(m)") == ["True"]


def test_the_placeholder_becomes_the_real_package_when_used() -> None:
    code = (
        "utils = seams.mlx_lm_utils(); import mlx_lm; version = mlx_lm.__version__\n"
        "from mlx_lm import load, generate\n"
        "import mlx_lm.tokenizer_utils as t\n"
        "print(generate.__module__, utils.TokenizerWrapper is t.TokenizerWrapper)\n"
        "print(load is utils.load, version == mlx_lm.__version__)"
    )
    assert run(code) == ["mlx_lm.generate", "True", "True", "True"]


@pytest.mark.slow  # it imports transformers, and few import mlx_lm before Holdfast
def test_a_package_imported_earlier_is_used_unchanged() -> None:
    code = (
        "import mlx_lm, mlx_lm.models.llama as m; before = sys.modules['mlx_lm']; utils = "
        "seams.mlx_lm_utils()\n"
        "print(sys.modules['mlx_lm'] is before, utils is mlx_lm.utils); has_seam(m)"
    )
    assert run(code) == ["True", "True", "True"]


def test_the_limit_of_open_files_is_unchanged() -> None:
    code = (
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; wanted = min(hard, 9000) if hard > "
        "0 else 9000\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard)); seams.mlx_lm_utils()\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard))"
    )
    assert run(code) == ["True"]


def test_the_version_is_known() -> None:
    assert run("print(seams.mlx_lm_version())")[0].startswith("0.")
