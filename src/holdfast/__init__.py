"""Holdfast runs language models with MLX for agents: what a model has read stays read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
DISTRIBUTION = "holdfast-mlx"  # what is installed; the command and the import are called `holdfast`

if TYPE_CHECKING:
    from holdfast.library.llm import LLM

__all__ = ["DISTRIBUTION", "LLM", "__version__"]


def __getattr__(name: str) -> Any:  # the library face loads MLX, the command line must not
    if name == "LLM":
        from holdfast.library.llm import LLM

        return LLM
    raise AttributeError(name)
