"""LoRA adapters of a loaded model: one copy of the model's weights serves the model itself and all
of its adapters.

An adapter adds a low-rank product to the output of some layers, y = W x + scale · B (A x). The
layers of the model stay unchanged, but their classes are replaced by subclasses that compute the
layer's own output and then add the low-rank products of the adapters. So W x is computed once for
all rows of a batch. Parameters, their names and their number formats do not change, and a row
without an adapter keeps the layer's own output.

The rows of a forward pass may belong to several adapters if every adapted layer is a linear layer
that sees the rows of the batch in their order; the probe verifies that. In each layer, the matrices
A of all adapters are stacked along their ranks, and so are the matrices B. One product gives A x
for every row and every adapter. It is multiplied by a mask that contains the scale of the row's
adapter at its own ranks, and 0 elsewhere. A second product with all B then gives the sum for every
row. The number of operations does not depend on the number of adapters, and with ranks of 8 to 16,
the products of the other adapters cost little.

Otherwise, a step has one forward pass for each adapter. That is so if an adapter changes an
embedding, the output head, which may see only some of the rows, or experts, which see the rows in
another order.

DoRA also scales each output by m / ‖W + scale · B A‖, which depends only on weights and is computed
once when the adapter is loaded. (mlx-lm computes it in every forward pass.)

Device thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias, TypeVar

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding, QuantizedLinear

from holdfast.errors import ModelLoadError
from holdfast.models.adapter_folder import WEIGHTS, AdapterFiles
from holdfast.worker.engine import mlx_lm_hooks
from holdfast.worker.engine.mlx_lm_hooks import HEAD_NAMES
from holdfast.worker.engine.weight_format import named_modules

T = TypeVar("T")
# name and rank of each adapter that changes a layer; layers for which this is equal share a mask
Ranks: TypeAlias = tuple[tuple[str, int], ...]


class RowsOutOfOrder(RuntimeError):
    """A layer does not see the rows in order, so rows of several adapters cannot be mixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """The weights of one adapter in one layer, with the shapes that mlx-lm uses.

    magnitude: for DoRA, the factor of each output, [outputs]; None for LoRA.
    """

    a: mx.array
    b: mx.array
    scale: float
    magnitude: mx.array | None = None


class AdaptedLayer(Protocol):
    """A layer with the weights of all adapters that change it."""

    @property
    def can_mix(self) -> bool:
        """Whether one call may contain rows of several adapters (`RowAdapters`)."""
        ...

    def added(
        self, adapter: str, method: str, x: mx.array, y: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        """The output `y` of the layer for the input `x`, changed by one adapter. Lazy.

        method: the method of the layer that was called. args, kwargs: its further arguments.
        """
        ...

    def arrays(self) -> tuple[mx.array, ...]: ...


class AdaptedLinear:
    """The weights of all adapters for one linear layer."""

    def __init__(
        self, by_adapter: Mapping[str, LowRank], *, bias: mx.array | None, can_mix: bool
    ) -> None:
        """by_adapter: the weights of each adapter, by its name; a: [inputs, rank], b: [rank, outputs].
        bias: the bias of the layer, which DoRA does not scale; None if the layer has none.
        """
        self.can_mix = can_mix
        self.ranks: Ranks = tuple(
            (name, low_rank.b.shape[0]) for name, low_rank in by_adapter.items()
        )
        # stacked along the ranks: [all ranks, inputs] and [all ranks, outputs]
        self._a = mx.concatenate([low_rank.a.T for low_rank in by_adapter.values()])
        self._b = mx.concatenate([low_rank.b for low_rank in by_adapter.values()])
        self._factors = {
            name: low_rank.magnitude
            for name, low_rank in by_adapter.items()
            if low_rank.magnitude is not None
        }
        self._bias = bias
        mx.eval(self._a, self._b, self._factors)
        self._by_adapter: dict[str, LowRank] = {}
        start = 0
        for name, rank in self.ranks:
            rank_slice = slice(start, start + rank)  # a view: takes no memory
            scale = by_adapter[name].scale
            self._by_adapter[name] = LowRank(
                a=self._a[rank_slice].T, b=self._b[rank_slice], scale=scale
            )
            start += rank

    def added(
        self, adapter: str, method: str, x: mx.array, y: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        """The output `y` for the input `x`, [..., inputs], changed by one adapter. Lazy."""
        low_rank = self._by_adapter.get(adapter)
        if low_rank is None:
            return y
        adapted = y + (low_rank.scale * ((x @ low_rank.a) @ low_rank.b)).astype(x.dtype)
        factor = self._factors.get(adapter)
        return adapted if factor is None else self._scaled(adapted, factor.astype(x.dtype))

    def added_by_row(self, rows: RowAdapters, x: mx.array, y: mx.array, *, path: str) -> mx.array:
        """As `added`, but each row is changed by its own adapter. path: the layer's path in the
        model, for error messages. Lazy.
        """
        low_rank_products = (x @ self._a.T).reshape(-1, self._a.shape[0])
        if low_rank_products.shape[0] != rows.count:
            raise RowsOutOfOrder(f"{path} gets {low_rank_products.shape[0]} rows of {rows.count}")
        scales = rows.scales(self.ranks).astype(low_rank_products.dtype)
        # `where`, because 0 times infinity is NaN: another adapter may overflow on this row
        added_outputs = mx.where(scales != 0, low_rank_products * scales, 0) @ self._b
        adapted = y + added_outputs.reshape(y.shape).astype(x.dtype)
        if not self._factors:
            return adapted
        factor = rows.vectors_of_rows(self._factors, size=y.shape[-1]).reshape(y.shape)
        return self._scaled(adapted, factor.astype(x.dtype))

    def _scaled(self, adapted: mx.array, factor: mx.array) -> mx.array:
        """Scale an output by DoRA's factors, except for the layer's bias. factor: [outputs] or as
        y.
        """
        return (
            factor * adapted if self._bias is None else factor * adapted + (1 - factor) * self._bias
        )

    def arrays(self) -> tuple[mx.array, ...]:
        return (self._a, self._b, *self._factors.values())


@dataclass(frozen=True, slots=True)
class AdaptedExperts:
    """The weights of all adapters for the experts of one mixture-of-experts layer, by the name of the
    adapter. a: [experts, rank, inputs]; b: [experts, outputs, rank].
    """

    by_adapter: Mapping[str, LowRank]
    can_mix: bool = False

    def added(
        self,
        adapter: str,
        method: str,
        x: mx.array,
        y: mx.array,
        indices: mx.array,
        sorted_indices: bool = False,
    ) -> mx.array:
        """The experts' output `y` for `x`, changed by one adapter. Lazy.

        indices, sorted_indices: which experts get which rows, as for `mx.gather_mm`.
        """
        low_rank = self.by_adapter.get(adapter)
        if low_rank is None:
            return y
        product = x
        for weight in (low_rank.a, low_rank.b):
            product = mx.gather_mm(
                product, weight.swapaxes(-1, -2), rhs_indices=indices, sorted_indices=sorted_indices
            )
        return y + (low_rank.scale * product).astype(x.dtype)

    def arrays(self) -> tuple[mx.array, ...]:
        return _arrays_of(self.by_adapter)


@dataclass(frozen=True, slots=True)
class AdaptedEmbedding:
    """The weights of all adapters for an embedding, which may also be the output head, by the name of
    the adapter. a: [vocabulary, rank]; b: [rank, dimensions].
    """

    by_adapter: Mapping[str, LowRank]
    can_mix: bool = False

    def added(self, adapter: str, method: str, x: mx.array, y: mx.array) -> mx.array:
        """The output `y`, changed by one adapter: of the output head if `method` is "as_linear",
        otherwise of looking up the token ids `x`. Lazy.
        """
        low_rank = self.by_adapter.get(adapter)
        if low_rank is None:
            return y
        if method == "as_linear":
            return y + (low_rank.scale * ((x @ low_rank.b.T) @ low_rank.a.T)).astype(x.dtype)
        return y + (low_rank.scale * (low_rank.a[x] @ low_rank.b)).astype(y.dtype)

    def arrays(self) -> tuple[mx.array, ...]:
        return _arrays_of(self.by_adapter)


def _arrays_of(by_adapter: Mapping[str, LowRank]) -> tuple[mx.array, ...]:
    return tuple(array for low_rank in by_adapter.values() for array in (low_rank.a, low_rank.b))


class RowAdapters:
    """Which adapter each row of a forward pass uses, if the rows use different ones."""

    def __init__(self, runs: Sequence[tuple[str, int]], scales: Mapping[str, float]) -> None:
        """runs: the rows in order, as (name of the adapter, number of rows); an empty name means
        the model without an adapter. scales: the scale of each adapter, by its name.
        """
        self.count = sum(count for _, count in runs)  # of all rows
        self._runs = runs
        self._scales = scales
        self._masks: dict[Ranks, mx.array] = {}

    def scales(self, ranks: Ranks) -> mx.array:
        """The scale of each row's adapter at its own ranks, 0 at the others: [rows, all ranks]."""
        if ranks not in self._masks:
            table = [
                [
                    self._scales[name] * (row_adapter == name)
                    for name, rank in ranks
                    for _ in range(rank)
                ]
                for row_adapter in self._names
            ]
            self._masks[ranks] = mx.array(table)[self._indices]
        return self._masks[ranks]

    def vectors_of_rows(self, vectors: Mapping[str, mx.array], *, size: int) -> mx.array:
        """For each row, the vector of its adapter, or ones if there is none: [rows, size]."""
        ones = mx.ones((size,))
        return mx.stack([vectors.get(name, ones) for name in self._names])[self._indices]

    @cached_property
    def _names(self) -> tuple[str, ...]:
        """The different adapters of the rows; an empty name means none."""
        return tuple(dict.fromkeys(name for name, _ in self._runs))

    @cached_property
    def _indices(self) -> mx.array:
        """The index of each row's adapter in `_names`: int32 [rows]."""
        indices = {name: index for index, name in enumerate(self._names)}
        return mx.array([indices[name] for name, count in self._runs for _ in range(count)])


class Adapters:
    """The adapters of one model. Only forward passes within `applied` use them; all others compute
    what the model would compute without adapters.
    """

    def __init__(
        self, model: Module, files: Sequence[AdapterFiles], *, layers: Mapping[str, AdaptedLayer]
    ) -> None:
        """layers: the adapted layers, by their path in the model."""
        self.files = files
        self._scales = {each.name: each.scale for each in files}
        self._layers = layers
        # the adapter of all rows of the forward pass; empty: none, or several
        self._only_adapter = ""
        self._row_adapters: RowAdapters | None = None  # set if the rows have several adapters
        modules = dict(named_modules(model))
        for path, layer in layers.items():
            self._replace_class(modules[path], path, layer)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the adapters, in the order of the settings."""
        return tuple(self._scales)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for layer in self._layers.values() for array in layer.arrays())

    @property
    def can_mix(self) -> bool:
        """Whether all adapted layers support rows of several adapters in one forward pass."""
        return all(layer.can_mix for layer in self._layers.values())

    @contextmanager
    def applied(self, runs: Sequence[tuple[str, int]]) -> Iterator[None]:
        """A context in which forward passes use these adapters.

        runs: the rows of the batch in order, as (name of the adapter, number of rows); an empty
        name means the model without an adapter.
        """
        names = {name for name, _ in runs}
        if len(names) == 1:
            self._only_adapter = names.pop()
        else:
            self._row_adapters = RowAdapters(runs, self._scales)
        try:
            yield
        finally:
            self._only_adapter = ""
            self._row_adapters = None

    def call(self, name: str, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function whose forward passes use the adapter `name`; empty: none."""
        with self.applied([(name, 1)]):
            return function(*args, **kwargs)

    def _replace_class(self, module: Any, path: str, layer: AdaptedLayer) -> None:
        """Give a module a subclass whose methods add the products of the adapter that is applied."""
        plain_class = type(module)
        adapted_methods = {
            method: self._adapted_method(getattr(plain_class, method), method, path, layer)
            for method in ("__call__", "as_linear")
            if hasattr(plain_class, method)
        }
        module.__class__ = type(
            plain_class.__name__,
            (plain_class,),
            {**adapted_methods, "__module__": plain_class.__module__},
        )

    def _adapted_method(
        self, original: Callable[..., mx.array], method: str, path: str, layer: AdaptedLayer
    ) -> Callable[..., mx.array]:
        """Wrap a method of a layer's class. path: the layer's path, for error messages."""
        adapters = self

        def call(module: Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            y = original(module, x, *args, **kwargs)
            if adapters._only_adapter:
                return layer.added(adapters._only_adapter, method, x, y, *args, **kwargs)
            if adapters._row_adapters is None:
                return y
            assert isinstance(layer, AdaptedLinear), f"{path} does not mix adapters"
            return layer.added_by_row(adapters._row_adapters, x, y, path=path)

        return call


def attach(
    model: Module, files: Sequence[AdapterFiles], *, compute_dtype: mx.Dtype
) -> Adapters | None:
    """Load adapters and attach them to a model. Returns None without adapters.

    compute_dtype: the number format of the model. Raises ModelLoadError, with a message of one
    line, if an adapter does not fit the model.
    """
    if not files:
        return None
    modules = dict(named_modules(model))
    low_ranks_by_path: dict[str, dict[str, LowRank]] = {}
    for each in files:
        for path, low_rank in _load_adapter(each, modules, compute_dtype).items():
            low_ranks_by_path.setdefault(path, {})[each.name] = low_rank
    # each layer copies its weights; `pop` frees the originals layer by layer
    layers = {
        path: _adapted_layer(path, low_ranks_by_path.pop(path), modules[path])
        for path in tuple(low_ranks_by_path)
    }
    return Adapters(model, files, layers=layers)


def _load_adapter(
    files: AdapterFiles, modules: Mapping[str, Any], compute_dtype: mx.Dtype
) -> dict[str, LowRank]:
    """Load the weights of one adapter. Returns the weights for each layer that the adapter changes,
    by the layer's path in the model.
    """
    try:
        _check_fit(files, modules)
    except ModelLoadError as error:
        origin = f" (it was trained on {files.trained_on})" if files.trained_on else ""
        raise ModelLoadError(
            f"adapter {files.name} in {files.folder} does not fit this model: {error}{origin}"
        ) from None
    weights: dict[str, mx.array] = mx.load(str(files.folder / WEIGHTS))  # type: ignore[assignment]
    if compute_dtype == mx.float32:  # products would widen 16 bits in every step
        weights = {name: array.astype(mx.float32) for name, array in weights.items()}
    mx.eval(weights)
    low_ranks = {}
    for path in files.shapes:
        a = weights[f"{path}.lora_a"]
        b = weights[f"{path}.lora_b"]
        magnitude = None
        if files.kind == "dora":
            adapted_weight = _plain_weight(modules[path]) + (files.scale * b.T) @ a.T
            magnitude = weights[f"{path}.m"] / mx.linalg.norm(adapted_weight, axis=1)
        low_ranks[path] = LowRank(a=a, b=b, scale=files.scale, magnitude=magnitude)
        _check_finite(files, path, low_ranks[path])
    return low_ranks


def _check_finite(files: AdapterFiles, path: str, low_rank: LowRank) -> None:
    """Raise ModelLoadError if the weights of an adapter contain NaN or infinity, which would affect
    the other rows of a batch.
    """
    arrays = {"lora_a": low_rank.a, "lora_b": low_rank.b, "m": low_rank.magnitude}
    for name, array in arrays.items():
        if array is not None and not mx.isfinite(array).all().item():
            raise ModelLoadError(
                f"adapter {files.name} in {files.folder} is unusable: {path}.{name} contains NaN "
                "or infinity; its training diverged, or the file is damaged"
            )


def _adapted_layer(path: str, by_adapter: Mapping[str, LowRank], module: Any) -> AdaptedLayer:
    """Combine the weights of all adapters for one module. parts: those of each adapter, by name."""
    if _is_experts(module):
        return AdaptedExperts(by_adapter)
    if _is_embedding(module):
        return AdaptedEmbedding(by_adapter)
    can_mix = path.rsplit(".", 1)[-1] not in HEAD_NAMES
    return AdaptedLinear(by_adapter, bias=module.get("bias"), can_mix=can_mix)


def _plain_weight(module: Any) -> mx.array:
    """The weight of a linear layer, [outputs, inputs], dequantized if necessary."""
    if not isinstance(module, QuantizedLinear):
        weight: mx.array = module.weight
        return weight
    scales = module.scales
    biases = module.get("biases")
    if biases is not None:  # the affine mode; on a CPU, scales may have stayed in 16 bits
        scales = scales.astype(mx.float32)
        biases = biases.astype(mx.float32)
    return mx.dequantize(
        module.weight,
        scales,
        biases,
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


# -- whether an adapter fits


def _check_fit(files: AdapterFiles, modules: Mapping[str, Any]) -> None:
    """Raise ModelLoadError if an adapter does not fit the model. The message says what would."""
    for path, shapes in files.shapes.items():
        module = modules.get(path)
        if module is None:
            raise ModelLoadError(f"the model has no layer {path}{_count_of_layers(path, modules)}")
        if files.kind == "dora" and (_is_experts(module) or _is_embedding(module)):
            raise ModelLoadError(f"{path} is not a linear layer, so it supports lora, but not dora")
        rank = _rank_of(module, shapes)
        needed = _needed_shapes(module, rank, path)
        for array_name, shape in shapes.items():
            if shape != needed[array_name]:
                raise ModelLoadError(
                    f"{path}.{array_name} has the shape {_shape_text(shape)}, but the model needs "
                    f"{_shape_text(needed[array_name])}"
                )


def _count_of_layers(path: str, modules: Mapping[str, Any]) -> str:
    """The end of an error message about a missing layer: how many layers the model has, if the
    number in `path` is too high; otherwise empty.
    """
    parent_path, number, _ = _split_at_number(path)
    if not number:
        return ""
    numbers = {_split_at_number(each)[1] for each in modules if each.startswith(f"{parent_path}.")}
    count = len(numbers - {""})
    return f"; it has {count} layers" if 0 < count <= int(number) else ""


def _split_at_number(path: str) -> tuple[str, str, str]:
    """Split a path at the number of a layer: `model.layers.3.mlp` → `model.layers`, `3`, `mlp`."""
    names = path.split(".")
    number_index = next((index for index, name in enumerate(names) if name.isdigit()), len(names))
    return (
        ".".join(names[:number_index]),
        "".join(names[number_index : number_index + 1]),
        ".".join(names[number_index + 1 :]),
    )


def _rank_of(module: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The rank of an adapter in one layer. shapes: of its arrays in that layer, by their names."""
    shape = shapes["lora_b"]
    if not shape:
        return 0
    return shape[-1] if _is_experts(module) else shape[0]


def _needed_shapes(module: Any, rank: int, path: str) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's arrays in a layer of the model."""
    if not (_is_linear(module) or _is_experts(module) or _is_embedding(module)):
        raise ModelLoadError(
            f"{path} is a {type(module).__name__}; possible: linear layers, embeddings and experts"
        )
    *experts, rows, packed_columns = module.weight.shape
    columns = packed_columns * 32 // module.bits if "scales" in module else packed_columns
    if experts:
        return {"lora_a": (*experts, rank, columns), "lora_b": (*experts, rows, rank)}
    if _is_embedding(module):
        return {"lora_a": (rows, rank), "lora_b": (rank, columns)}
    return {"lora_a": (columns, rank), "lora_b": (rank, rows), "m": (rows,)}


def _shape_text(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "of a single number"


def _is_linear(module: Any) -> bool:
    return isinstance(module, Linear | QuantizedLinear)


def _is_embedding(module: Any) -> bool:
    return isinstance(module, Embedding | QuantizedEmbedding)


def _is_experts(module: Any) -> bool:
    """Whether a module has the weights of a layer's experts, in mlx-lm's classes."""
    mlx_lm_hooks.prepare()
    from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

    return isinstance(module, SwitchLinear | QuantizedSwitchLinear)
