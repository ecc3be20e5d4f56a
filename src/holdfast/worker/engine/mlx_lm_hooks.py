"""Hooks of Holdfast into unmodified mlx-lm: import, attention, and the vocabulary projection.

**Import.** `import mlx_lm` imports transformers (60 MB, 1 s) for tokenizers and a command line;
`mlx_lm.utils` imports huggingface_hub (20 MB). Models and loading need neither. So a stand-in
package, whose `__path__` is the real folder, is registered before the first import, and light
stand-ins replace the two heavy modules while `mlx_lm.utils` is imported. A stand-in becomes the
real module when other code in the process uses it. If mlx-lm was imported before, no stand-in is
registered for it.

**Attention.** Models bind `scaled_dot_product_attention` by name when their module is imported, so
the hook must be installed in `mlx_lm.models.base` before that. Modules that were imported earlier
(by users of the library) are patched.

**Projection.** A prefill chunk needs at most the logits of its last position, but a model's
`__call__` ends with the vocabulary projection of all positions. The class of the projection's
module is replaced by a subclass that first selects the wanted rows; parameters and their names do
not change. Rows can also be deferred and projected later, some at a time: the logits of 2,048
positions over 152,000 tokens take 1.2 GB. Since a model may change logits after its projection
(scale, cap), the later projection runs the model's `__call__` again, on one dummy token, and the
hook replaces that token's row by the rows that were deferred. Since MLX is lazy, no layer is
computed for the dummy token.
"""

from __future__ import annotations

import importlib
import importlib.util
import resource
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.nn.layers.base import Module

from holdfast.errors import ModelLoadError
from holdfast.wire.requests import RequestId

_ATTENTION = "scaled_dot_product_attention"
_ORIGINAL = "_holdfast_original_attention"
HEAD_NAMES = ("lm_head", "output", "embed_out", "head")
_PACKAGE = "mlx_lm"
_TOKENIZERS = "mlx_lm.tokenizer_utils"
_HUB = "huggingface_hub"


class AttentionShape(NamedTuple):
    """The shape of an attention call in which keys and values have the same head dimension."""

    heads: int
    kv_heads: int
    head_dimension: int
    dtype_bytes: int
    scale: float


_recorded: set[AttentionShape] | None = None  # set within `recorded_shapes`


@contextmanager
def recorded_shapes() -> Iterator[set[AttentionShape]]:
    """Collect the shapes of all attention calls within the block whose keys and values are plain
    arrays with the same head dimension.
    """
    global _recorded
    _recorded = shapes = set[AttentionShape]()
    try:
        yield shapes
    finally:
        _recorded = None


def _with_hook(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Wrap mlx-lm's attention function. A cache view that computes attention itself returns, in place
    of the keys, an object with the method `attend`; the wrapper calls that method.
    """

    def scaled_dot_product_attention(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if (
            _recorded is not None
            and isinstance(keys, mx.array)
            and keys.shape[-1] == values.shape[-1]
        ):
            shape = AttentionShape(
                queries.shape[1], keys.shape[1], queries.shape[3], queries.dtype.size, scale
            )
            _recorded.add(shape)
        if hasattr(keys, "attend"):
            attended: mx.array = keys.attend(queries, scale=scale, mask=mask, sinks=sinks)
            return attended
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    setattr(scaled_dot_product_attention, _ORIGINAL, original)
    return scaled_dot_product_attention


def install(models: str = "mlx_lm.models") -> None:
    """Replace the attention function of mlx-lm's models, or of another package with the same function,
    by one that calls `attend` of our views. Idempotent; call before a model module is imported.
    """
    base = importlib.import_module(f"{models}.base")
    original = getattr(base, _ATTENTION)
    if hasattr(original, _ORIGINAL):
        return
    hook = _with_hook(original)
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{models}.") and getattr(module, _ATTENTION, None) is original:
            setattr(module, _ATTENTION, hook)


def prepare_vision() -> None:
    """Import mlx-vlm, and install the attention hook in its models. Idempotent."""
    prepare()
    with _open_files_limit_unchanged():
        importlib.import_module("mlx_vlm.utils")
        install("mlx_vlm.models")


class _ThreadState(threading.local):
    is_only_graph = False  # whether the thread is inside `only_graph`


_thread_state = _ThreadState()


@contextmanager
def only_graph() -> Iterator[None]:
    """Within the block, this thread runs a model for its graph, most of which is never evaluated:
    layers must not compute anything themselves.
    """
    was_only_graph = _thread_state.is_only_graph
    _thread_state.is_only_graph = True
    try:
        yield
    finally:
        _thread_state.is_only_graph = was_only_graph


def is_only_graph() -> bool:
    """Whether this thread is inside `only_graph`."""
    return _thread_state.is_only_graph


class ProjectionHook:
    """A hook into the vocabulary projection of one model, which computes logits only for selected
    rows (token positions). Device thread only.
    """

    def __init__(self, model: Any) -> None:
        """Hook into the model's output head, or into its embedding if that is also the head."""
        self._model = model
        self._rows: mx.array | None = None  # int32: the rows to project; None: all
        self._deferred_rows: mx.array | None = None  # int32: the rows to project later
        self._deferred: mx.array | None = None  # their hidden states, [rows, hidden]
        # hidden states that `project` has the model project in place of its own, [rows, hidden]
        self._replacement: mx.array | None = None
        self.used = False  # whether the last forward pass used the hook
        # both set by the probe after it has verified that `project` gives the model's logits
        self.can_project_later = False
        self.hidden_size = 0
        self._original_classes: list[tuple[Module, type[Module]]] = []
        # a module within a numbered layer may have such a name, too, but is no output head
        for name, part in model.named_modules():
            path = name.split(".")
            if (
                path[-1] in HEAD_NAMES
                and "weight" in part
                and not any(part_name.isdigit() for part_name in path)
            ):
                self._hook_into(part, "__call__")
            elif hasattr(type(part), "as_linear"):
                self._hook_into(part, "as_linear")

    def _hook_into(self, part: Module, method: str) -> None:
        """Replace the projection, a method of `part`, by one that computes only the selected rows."""
        original = getattr(type(part), method)
        hook = self

        def project(module: Module, x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            result: mx.array = original(module, hook._rows_to_project(x), *args, **kwargs)
            return result

        self._original_classes.append((part, type(part)))
        part.__class__ = type(
            type(part).__name__,
            (type(part),),
            {method: project, "__module__": type(part).__module__},
        )

    def _rows_to_project(self, x: mx.array) -> mx.array:
        """What to project in place of the hidden states `x`, [batch, tokens, hidden]. Only the first
        projection of a forward pass is changed.
        """
        if self.used or (
            self._rows is None and self._deferred_rows is None and self._replacement is None
        ):
            return x
        self.used = True
        if self._replacement is not None:
            return self._replacement[:, None]
        rows = x.reshape(-1, x.shape[-1])
        if self._deferred_rows is not None:
            self._deferred = rows[self._deferred_rows]
        return x if self._rows is None else rows[self._rows][:, None]

    def remove(self) -> None:
        """Give the modules their original classes back."""
        for part, original_class in reversed(self._original_classes):
            part.__class__ = original_class
        self._original_classes.clear()

    @contextmanager
    def selecting(
        self, rows: mx.array | None, *, deferred: mx.array | None = None
    ) -> Iterator[ProjectionHook]:
        """Within the block, the model projects only `rows`; its logits are [rows, 1, vocabulary].

        rows: indices into the flattened positions of the batch; None: all positions, in the usual
        shape. deferred: rows whose hidden states `take_deferred` returns afterwards. `.used` tells
        whether the model's projection went through the hook.
        """
        self._rows = rows
        self._deferred_rows = deferred
        self._deferred = None
        self.used = False
        try:
            yield self
        finally:
            self._rows = self._deferred_rows = None

    def take_deferred(self) -> mx.array | None:
        """Return the hidden states of the rows that were deferred, [rows, hidden], and forget
        them. Returns None if the projection did not go through the hook.
        """
        deferred = self._deferred
        self._deferred = None
        return deferred

    def project(self, hidden: mx.array) -> mx.array:
        """The logits, [rows, vocabulary], of hidden states that were deferred, [rows, hidden].

        Lazy. Requires `can_project_later`.
        """
        self._replacement = hidden
        self.used = False
        try:
            with only_graph():
                logits: mx.array = self._model(mx.zeros((1, 1), dtype=mx.int32))
        finally:
            self._replacement = None
        return logits.reshape(-1, logits.shape[-1])


def _unchanged(logits: mx.array) -> mx.array:
    """The projection of `DeferredLogits` whose source is logits already."""
    return logits


@dataclass(frozen=True, slots=True)
class DeferredLogits:
    """Logits of consecutive positions, computed on demand.

    source: [positions, …], which `project` turns into logits, [positions, vocabulary].
    """

    source: mx.array
    project: Callable[[mx.array], mx.array] = _unchanged

    def of(self, start: int, stop: int) -> mx.array:
        """The logits of positions `start` to `stop` (exclusive). Lazy."""
        return self.project(self.source[start:stop])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLogits:
    """The result of a forward pass.

    to_sample: logits to sample from, [rows, vocabulary], in the order of the spans; a span that
        verifies a draft has several rows. None if no span samples.
    scored: logits of prompts to be scored. hidden: hidden states of prompts to be embedded, [rows,
        hidden] each.
    is_computed: everything is evaluated, also the states of the sequences.
    """

    to_sample: mx.array | None = None
    scored: Mapping[RequestId, DeferredLogits] = field(default_factory=dict)
    hidden: Mapping[RequestId, mx.array] = field(default_factory=dict)
    is_computed: bool = False


def prepare() -> None:
    """Install the attention hook, and make `mlx_lm.models.*` importable without transformers and
    huggingface_hub. Idempotent.
    """
    if _PACKAGE not in sys.modules:
        _register_stand_in()
    with _open_files_limit_unchanged():
        install()


def mlx_lm_utils() -> ModuleType:
    """Return `mlx_lm.utils`, importing it without transformers and huggingface_hub."""
    prepare()
    name = f"{_PACKAGE}.utils"
    if name in sys.modules:
        return sys.modules[name]
    tokenizers = ModuleType(_TOKENIZERS)
    tokenizers.__dict__.update(TokenizerWrapper=object, load=_real_tokenizer_load)
    hub = ModuleType(_HUB)
    hub.__dict__.update(snapshot_download=_real_snapshot_download)
    with _open_files_limit_unchanged(), _registered_stand_ins(tokenizers, hub):
        return importlib.import_module(name)


def mlx_lm_version() -> str:
    """The version of the mlx-lm in use."""
    prepare()
    version: str = sys.modules[_PACKAGE].__version__
    return version


def _register_stand_in() -> None:
    """Register an empty package in place of mlx-lm, which runs the real `__init__` when an
    attribute is needed. Raises ModelLoadError if mlx-lm is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.submodule_search_locations is None or spec.loader is None:
        raise ModelLoadError("the package mlx-lm is not installed")
    package = importlib.util.module_from_spec(spec)

    def become_real(name: str) -> Any:
        """Run the real `__init__` when an attribute is missing, and return that attribute."""
        if name.startswith("__"):
            raise AttributeError(f"module {_PACKAGE!r} has no attribute {name!r}")
        package.__dict__.pop("__getattr__", None)
        with _open_files_limit_unchanged():
            _run_real_init(spec, package)
        return getattr(package, name)

    package.__dict__["__getattr__"] = become_real
    sys.modules[_PACKAGE] = package
    package.__dict__["__version__"] = importlib.import_module(f"{_PACKAGE}._version").__version__


def _run_real_init(spec: ModuleSpec, package: ModuleType) -> None:
    """Run the real `__init__` of mlx-lm, and give `mlx_lm.utils` the real tokenizer class."""
    assert spec.loader is not None
    utils = sys.modules.get(f"{_PACKAGE}.utils")
    if utils is not None:
        real = importlib.import_module(_TOKENIZERS)
        utils.__dict__.update(TokenizerWrapper=real.TokenizerWrapper, _load_tokenizer=real.load)
    spec.loader.exec_module(package)


def _real_tokenizer_load(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module(_TOKENIZERS).load(*args, **kwargs)


def _real_snapshot_download(*args: Any, **kwargs: Any) -> Any:
    return importlib.import_module(_HUB).snapshot_download(*args, **kwargs)


@contextmanager
def _registered_stand_ins(*modules: ModuleType) -> Iterator[None]:
    """Register stand-ins for modules that are not imported yet; remove them after the block."""
    registered = [module for module in modules if module.__name__ not in sys.modules]
    sys.modules.update({module.__name__: module for module in registered})
    try:
        yield
    finally:
        for module in registered:
            if sys.modules.get(module.__name__) is module:
                del sys.modules[module.__name__]


@contextmanager
def _open_files_limit_unchanged() -> Iterator[None]:
    """Prevent changes of the open-files limit within the block: when mlx-lm is imported, it lowers
    the limit, and the hard limit to 4,096.
    """
    real_setrlimit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = real_setrlimit
