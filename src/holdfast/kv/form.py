"""What the kept state of a model looks like: the kind of each layer, shape and type of each array. Pure: any thread may ask.

Live layers say it of themselves (`kinds`). What comes from outside, out of a store or a session's file, is held against it
before any of its bytes are used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "uint32": 4, "int32": 4, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2,
              "int64": 8, "uint64": 8, "bool_": 1}  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class HeadsForm:
    """Keys, or values, of a layer: [1, heads, tokens, dimension]."""

    heads: int
    dimension: int
    dtype: str

    def of(self, tokens: int) -> ArrayForm:
        """Of so many tokens."""
        return ArrayForm(self.dtype, (1, self.heads, tokens, self.dimension))


@dataclass(frozen=True, slots=True)
class GrowingForm:
    """A layer that keeps every token."""

    keys: HeadsForm
    values: HeadsForm


@dataclass(frozen=True, slots=True)
class WindowForm:
    """A layer that keeps the tokens that the next one can see."""

    visible: int  # at most
    keys: HeadsForm
    values: HeadsForm

    def arrays(self, position: int) -> tuple[ArrayForm, ...]:
        """Its arrays after so many tokens."""
        held = min(position, self.visible)
        return self.keys.of(held), self.values.of(held)


@dataclass(frozen=True, slots=True)
class RecurrentForm:
    """A layer whose state does not depend on the number of tokens: the arrays of its filled slots."""

    slots: int
    filled: tuple[tuple[int, ArrayForm], ...]

    def arrays(self, position: int) -> tuple[ArrayForm, ...]:
        """Its arrays, whatever the position."""
        return tuple(form for _, form in self.filled)


FixedForm: TypeAlias = WindowForm | RecurrentForm


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelForm:
    """The layers of one model, in order, composites taken apart: those of which runs are kept, and those with a state."""

    growing: tuple[GrowingForm, ...]
    fixed: tuple[FixedForm, ...]

    @property
    def resumes_anywhere(self) -> bool:
        """Whether a sequence can be resumed at any token, not only where a state was taken."""
        return not self.fixed

    @property
    def heads(self) -> tuple[HeadsForm, ...]:
        """Keys and values of the growing layers, in the order of a run's arrays."""
        return tuple(heads for layer in self.growing for heads in (layer.keys, layer.values))
