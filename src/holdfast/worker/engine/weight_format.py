"""Chooses the number format of a model's weights, and whether quantized weights are dequantized
when the model is loaded.

In MLX on a CPU, only float32 matrix products are fast: bf16 products, and quantized products with
many rows, are 20 times slower, and MLX cannot compute mixtures of experts in bf16. So on a CPU,
layers keep their stored weights if the backend can compute their products, and other weights
are converted, as far as they fit in memory, to float32. On other devices, a model keeps
its stored format.

A packed weight is quantized; to unpack it is to dequantize it. A "stored" weight is as in the file.
"""

from __future__ import annotations

import ctypes
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from holdfast.errors import ModelLoadError
from holdfast.worker.engine import mlx_lm_hooks
from holdfast.worker.engine.backend import in_use

# share of the available memory for dequantized weights; the rest is for KV and activations
_FLOAT32_SHARE = 0.75
_GIB = 1 << 30
_DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
STORED = ("weight", "scales", "biases")  # the arrays of a layer that keep their format
# names of mlx-lm's classes for the experts of a layer, compared by name to avoid an import
_PACKED_EXPERTS = "QuantizedSwitchLinear"
_PLAIN_EXPERTS = "SwitchLinear"
_USE_OF_WEIGHTS = re.compile(r"(?<!\bself)\.weight\.(T|dtype|transpose|swapaxes)\b")


@cache
def _plain_modules() -> dict[type[Module], Callable[[], Module]]:
    """Maps quantized module types to functions that create their plain counterparts.

    Only exact types match, because the call of a subclass may do more than the plain counterpart.
    """
    mlx_lm_hooks.prepare()
    from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return {
        QuantizedLinear: lambda: Linear(1, 1, bias=False),
        QuantizedEmbedding: lambda: Embedding(1, 1),
        QuantizedSwitchLinear: lambda: SwitchLinear(1, 1, 1, bias=False),
        QuantizedMultiLinear: lambda: MultiLinear(1, 1, 1),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """How weights are converted.

    dtype: the type that floating-point weights are converted to; None: they keep their types.
    unpack: whether quantized weights are dequantized. unpack_experts: whether this includes the
    weights of experts. keep_layers: whether layers that the backend supports keep their stored
    weights, and are computed there. keep_halves: whether this includes weights of 16
    bits.
    """

    dtype: mx.Dtype | None
    unpack: bool
    unpack_experts: bool
    keep_layers: bool = False
    keep_halves: bool = True
    note: str = ""  # why this is not the preferred format; empty if it is

    def dequantizes(self, module: Module) -> bool:
        """Whether this module's quantized weight is dequantized."""
        if self.keeps(module):
            return False
        if not self.unpack or type(module) not in _plain_modules():
            return False
        return self.unpack_experts or type(module).__name__ != _PACKED_EXPERTS

    def keeps(self, module: Module) -> bool:
        """Whether this module keeps its stored weights and is computed by the backend."""
        may_keep = self.keep_layers and (self.keep_halves or hasattr(module, "bits"))
        return may_keep and in_use().keeps_stored(module)

    def target(self, module: Module, name: str, array: mx.array) -> mx.Dtype:
        """The format that an array of a module gets if it is not unpacked."""
        stays_as_stored = name in STORED and self.keeps(module)
        return array.dtype if stays_as_stored else _converted_dtype(array, self.dtype)


UNCHANGED = WeightFormat(dtype=None, unpack=False, unpack_experts=False)


def choose_format(
    model: Module, *, dtype: str, dequantize: str, available_bytes: int
) -> WeightFormat:
    """Choose the format for a model whose weights are not evaluated yet.

    dtype, dequantize: as in ModelSettings. Raises ModelLoadError if the weights do not fit in
    memory in any allowed format.
    """
    module_types = {type(module) for module in _modules(model)}
    is_quantized = not module_types.isdisjoint(_plain_modules())
    formats = _allowed_formats(
        is_quantized=is_quantized,
        dtype=dtype,
        dequantize=dequantize,
        keep_halves=not any(
            _uses_weights_itself(module_type.__module__)
            for module_type in module_types
            if not module_type.__module__.startswith("mlx.nn")
        ),
    )
    if in_use().prefers_float32:
        formats = [
            candidate
            for candidate in formats
            if _cpu_supports(candidate, {module_type.__name__ for module_type in module_types})
        ]
        if not formats:
            raise ModelLoadError(
                f"on a CPU, this model's experts can be computed only in float32, not in {dtype}: "
                "set model.dtype to float32"
            )
    needed_bytes = [format_bytes(model, candidate) for candidate in formats]
    for candidate, needed in zip(formats, needed_bytes, strict=True):
        # The last format in the list has no alternative, so it may take all memory.
        allowed_share = _FLOAT32_SHARE if candidate is not formats[-1] else 1.0
        if needed > available_bytes * allowed_share:
            continue
        if candidate is formats[0]:
            return replace(candidate, note=_why_dequantized(candidate, is_quantized=is_quantized))
        unconverted_part = (
            "the experts stay packed"
            if candidate.unpack
            else "the weights keep their stored format"
        )
        note = (
            f"{unconverted_part}: in the preferred format they would need {_gib(needed_bytes[0])}, but only "
            f"{_gib(available_bytes)} are available"
        )
        return replace(candidate, note=note)
    raise ModelLoadError(
        f"the weights need {_gib(min(needed_bytes))} of memory, but only {_gib(available_bytes)} are "
        "available: free memory, or use a smaller model or quantization"
    )


def _why_dequantized(chosen: WeightFormat, *, is_quantized: bool) -> str:
    """Why quantized layers are dequantized on a CPU; empty if they are not, or if it was requested."""
    backend = in_use()
    needs_reason = backend.prefers_float32 and is_quantized and chosen.unpack
    reason = backend.stored_refused() if needs_reason else ""
    return f"quantized weights are unpacked: {reason}" if reason else ""


@cache
def _uses_weights_itself(module_name: str) -> bool:
    """Whether the code of a model multiplies by weights without calling their layer, or asks for
    their format, so that both depend on how the weights are stored.
    """
    module = sys.modules.get(module_name)
    return module is not None and bool(_USE_OF_WEIGHTS.search(inspect.getsource(module)))


def _allowed_formats(
    *, is_quantized: bool, dtype: str, dequantize: str, keep_halves: bool
) -> list[WeightFormat]:
    """Allowed formats, the preferred one first."""
    backend = in_use()
    target = _DTYPES.get(dtype, mx.float32 if backend.prefers_float32 else None)
    stored = WeightFormat(dtype=target, unpack=False, unpack_experts=False)
    if is_quantized and dequantize == "always":
        return [replace(stored, unpack=True, unpack_experts=True)]
    if not backend.stored_refused():
        stored = replace(stored, keep_layers=True, keep_halves=keep_halves)
    unpacked = replace(stored, unpack=True, unpack_experts=True)
    formats = [stored]
    if is_quantized and dequantize == "auto" and backend.prefers_float32:
        formats = [unpacked, replace(unpacked, unpack_experts=False), stored]
    if dtype == "auto" and target is not None:
        formats.append(replace(stored, dtype=None))
    return formats


def _cpu_supports(chosen: WeightFormat, module_type_names: set[str]) -> bool:
    """Whether a CPU can compute a model of these modules in this format. Dequantized experts must
    be float32, because MLX's `GatherMM` accepts no other format on a CPU.
    """
    plain_experts = _PLAIN_EXPERTS in module_type_names or (
        _PACKED_EXPERTS in module_type_names and chosen.unpack_experts
    )
    return not plain_experts or (chosen.dtype is not None and chosen.dtype == mx.float32)


def format_bytes(model: Module, chosen: WeightFormat) -> int:
    """Bytes of the model's weights in this format. The weights are not evaluated."""
    total = 0
    for module, name, array, numbers in _weights(model, chosen.dequantizes):
        dtype = chosen.target(module, name, array)
        if numbers != array.size:  # the array is dequantized
            dtype = chosen.dtype or module.scales.dtype
        total += numbers * dtype.size
    return total


def parameter_count(model: Module) -> int:
    """The number of weights. Each weight of a packed array counts; scales do not."""
    weights = _weights(model, lambda module: hasattr(module, "bits") and "scales" in module)
    return sum(numbers for *_, numbers in weights)


def _weights(
    model: Module, dequantizes: Callable[[Any], bool]
) -> Iterator[tuple[Any, str, mx.array, int]]:
    """Yield (module, name of one of its arrays, the array, how many numbers it has after
    dequantization).

    Modules for which `dequantizes` returns False are not dequantized.
    """
    for module in _modules(model):
        is_dequantized = dequantizes(module)
        for name, array in _parameters_of(module):
            if is_dequantized and name == "weight":
                yield module, name, array, array.size * 32 // module.bits
            elif not (is_dequantized and name in ("scales", "biases", "global_scale")):
                yield module, name, array, array.size


def convert(model: Module, chosen: WeightFormat, *, read: Callable[[int], None]) -> None:
    """Read and convert the weights in place, module by module. Device thread only.

    Memory never holds more than the result and one module. read: called after each module with the
    number of bytes of its stored weights.
    """
    remaining_modules = named_modules(model)[::-1]
    while remaining_modules:  # a for loop would hold all quantized modules in memory until its end
        path, module = remaining_modules.pop()
        arrays = dict(_parameters_of(module))
        stored_bytes = sum(array.nbytes for array in arrays.values())
        if chosen.dequantizes(module):
            plain_module = _plain_module(module, chosen.dtype)
            mx.eval(plain_module.weight, *([plain_module.bias] if "bias" in plain_module else []))
            _set_at_path(model, path, plain_module)
        else:
            for name, array in arrays.items():
                arrays[name] = array.astype(chosen.target(module, name, array))
                if chosen.keeps(module):  # the kernels read rows
                    arrays[name] = mx.contiguous(arrays[name])
            mx.eval(list(arrays.values()))
            for name, array in arrays.items():
                _set_at_path(module, name, array)
            if chosen.keeps(module):
                in_use().keep_stored(module, chosen.dtype or _dtype_as_stored(module))
        del module, arrays
        if stored_bytes:
            read(stored_bytes)
    give_back_freed_memory()


def _dtype_as_stored(module: Any) -> mx.Dtype:
    """The floating-point type in which a module is stored: of its scales, if it is quantized."""
    dtype: mx.Dtype = module.scales.dtype if hasattr(module, "bits") else module.weight.dtype
    return dtype


def compute_dtype(model: Module) -> mx.Dtype:
    """The most frequent number format of the floating-point weights and scales, except for layers
    that the backend computes.
    """
    sizes: dict[mx.Dtype, int] = {}
    for module, name, array, _ in _weights(model, lambda _: False):
        is_computed_elsewhere = name in STORED and in_use().is_kept(module)
        if mx.issubdtype(array.dtype, mx.floating) and not is_computed_elsewhere:
            sizes[array.dtype] = sizes.get(array.dtype, 0) + array.size
    return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else mx.float32


def give_back_freed_memory() -> None:
    """Return unused memory to the system: MLX's cached buffers, and free parts of glibc's heap."""
    mx.clear_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def _plain_module(module: Any, dtype: mx.Dtype | None) -> Any:
    """The plain counterpart of a quantized module.

    Scales are converted to the wider format first: rounding each product to the format of the
    scales would change answers.
    """
    is_floating = mx.issubdtype(module.scales.dtype, mx.floating)
    target = dtype or (module.scales.dtype if is_floating else mx.bfloat16)
    scales = module.scales
    biases = module.get("biases")
    if biases is not None:
        scales = scales.astype(mx.float32)
        biases = biases.astype(mx.float32)
    quantization = {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
    global_scale = module.get("global_scale")
    if global_scale is None:
        weight = mx.dequantize(module.weight, scales, biases, **quantization, dtype=mx.float32)
    else:
        experts = range(module.weight.shape[0])
        expert_weights = [
            mx.dequantize(
                module.weight[expert],
                scales[expert],
                None,
                **quantization,
                global_scale=global_scale[expert],
                dtype=mx.float32,
            )
            for expert in experts
        ]
        weight = mx.stack(expert_weights)
    plain = _plain_modules()[type(module)]()
    plain.weight = weight.astype(target)
    if "bias" in module:
        plain.bias = module.bias.astype(_converted_dtype(module.bias, dtype))
    return plain.eval()


def _converted_dtype(array: mx.array, dtype: mx.Dtype | None) -> mx.Dtype:
    """The type of an array after floats are converted to `dtype`; None: they keep their types."""
    return dtype if dtype is not None and mx.issubdtype(array.dtype, mx.floating) else array.dtype


def named_modules(model: Any) -> list[tuple[str, Any]]:
    """The modules of a model, each with its path."""
    modules: list[tuple[str, Any]] = model.named_modules()
    return modules


def _modules(model: Module) -> Iterator[Any]:
    for _, module in named_modules(model):
        yield module


def _parameters_of(module: Any) -> Iterator[tuple[str, mx.array]]:
    """The module's own parameters, including those in lists and dicts, but not in inner modules."""
    for key, value in module.items():
        if not key.startswith("_"):  # in MLX, such names are not parameters
            yield from _arrays_in(value, key)


def _arrays_in(value: Any, path: str) -> Iterator[tuple[str, mx.array]]:
    """Yield the arrays in a parameter, with their paths: `path`, or for lists and dicts `path.key`."""
    if isinstance(value, mx.array):
        yield path, value
    elif isinstance(value, Module):
        return
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _arrays_in(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _arrays_in(inner, f"{path}.{index}")


def _set_at_path(module: Any, path: str, value: mx.array | Module) -> None:
    """Replace a parameter or an inner module. path: as MLX writes it, with dots and list indices."""
    *parents, name = path.split(".")
    holder = module
    for key in parents:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    if isinstance(holder, list):
        holder[int(name)] = value
    else:
        holder[name] = value


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
