"""What the kept state of a model looks like: shape and type of each array, and the layers.

Pure: any thread may ask.

Live layers say it of themselves (`layer`). What comes from outside, out of a store or a session's
file, is held against it before any of its bytes are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2,
              "int64": 8, "uint64": 8, "bool_": 1}  # fmt: skip


Codec: TypeAlias = Literal["native", "q8", "q4"]  # how blocks are kept


class ArrayForm(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of one array."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def nbytes(self) -> int:
        """Bytes of such an array; 0 for a type that nothing here has."""
        return math.prod(self.shape) * ITEM_BYTES.get(self.dtype, 0)

    def of(self, tokens: int) -> ArrayForm:
        """The same, however many tokens."""
        return self


@dataclass(frozen=True, slots=True)
class HeadsForm:
    """Keys, or values, of a layer: [1, heads, tokens, dimension]."""

    heads: int
    dimension: int
    dtype: str
    most_tokens: int | None = None  # that are there, of however many; None: all

    def of(self, tokens: int) -> ArrayForm:
        """Of so many tokens."""
        there = tokens if self.most_tokens is None else min(tokens, self.most_tokens)
        return ArrayForm(self.dtype, (1, self.heads, there, self.dimension))


KeptForm: TypeAlias = HeadsForm | ArrayForm


class CheckpointLayout(msgspec.Struct, frozen=True, array_like=True):
    """Which arrays the checkpoint of a layer has."""

    kind: str  # of the layer
    slots: int  # of a recurrent layer
    filled: tuple[int, ...]  # slots that the arrays belong to


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """What is kept of one model, composites taken apart, in the order of the layers.

    block: the arrays of a KV block. layers, checkpoint: those of a state checkpoint; both empty
    where every layer grows.
    """

    block: tuple[KeptForm, ...]
    layers: tuple[CheckpointLayout, ...] = ()
    checkpoint: tuple[KeptForm, ...] = ()

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a sequence can be resumed at any token, not only where a state was taken."""
        return not self.layers
