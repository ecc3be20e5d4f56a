"""Seeded batches of encoded conversations, sorted by length. A resumed training can recreate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import mlx.core as mx
import numpy as np
from conversation import Encoder
from recipes import Recipe

POOL_TOKENS = 200_000
PADDING = 0
Row = tuple[list[int], list[bool]]
"""Tokens, and whether the model writes them."""


@dataclass
class Batch:
    """Rows of one conversation each. positions: those with a loss, in the flattened rows, with
    their targets and weights.
    """

    tokens: mx.array
    positions: mx.array
    targets: mx.array
    weights: mx.array
    size: int
    """Tokens except padding."""


class Stream:
    """Pools of conversations, each with its own seed, cut into batches of similar lengths."""

    def __init__(self, encoder: Encoder, recipe: Recipe) -> None:
        self.encoder, self.recipe = encoder, recipe

    def pool(self, number: int, done: float) -> list[Batch]:
        """The shuffled batches of a pool."""
        rng = Random(self.recipe.seed * 1_000_003 + number)
        longest = self.recipe.longest_at(done)
        rows: list[Row] = []
        total = 0
        while total < POOL_TOKENS:
            tokens, written = self.encoder.encode(self.recipe.conversation_at(rng, done))
            if len(tokens) <= longest:
                rows.append((tokens, written))
                total += len(tokens)
        rng.shuffle(rows)
        rows.sort(key=lambda row: len(row[0]) // 16)
        batches = [self._batch(rng, group) for group in self._groups(rows)]
        rng.shuffle(batches)
        return batches

    def _groups(self, rows: list[Row]) -> Iterator[list[Row]]:
        group: list[Row] = []
        for row in rows:
            if group and len(row[0]) * (len(group) + 1) > self.recipe.batch_tokens:
                yield group
                group = []
            group.append(row)
        yield group

    def _batch(self, rng: Random, rows: list[Row]) -> Batch:
        """Make a batch. Only a third of the tokens outside answers count, each three times as much."""
        width = max(len(tokens) for tokens, _ in rows)
        matrix = np.full((len(rows), width), PADDING)
        positions: list[int] = []
        weights: list[float] = []
        for index, (tokens, written) in enumerate(rows):
            matrix[index, : len(tokens)] = tokens
            for place in range(1, len(tokens)):
                if written[place] or rng.random() < 1 / 3:
                    positions.append(index * (width - 1) + place - 1)
                    weights.append(1.0 if written[place] else 3 * self.recipe.other_weight)
        targets = matrix[:, 1:].flatten()[positions]
        size = sum(len(tokens) for tokens, _ in rows)
        arrays = (mx.array(each) for each in (matrix, positions, targets, weights))
        return Batch(*arrays, size)
