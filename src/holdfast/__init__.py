"""Holdfast runs language models with MLX for agents. Every token of a prompt is prefilled once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
DISTRIBUTION = "holdfast-mlx"  # the package on PyPI; command and import: `holdfast`

if TYPE_CHECKING:
    from holdfast.library.llm import LLM

__all__ = ["DISTRIBUTION", "LLM", "__version__"]


def __getattr__(name: str) -> Any:  # LLM imports MLX, which the command line must not do
    if name == "LLM":
        from holdfast.library.llm import LLM

        return LLM
    raise AttributeError(name)
