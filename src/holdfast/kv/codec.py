"""In which form snapshots are kept: as they are, or quantized in groups; and as bytes with a description, for the store.

`native` is bit-exact. `q8` and `q4` quantize keys and values of full-attention layers only (mlx affine, groups of 64 values with
scale and bias): 0.53 and 0.28 of bf16. Windows and recurrent states are small and are kept as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

import mlx.core as mx
import msgspec
import numpy as np

from holdfast.kv.form import ITEM_BYTES, ArrayForm, FixedForm, HeadsForm, ModelForm, WindowForm
from holdfast.kv.snapshot import FixedSnapshot, KVBlock, RecurrentSnapshot, SnapshotMismatch, StateCheckpoint, WindowSnapshot

Codec: TypeAlias = Literal["native", "q8", "q4"]

GROUP_SIZE = 64
_BITS: dict[Codec, int] = {"q8": 8, "q4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBlock:
    """A run of keys and values in the form in which it is kept.

    arrays: with `native` those of the KVBlock; else three for each of them: codes uint32, scales and biases, tokens on axis 2.
    dtype: of the keys and values.
    """

    start: int
    tokens: int
    codec: Codec
    dtype: mx.Dtype
    arrays: tuple[mx.array, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)


Payload: TypeAlias = PackedBlock | StateCheckpoint
Part: TypeAlias = bytes | memoryview
Content: TypeAlias = tuple[bytes, tuple[memoryview, ...]]  # description and parts


class _BlockForm(msgspec.Struct, frozen=True, tag="run"):
    start: int
    tokens: int
    codec: Codec
    dtype: str
    arrays: tuple[ArrayForm, ...]


class _LayerForm(msgspec.Struct, frozen=True, array_like=True):
    kind: Literal["window", "recurrent"]
    slots: int  # of a recurrent layer
    filled: tuple[int, ...]  # slots that the arrays belong to


class _StateForm(msgspec.Struct, frozen=True, tag="state"):
    position: int
    layers: tuple[_LayerForm, ...]
    arrays: tuple[ArrayForm, ...]


_Form = TypeVar("_Form", _BlockForm, _StateForm)

_DTYPES = {name: getattr(mx, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def can_quantize(run: KVBlock) -> bool:
    """Whether every head dimension is a multiple of the group size."""
    return all(array.shape[3] % GROUP_SIZE == 0 for array in run.arrays)


def pack(run: KVBlock, codec: Codec) -> PackedBlock:
    """Bring a run into the form in which it is kept; lazy. Raises SnapshotMismatch when heads do not fit the groups."""
    dtype = run.arrays[0].dtype if run.arrays else mx.float32
    if codec == "native":
        return PackedBlock(start=run.start, tokens=run.tokens, codec=codec, dtype=dtype, arrays=run.arrays)
    if not can_quantize(run):
        raise SnapshotMismatch(f"{codec} cannot keep this model: a head dimension is not a multiple of {GROUP_SIZE}")
    packed = [part for array in run.arrays for part in _quantized(array, bits=_BITS[codec])]
    return PackedBlock(start=run.start, tokens=run.tokens, codec=codec, dtype=dtype, arrays=tuple(packed))


def _quantized(array: mx.array, *, bits: int) -> tuple[mx.array, mx.array, mx.array]:
    codes, scales, biases = mx.quantize(array, group_size=GROUP_SIZE, bits=bits)
    scale_type = _DTYPES[_scale_type(_NAMES[array.dtype])]
    return codes, scales.astype(scale_type), biases.astype(scale_type)


def _scale_type(dtype: str) -> str:
    # 11 bits are plenty beside an error of half a step, and scales are a fifth of q4 otherwise
    return "float16" if dtype == "float32" else dtype


def cut(packed: PackedBlock, *, offset: int, tokens: int) -> PackedBlock:
    """`tokens` tokens of a run from its token `offset` on; lazy, sharing the run's buffers."""
    if (offset, tokens) == (0, packed.tokens):
        return packed
    arrays = tuple(array[:, :, offset : offset + tokens] for array in packed.arrays)
    return PackedBlock(start=packed.start + offset, tokens=tokens, codec=packed.codec, dtype=packed.dtype, arrays=arrays)


def unpack(packed: PackedBlock) -> KVBlock:
    """A run as keys and values again; lazy."""
    arrays = packed.arrays
    if packed.codec != "native":
        triples = [arrays[at : at + 3] for at in range(0, len(arrays), 3)]
        arrays = tuple(
            mx.dequantize(
                codes,
                scales.astype(packed.dtype),
                biases.astype(packed.dtype),
                group_size=GROUP_SIZE,
                bits=_BITS[packed.codec],
            )
            for codes, scales, biases in triples
        )
    return KVBlock(start=packed.start, tokens=packed.tokens, arrays=arrays)


def to_bytes(payload: Payload) -> Content:
    """Description and payload parts of a run or a state. The arrays must be evaluated; the parts are views of them."""
    return run_to_bytes(payload) if isinstance(payload, PackedBlock) else state_to_bytes(payload)


def run_to_bytes(packed: PackedBlock) -> tuple[bytes, tuple[memoryview, ...]]:
    """Description and payload parts of a run. The arrays must be evaluated; the parts are views of them, on any thread."""
    form = _BlockForm(
        start=packed.start, tokens=packed.tokens, codec=packed.codec, dtype=_NAMES[packed.dtype], arrays=_forms(packed.arrays)
    )
    return msgspec.msgpack.encode(form), _parts(packed.arrays)


def run_from_bytes(meta: bytes, parts: Sequence[memoryview]) -> PackedBlock:
    """A run out of its bytes; copies them into MLX. Raises SnapshotMismatch when description and bytes do not fit each other."""
    form = _decoded(meta, _BlockForm)
    dtype = _DTYPES.get(form.dtype)
    if dtype is None:
        raise SnapshotMismatch(f"a run of unknown type {form.dtype!r}")
    arrays = _arrays(form.arrays, parts)
    return PackedBlock(start=form.start, tokens=form.tokens, codec=form.codec, dtype=dtype, arrays=arrays)


def state_to_bytes(state: StateCheckpoint) -> tuple[bytes, tuple[memoryview, ...]]:
    """Description and payload parts of a state, as with runs."""
    arrays = tuple(state.arrays())
    form = _StateForm(position=state.position, layers=tuple(map(_layer_form, state.layers)), arrays=_forms(arrays))
    return msgspec.msgpack.encode(form), _parts(arrays)


def state_from_bytes(meta: bytes, parts: Sequence[memoryview]) -> StateCheckpoint:
    """A state out of its bytes, as with runs."""
    form = _decoded(meta, _StateForm)
    arrays = iter(_arrays(form.arrays, parts))
    try:
        layers = tuple(_layer(layer, arrays) for layer in form.layers)
    except StopIteration:
        raise SnapshotMismatch("a state has fewer arrays than its layers need") from None
    return StateCheckpoint(position=form.position, layers=layers)


@dataclass(frozen=True, slots=True)
class Description:
    """What bytes are said to be, checked: tokens of a run or position of a state, the arrays, and where a run begins."""

    length: int
    arrays: tuple[ArrayForm, ...]
    start: int = 0


def check_run(meta: bytes, part_bytes: Sequence[int], *, model: ModelForm, codec: Codec) -> Description:
    """Hold the description of a run against what the model's runs look like. Any thread. Raises SnapshotMismatch."""
    form = _decoded(meta, _BlockForm)
    dtype = model.heads[0].dtype if model.heads else "float32"
    if (form.codec, form.dtype) != (codec, dtype):
        raise SnapshotMismatch(f"a run is kept as {form.codec} of {form.dtype}, this model's as {codec} of {dtype}")
    if form.tokens < 1 or form.start < 0:
        raise SnapshotMismatch(f"a run of {form.tokens} tokens begins at token {form.start}")
    expected = tuple(array for heads in model.heads for array in _packed_forms(heads, tokens=form.tokens, codec=codec))
    _check_arrays(form.arrays, part_bytes, expected=expected)
    return Description(form.tokens, expected, form.start)


def check_state(meta: bytes, part_bytes: Sequence[int], *, model: ModelForm) -> Description:
    """The same of a state."""
    form = _decoded(meta, _StateForm)
    if form.position < 1:
        raise SnapshotMismatch(f"a state stands at token {form.position}")
    if form.layers != tuple(map(_expected_layer, model.fixed)):
        raise SnapshotMismatch("a state has other layers than this model")
    expected = tuple(array for layer in model.fixed for array in layer.arrays(form.position))
    _check_arrays(form.arrays, part_bytes, expected=expected)
    return Description(form.position, expected)


def check_values(arrays: Sequence[ArrayForm], parts: Sequence[Part]) -> None:
    """Raise SnapshotMismatch when an array holds NaN or infinity. Any thread; 5 ms for 67 MB of float32."""
    for form, part in zip(arrays, parts, strict=True):
        if not _is_finite(form.dtype, part):
            raise SnapshotMismatch(f"an array of {form} holds values that are not finite")


def _is_finite(dtype: str, part: Part) -> bool:
    if dtype == "bfloat16":  # numpy has none: its exponent, all ones for what is not finite
        return bool(((np.frombuffer(part, np.uint16) & 0x7F80) != 0x7F80).all())
    return not dtype.startswith("float") or bool(np.isfinite(np.frombuffer(part, dtype)).all())


def _packed_forms(heads: HeadsForm, *, tokens: int, codec: Codec) -> tuple[ArrayForm, ...]:
    whole = heads.of(tokens)
    if codec == "native":
        return (whole,)
    rows = whole.shape[:3]
    groups = ArrayForm(_scale_type(heads.dtype), (*rows, heads.dimension // GROUP_SIZE))
    return ArrayForm("uint32", (*rows, heads.dimension * _BITS[codec] // 32)), groups, groups


def _check_arrays(forms: Sequence[ArrayForm], part_bytes: Sequence[int], *, expected: Sequence[ArrayForm]) -> None:
    if not len(forms) == len(part_bytes) == len(expected):
        raise SnapshotMismatch(f"{len(forms)} arrays are described and {len(part_bytes)} there, this model has {len(expected)}")
    for form, nbytes, wanted in zip(forms, part_bytes, expected, strict=True):
        if form != wanted or nbytes != wanted.nbytes:
            raise SnapshotMismatch(f"an array is {form} of {nbytes} bytes, this model's is {wanted} of {wanted.nbytes}")


def _expected_layer(layer: FixedForm) -> _LayerForm:
    if isinstance(layer, WindowForm):
        return _LayerForm("window", 0, ())
    return _LayerForm("recurrent", layer.slots, tuple(index for index, _ in layer.filled))


def _layer_form(layer: FixedSnapshot) -> _LayerForm:
    if isinstance(layer, WindowSnapshot):
        return _LayerForm("window", 0, ())
    return _LayerForm("recurrent", layer.slots, tuple(index for index, _ in layer.filled))


def _layer(form: _LayerForm, arrays: Iterator[mx.array]) -> FixedSnapshot:
    if form.kind == "window":
        return WindowSnapshot(keys=next(arrays), values=next(arrays))
    return RecurrentSnapshot(slots=form.slots, filled=tuple((index, next(arrays)) for index in form.filled))


def _forms(arrays: Sequence[mx.array]) -> tuple[ArrayForm, ...]:
    return tuple(ArrayForm(_NAMES[array.dtype], tuple(array.shape)) for array in arrays)


def _parts(arrays: Sequence[mx.array]) -> tuple[memoryview, ...]:
    # numpy has no bfloat16: bytes travel as uint8, whatever they mean
    return tuple(np.array(mx.flatten(array).view(mx.uint8), copy=False).data for array in arrays)


def _arrays(forms: Sequence[ArrayForm], parts: Sequence[memoryview]) -> tuple[mx.array, ...]:
    if len(forms) != len(parts):
        raise SnapshotMismatch(f"{len(forms)} arrays are described, {len(parts)} are there")
    return tuple(_array(form, part) for form, part in zip(forms, parts, strict=True))


def _array(form: ArrayForm, part: memoryview) -> mx.array:
    dtype = _DTYPES.get(form.dtype)
    if dtype is None or min(form.shape, default=0) < 0 or form.nbytes != part.nbytes:
        raise SnapshotMismatch(f"an array of {form} has {part.nbytes} bytes")
    return mx.array(np.frombuffer(part, np.uint8)).view(dtype).reshape(form.shape)


def _decoded(meta: bytes, form: type[_Form]) -> _Form:
    try:
        return msgspec.msgpack.decode(meta, type=form)
    except msgspec.DecodeError as error:
        raise SnapshotMismatch(f"the description of a snapshot cannot be read: {error}") from error
