"""What may compute in place of MLX on one kind of device: the only place where the engine asks.

`Backend` itself replaces nothing, which is the way of a GPU. The worker chooses the backend of its
device before it loads a model (`use`); as MLX's default device, it is one for the whole process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx.nn.layers.base import Module

from holdfast.wire.requests import SamplingParams
from holdfast.worker.engine import code_attention
from holdfast.worker.kv.layer import LayerKV
from holdfast.worker.kv.quantized import Dequantize


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpan:
    """The queries of one sequence's span, and all keys and values that its last query sees."""

    queries: mx.array  # scaled, [1, heads, tokens, head_dim]
    # adjoining: keys [1, kv_heads, tokens, head_dim], values […, value_dim]
    parts: Sequence[tuple[mx.array, mx.array]]
    window: int | None  # how many positions a query sees, including its own; None: all

    @property
    def tokens(self) -> int:
        """Queries per head."""
        return self.queries.shape[2]

    @property
    def seen_tokens(self) -> int:
        return sum(keys.shape[2] for keys, _ in self.parts)

    @property
    def scores(self) -> int:
        """The number of attention scores (products of a query and a key) over all heads."""
        return self.queries.shape[1] * self.tokens * self.seen_tokens


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """How a row is sampled. Rows of one kind are sampled together, by the same operations.

    nucleus: whether top-p is on.
    """

    greedy: bool = False
    candidates: int = 0  # at least the row's top-k; 0: no top-k
    nucleus: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Log-probabilities at n positions.

    chosen: those of one given token per position, fp32 [n]. top: the k most likely tokens, the
    likeliest first, as ids, uint32 [n, k], and log-probabilities, fp32 [n, k]; None if k is 0.
    """

    chosen: mx.array
    top: tuple[mx.array, mx.array] | None = None

    def arrays(self) -> list[mx.array]:
        return [self.chosen, *(self.top or ())]


class SampleRows(Protocol):
    """Samples one token per row, uint32 [rows], as `token_sampling.sample_tokens` does. Evaluates the
    logits, fp32 [rows, vocab]. keys: the random key of each row (`token_sampling.random_key`).
    """

    def __call__(
        self,
        logits: mx.array,
        *,
        params: Sequence[SamplingParams],
        keys: Sequence[tuple[int, int]],
    ) -> mx.array: ...


class StepOperations:
    """Computes the operations of a model's steps. This default calls MLX's own operations."""

    def share(self, offset: mx.array) -> mx.array:
        """Announce the positions of the step's rows, int [rows], which every layer will get. A
        subclass may return an array for which it reuses what it computes from them. Returns them.
        """
        return offset

    def step(self) -> AbstractContextManager[None]:
        """A context within which one step is laid out."""
        return nullcontext()


class Backend:
    """What MLX computes by itself. Subclasses replace parts. Device thread only.

    composes_attention: whether attention is composed of matrix products because MLX lacks a fused
        kernel. Attention then takes keys and values in several buffers, and is computed here.
    fuses_operations: whether `mx.compile` pays for elementwise operations.
    runs_ahead: whether to dispatch a step before the previous one is collected.
    prefers_float32: whether only float32 products are fast, so that weights are converted to it,
        and dequantized, if memory allows.
    step_tokens: how many tokens a step should have at most.
    dequantize: dequantizes keys and values; None: MLX does it.
    """

    composes_attention: bool = False
    fuses_operations: bool = True
    runs_ahead: bool = True
    prefers_float32: bool = False
    step_tokens: int = 2048
    dequantize: Dequantize | None = None

    # -- attention

    def reads_codes(self) -> bool:
        """Whether MLX decodes over quantized keys and values without dequantizing them."""
        return code_attention.is_right()

    def attend_rows(
        self,
        layers: Sequence[LayerKV],
        seen_tokens: Sequence[int],
        queries: mx.array,
        *,
        sinks: mx.array | None,
    ) -> mx.array | None:
        """Attention of one query per sequence over the last `seen_tokens` positions of each; None:
        MLX computes it.

        queries: scaled, [rows, heads, 1, head_dim]. sinks: [heads]. Returns [rows, heads, 1,
        value_dim].
        """
        return None

    def attend_spans(
        self, spans: Sequence[AttentionSpan], *, sinks: mx.array | None
    ) -> list[mx.array] | None:
        """Causal attention of each span over its own keys, [1, heads, tokens, value_dim] each;
        None: MLX computes it.
        """
        return None

    def attend_one(
        self, queries: mx.array, parts: Sequence[tuple[mx.array, mx.array]]
    ) -> mx.array | None:
        """Attention of one query per head, composed of MLX operations; None: MLX's attention function
        computes it.

        queries: scaled, [1, heads, 1, head_dim]. parts: adjoining keys and values, [1, kv_heads,
        tokens, head_dim].
        """
        return None

    def describe_attention(self, model: Module) -> str:
        """What computes the attention of a model's decode steps, and why."""
        return "MLX's fused kernel"

    def eager(self) -> Backend:
        """This backend, but computing attention itself wherever it can, even if slower. For tests."""
        return self

    # -- steps

    def operations(self, *, transposes_once: bool) -> StepOperations:
        """How the operations of one model's steps are computed.

        transposes_once: whether a linear layer may keep its weight transposed. This requires that no
            input has unusual strides, as in some recurrent layers, for which BLAS rounds differently.
        """
        return StepOperations()

    def whole_steps(self, model: Module) -> Callable[[Sequence[Any]], Any] | None:
        """What computes whole steps of a model: from spans (SequenceSpan) to their logits
        (StepLogits), or to None if MLX has to compute that step. None: nothing does.
        """
        return None

    # -- sampling

    def sampler_of(self, kind: SamplingKind, *, vocab_size: int) -> SampleRows | None:
        """What samples rows of this kind; None: MLX. The answer is the same for all rows of a kind,
        so that no sampled token depends on the other rows of a batch.
        """
        return None

    def score(self, logits: mx.array, token_ids: mx.array, *, top_logprobs: int) -> Scores | None:
        """Log-probabilities of one given token per row, and of each row's `top_logprobs` likeliest
        tokens; None: MLX computes them.

        logits: fp32 [n, vocab]; token_ids: int [n].
        """
        return None

    # -- weights

    def stored_refused(self) -> str:
        """Why the backend cannot compute layers from their weights as stored in the file (for
        example quantized); empty if it can.
        """
        return "MLX computes all layers"

    def keeps_stored(self, module: Module) -> bool:
        """Whether `keep_stored` can be called for a module. Evaluates nothing."""
        return False

    def keep_stored(self, module: Module, dtype: mx.Dtype) -> None:
        """Make a module compute with its stored weights. Requires `keeps_stored`, and
        that `stored_refused` is empty.

        The module's weights are evaluated. dtype: the format of the embeddings that it returns.
        """
        raise NotImplementedError(self.stored_refused())

    def is_kept(self, module: Module) -> bool:
        """Whether `keep_stored` was called for this module."""
        return False

    def prepare(self, model: Module, dtype: mx.Dtype) -> None:
        """Get ready to compute whole steps of a loaded model. dtype: its number format."""


_in_use = Backend()


def use(backend: Backend) -> None:
    """Let this backend compute for all models that are loaded from now on."""
    global _in_use
    _in_use = backend


def in_use() -> Backend:
    """The backend of this process."""
    return _in_use
