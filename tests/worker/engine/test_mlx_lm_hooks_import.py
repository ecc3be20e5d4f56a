from __future__ import annotations

import pytest

from tests.fakes.server_process import python_output

# Each in a separate process, because earlier imports matter.
_PRELUDE = """
import resource, sys
from holdfast.worker.engine import mlx_lm_hooks

def loaded(*names):
    print(*(name in sys.modules for name in names))

def has_seam(module):
    print(hasattr(module.scaled_dot_product_attention, "_holdfast_original_attention"))
"""


def run(code: str) -> list[str]:
    return python_output(_PRELUDE + code).split()


def test_models_are_imported_with_the_seam_and_without_transformers_or_the_hub() -> None:
    code = (
        "hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
        "wanted = min(hard, 9000) if hard > 0 else 9000\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))\n"
        "mlx_lm_hooks.mlx_lm_utils(); import mlx_lm.models.qwen3\n"
        "loaded('mlx_lm.models.qwen3', 'transformers', 'huggingface_hub', 'mlx_lm.tokenizer_utils')\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE) == (wanted, hard))\n"
        "mlx_lm_hooks.prepare(); import mlx_lm.models.llama as m; has_seam(m)\n"
        "print(mlx_lm_hooks.mlx_lm_version())"
    )
    *modules, has_same_limit, has_seam, version = run(code)
    assert modules == ["True", "False", "False", "False"]
    assert has_same_limit == "True"
    assert has_seam == "True"
    assert version.startswith("0.")


def test_a_worker_imports_what_it_uses_only() -> None:
    loaded = run(
        "import holdfast.worker.loop.process, holdfast.worker.loop.serving\n"
        "mlx_lm_hooks.mlx_lm_utils(); loaded('asyncio', 'ssl', 'jinja2')"
    )
    assert loaded == ["False", "False", "False"]


def test_the_placeholder_becomes_the_real_package_when_used() -> None:
    code = (
        "utils = mlx_lm_hooks.mlx_lm_utils(); import mlx_lm; version = mlx_lm.__version__\n"
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
        "mlx_lm_hooks.mlx_lm_utils()\n"
        "print(sys.modules['mlx_lm'] is before, utils is mlx_lm.utils); has_seam(m)"
    )
    assert run(code) == ["True", "True", "True"]
