"""Compute logits only for the positions that are asked for, and when they are asked for.

A prompt chunk needs at most the logits of its last position, but a model's `__call__` ends in the
vocabulary projection of all positions. The projection's module gets a subclass that first takes the
wanted rows; parameters and their names stay as they are.

What the projection takes can be set aside and projected later, some rows at a time: the logits of
2,048 positions over 152,000 tokens are 1.2 GB. A model may change logits after its projection
(scale, cap), so its `__call__` is run once more then, on one token that stands for nothing: at the
seam the rows take its place, and since MLX is lazy, no layer is computed for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from holdfast.wire.requests import RequestId

HEAD_NAMES = ("lm_head", "output", "embed_out", "head")


class HeadSeam:
    """Row selection in front of the vocabulary projection of one model. Device thread only."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows: mx.array | None = None
        self._aside: mx.array | None = None
        self._instead: mx.array | None = None
        # whether the last block selected rows; if not, the logits are those of all positions
        self.used = False
        self._set_aside: mx.array | None = None
        self.projects_later = False  # set by who has seen that `project` gives what the model gives
        self.hidden_size = 0  # of a row that is set aside; set with `projects_later`
        self._plain_classes: list[tuple[Module, type[Module]]] = []
        for name, part in model.named_modules():
            path = name.split(".")
            if (
                path[-1] in HEAD_NAMES
                and "weight" in part
                and not any(step.isdigit() for step in path)
            ):
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
        part.__class__ = type(
            type(part).__name__,
            (type(part),),
            {method: project, "__module__": type(part).__module__},
        )

    def _take(self, x: mx.array) -> mx.array:
        if self.used or (self._rows is None and self._aside is None and self._instead is None):
            return x
        self.used = True
        if self._instead is not None:
            return self._instead[:, None]
        flat = x.reshape(-1, x.shape[-1])
        if self._aside is not None:
            self._set_aside = flat[self._aside]
        return x if self._rows is None else flat[self._rows][:, None]

    def remove(self) -> None:
        """Give the modules their own classes back."""
        for part, plain_class in reversed(self._plain_classes):
            part.__class__ = plain_class
        self._plain_classes.clear()

    @contextmanager
    def selecting(
        self, rows: mx.array | None, *, aside: mx.array | None = None
    ) -> Iterator[HeadSeam]:
        """Within the block the projection sees only these rows of the flattened (batch * length)
        positions, as shape (rows, 1).

        None: no selection. aside: rows that `take_aside` gives after the block. Then `.used` tells
        whether the model's head went through the seam.
        """
        self._rows, self._aside, self.used, self._set_aside = rows, aside, False, None
        try:
            yield self
        finally:
            self._rows = self._aside = None

    def take_aside(self) -> mx.array | None:
        """What the projection was given in the rows to be set aside, [rows, hidden], once; None if
        it was not reached.
        """
        taken, self._set_aside = self._set_aside, None
        return taken

    def project(self, rows: mx.array) -> mx.array:
        """The logits of rows that were set aside, [rows, vocabulary].

        Lazy. Only right where `projects_later`.
        """
        self._instead, self.used = rows, False
        try:
            logits: mx.array = self._model(mx.zeros((1, 1), dtype=mx.int32))
        finally:
            self._instead = None
        return logits.reshape(-1, logits.shape[-1])


def _as_they_are(logits: mx.array) -> mx.array:
    return logits


@dataclass(frozen=True, slots=True)
class LaterLogits:
    """Logits of consecutive positions, computed when they are asked for, of as many of them as are
    asked for.

    source: [positions, …], what `project` turns into logits, [positions, vocabulary].
    """

    source: mx.array
    project: Callable[[mx.array], mx.array] = _as_they_are

    def __len__(self) -> int:
        return self.source.shape[0]

    def of(self, start: int, stop: int) -> mx.array:
        """Logits of some of the positions, lazily."""
        return self.project(self.source[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogits:
    """drawn: [spans that draw, vocabulary], in the order of the spans, None when none does. scored:
    by the span's request.

    hidden: [rows, hidden], by the span's request, of those that are to be pooled.
    """

    drawn: mx.array | None = None
    scored: Mapping[RequestId, LaterLogits] = field(default_factory=dict)
    hidden: Mapping[RequestId, mx.array] = field(default_factory=dict)
