"""Compute logits only for the positions that are asked for.

A prompt chunk needs at most the logits of its last position, but a model's `__call__` ends in the vocabulary projection of all
positions. The projection's module gets a subclass that first takes the wanted rows; parameters and their names stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

_HEAD_NAMES = ("lm_head", "output", "embed_out", "head")


class HeadSeam:
    """Row selection in front of the vocabulary projection of one model. Device thread only."""

    def __init__(self, model: Module) -> None:
        self._rows: mx.array | None = None
        self._used = False
        self._plain_classes: list[tuple[Module, type[Module]]] = []
        for name, part in model.named_modules():  # type: ignore[no-untyped-call]
            path = name.split(".")
            if path[-1] in _HEAD_NAMES and "weight" in part and not any(step.isdigit() for step in path):
                self._select_in(part, "__call__")
            elif hasattr(type(part), "as_linear"):
                self._select_in(part, "as_linear")

    def _select_in(self, part: Module, method: str) -> None:
        plain = getattr(type(part), method)
        seam = self

        def project(module: Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            result: mx.array = plain(module, seam._take(x), *args, **kwargs)
            return result

        self._plain_classes.append((part, type(part)))
        part.__class__ = type(type(part).__name__, (type(part),), {method: project, "__module__": type(part).__module__})

    def _take(self, x: mx.array) -> mx.array:
        if self._rows is None or self._used:
            return x
        self._used = True
        flat = x.reshape(-1, x.shape[-1])
        return flat[self._rows][:, None]

    def remove(self) -> None:
        """Give the modules their own classes back."""
        for part, plain_class in reversed(self._plain_classes):
            part.__class__ = plain_class
        self._plain_classes.clear()

    @contextmanager
    def selecting(self, rows: mx.array | None) -> Iterator[HeadSeam]:
        """Within the block the projection sees only these rows of the flattened (batch * length) positions, as shape (rows, 1).

        None: no selection. Afterwards `.used` tells whether the model's head went through the seam.
        """
        self._rows, self._used = rows, False
        try:
            yield self
        finally:
            self._rows = None

    @property
    def used(self) -> bool:
        """Whether the last block selected rows; if not, the logits are those of all positions."""
        return self._used
